"""The block pool under random operations, against a model that counts holders."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.scheduling.block_pool import SINK_BLOCK, BlockPool

pytestmark = pytest.mark.smoke

NUM_BLOCKS = 12


class BlockPoolMachine(RuleBasedStateMachine):
    """O-04, O-07: no block is lost, doubled or freed twice, and none is found under the digest of
    what was in it before, whatever the order of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # what a registered block holds, while it does
        self.num_registered = 0

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            assert len(set(blocks)) == count and SINK_BLOCK not in blocks
            for block in blocks:
                self.contents.pop(block, None)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.pool.retain(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), is_new=st.booleans())
    def register(self, data: st.DataObject, is_new: bool) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        if block in self.contents:
            return
        known = sorted(self.contents.values())
        if is_new or not known:
            self.num_registered += 1
            digest = self.num_registered.to_bytes(16, "little")
            assert self.pool.register(block, digest)
            self.contents[block] = digest
        else:
            assert not self.pool.register(block, data.draw(st.sampled_from(known)))

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        block, digest = data.draw(st.sampled_from(sorted(self.contents.items())))
        assert self.pool.find(digest) == block
        self.pool.retain([block])
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @invariant()
    def totals_agree(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.usage == len(held) / NUM_BLOCKS
        for number in range(1, self.num_registered + 1):
            digest = number.to_bytes(16, "little")
            block = self.pool.find(digest)
            assert block is None or self.contents[block] == digest


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=50)


def test_releasing_a_free_block_raises():
    """O-04"""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(blocks[:1])
    pool.check_integrity([])


def test_integrity_check_sees_a_lost_block():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="0 holders"):
        pool.check_integrity([blocks[:1]])


def test_order_of_reuse():
    """Blocks of no use first, then those freed first."""
    pool = BlockPool(4)
    first, second, third, fourth = pool.allocate(4)
    for block in (first, second, third):
        pool.register(block, bytes([block]))
    pool.release([second])
    pool.release([third, first])
    pool.release([fourth])
    pool.retain([third])
    pool.release([third])
    assert pool.allocate(4) == [fourth, second, first, third]
    assert all(pool.find(bytes([block])) is None for block in (first, second, third))
