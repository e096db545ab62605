"""XLA's path reads only the tiles that a sliding window reaches."""

import jax
import pytest

from pallas_kernels.paged_attention import xla
from tests.kernels.checks import check, heads


@pytest.fixture
def count_tiles(monkeypatch):
    """Numbers of the tiles that were gathered, in every call of `attend`."""
    gathered = []
    gather = xla._gather_tiles

    def gather_and_note(pool, plan, tiles, *rest):
        rows, numbers = tiles
        is_real = rows < plan.context_lens.shape[0] - 1
        jax.debug.callback(lambda real, all: gathered.extend(all[real].tolist()), is_real, numbers)
        return gather(pool, plan, tiles, *rest)

    monkeypatch.setattr(xla, "_gather_tiles", gather_and_note)
    return gathered


# In:  a decode at context 1000 with a window of 100 sees positions 900..999.
# Out: tiles 14 and 15 of 64 tokens each.
@pytest.mark.parametrize(
    "rows,window,tiles",
    [
        ([(1, 1000), (1, 40)], 100, [0, 14, 15]),
        ([(64, 1000)], 100, [13, 14, 15]),
        ([(1, 200)], 1000, [0, 1, 2, 3]),
    ],
    ids=["decodes", "prefill", "wider than the context"],
)
def test_tiles_outside_of_the_window_are_not_read(count_tiles, rows, window, tiles):
    check("xla", rows, heads(2, 16, has_window=True), window=window)
    jax.effects_barrier()
    assert sorted(count_tiles) == tiles
