"""Our TPU kernel against the one that comes with JAX, both interpreted."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.primitives import swap_p
from jax._src.state import discharge
from jax.experimental import pallas as pl

from pallas_kernels.testing import TOLERANCES, AttentionShape, ragged_batch
from tests.kernels.bundled_tpu_attention import BundledTpuAttention
from tests.kernels.checks import fill_pool, make_backend, write_and_attend

# Which versions can interpret it differs, so it is done with the one that most tests run with.
pytestmark = pytest.mark.slow

MIXED = [(1, 20), (1, 33), (1, 100), (17, 17), (5, 140), (40, 64)]


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel has no option for it. Pallas cannot interpret a store at an index that is a plain
    number, and this kernel has such ones: they become arrays."""
    store = discharge._discharge_rules[swap_p]

    def store_at_arrays(in_avals, out_avals, *arguments, args_tree, **options):
        ref, transforms, *rest = args_tree.unflatten(arguments)
        *others, last = transforms
        indices = [jnp.int32(each) if isinstance(each, int) else each for each in last.indices]
        last = replace(last, indices=tuple(indices))
        arguments, args_tree = jax.tree.flatten((ref, (*others, last), *rest))
        (ref, *_), out = store(in_avals, out_avals, *arguments, args_tree=args_tree, **options)
        return (ref,) + (None,) * (len(in_avals) - 1), out

    monkeypatch.setitem(discharge._discharge_rules, swap_p, store_at_arrays)
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


@pytest.mark.parametrize(
    "rows,block_size,num_heads,num_kv_heads,dtype,options",
    [
        (MIXED, 16, 8, 2, "float32", {}),
        (MIXED, 32, 8, 4, "float32", {"window": 30}),
        (MIXED, 16, 8, 1, "bfloat16", {"softcap": 5.0}),
        ([(1, 300), (1, 1), (1, 17), (1, 128)], 16, 32, 8, "bfloat16", {}),
        ([(64, 64), (33, 100)], 64, 4, 2, "float32", {"softcap": 3.0, "window": 50}),
    ],
)
def test_answers_are_equal(rows, block_size, num_heads, num_kv_heads, dtype, options, interpreted):
    """It takes head dimensions that are multiples of 128. With more than four KV heads of float32
    it goes over heads in several rounds, and interpreted so, it gets the first token wrong."""
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128)
    options = {"scale": shape.score_scale, **options}
    batch = ragged_batch(
        np.random.default_rng(0), rows, shape, block_size=block_size, dtype=dtype, pad_tokens=2
    )
    theirs = BundledTpuAttention(fetch_blocks=2, tile_tokens=8)
    pool = jnp.nan_to_num(fill_pool(theirs, batch))  # it reads what is not there
    expected = theirs.attend(jnp.array(batch.query), pool, theirs.plan(batch.metadata), **options)
    decode_only = all(query_len == 1 for query_len, _ in rows)
    ours = make_backend("pallas-tpu", shape)
    out, _ = write_and_attend(ours, batch, decode_only=decode_only, **options)
    real = slice(batch.num_tokens)
    out, expected = (np.asarray(each, np.float64)[real] for each in (out, expected))
    np.testing.assert_allclose(out, expected, atol=TOLERANCES[dtype], rtol=0)
