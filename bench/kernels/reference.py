"""Right answers of the benchmark of kernels: a contender that differs is not timed."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from jpaged.bench.kernels.cases import Case, CaseInputs
from jpaged.bench.kernels.contenders import Contender, as_numpy
from jpaged.bench.kernels.timing import median_seconds
from pallas_kernels.testing import TOLERANCES

REFERENCE_ROWS = 4


class WrongAnswer(Exception):
    """A wrong answer. error: largest difference from the right one, perhaps NaN."""

    def __init__(self, error: float) -> None:
        super().__init__(f"wrong by {error:.2g}, so not timed")
        self.error = error


def reference(case: Case, inputs: CaseInputs) -> Float[np.ndarray, "T H D"]:
    """Compute the right answer over the first pool."""
    attend = jax.jit(
        lambda query, pool: dense_attention(
            case,
            inputs,
            query,
            pool,
            dtype=jnp.dtype("float32"),
            num_rows_at_once=REFERENCE_ROWS,
        )
    )
    return np.asarray(attend(inputs.query, inputs.pools[0]))


def checked_seconds(
    case: Case,
    inputs: CaseInputs,
    contender: Contender,
    expected: Float[np.ndarray, "T H D"],
    *,
    seconds: float,
) -> tuple[float, float]:
    """Check a contender, then time it for about `seconds`.

    Returns the largest difference from the right answer, and the seconds of attention over one
    pool. Raises `WrongAnswer`.
    """
    error = _largest_error(case, contender, expected)
    if not error <= TOLERANCES[case.dtype.name]:
        raise WrongAnswer(error)
    taken = median_seconds(contender.run, contender.wait, seconds=seconds)
    return error, taken / len(inputs.pools)


def _largest_error(case: Case, contender: Contender, expected: Float[np.ndarray, "T H D"]) -> float:
    """Largest difference from the right answer; NaN if an answer has a NaN."""
    answers = [contender.run()[0]]
    if contender.run_poisoned is not None:
        answers.append(contender.run_poisoned())
    contender.wait(answers)
    errors = [np.abs(as_numpy(answer, case) - expected).max() for answer in answers]
    return float(np.max(errors))


def dense_attention(
    case: Case,
    inputs: CaseInputs,
    query: Float[Array, "T H D"],
    pool: Num[Array, "N B K2 D"],
    *,
    dtype: jnp.dtype,
    num_rows_at_once: int,
) -> Float[Array, "T H D"]:
    """Gather all tokens of the sequences, padded to the longest, and attend over all of them.

    This is what one would write without paged attention; in float32 it is the reference.

    num_rows_at_once: of decodes; chunks of prompts come one after the other.
    """
    step, num_decodes = num_rows_at_once, case.num_decodes
    groups = [range(row, min(row + step, num_decodes)) for row in range(0, num_decodes, step)]
    groups += [range(row, row + 1) for row in range(num_decodes, len(case.rows))]
    answers = []
    for rows in groups:
        first, query_len = inputs.query_starts[rows.start], case.rows[rows.start][0]
        chunk = query[first : first + query_len * len(rows)].astype(dtype)
        chunk = chunk.reshape(len(rows), query_len, *query.shape[1:])
        answer = _dense_rows(case, inputs, chunk, pool, slice(rows.start, rows.stop))
        answers.append(answer.reshape(-1, *query.shape[1:]))
    return jnp.concatenate(answers)


def _dense_rows(
    case: Case,
    inputs: CaseInputs,
    query: Float[Array, "S Q H D"],
    pool: Num[Array, "N B K2 D"],
    rows: slice,
) -> Float[Array, "S Q H D"]:
    (num_rows, query_len, _, head_dim), options = query.shape, inputs.options
    lengths = inputs.context_lens[rows]
    tables = inputs.block_tables[rows, : -(-lengths.max() // case.block_size)]
    tokens = pool[tables].reshape(num_rows, -1, *pool.shape[2:]).astype(query.dtype)
    if "kv_scales" in options:
        tokens = tokens * options["kv_scales"].astype(query.dtype)[None, None, :, None]
    key, value = tokens[:, :, 0::2], tokens[:, :, 1::2]
    grouped = query.reshape(num_rows, query_len, case.shape.num_kv_heads, -1, head_dim)
    exact = {"precision": "highest", "preferred_element_type": jnp.float32}
    scores = jnp.einsum("sqkgd,slkd->skgql", grouped, key, **exact) * case.shape.score_scale
    if case.shape.softcap is not None:
        scores = case.shape.softcap * jnp.tanh(scores / case.shape.softcap)
    own = lengths[:, None] - query_len + np.arange(query_len)[None]
    distances = own[:, :, None] - np.arange(key.shape[1])[None, None]
    visible = (distances >= 0) & (distances < (case.window or key.shape[1]))
    scores = jnp.where(jnp.array(visible)[:, None, None], scores, -jnp.inf)
    weights = _softmax(scores, options.get("sinks"))
    answer = jnp.einsum("skgql,slkd->sqkgd", weights.astype(query.dtype), value, **exact)
    return answer.astype(query.dtype).reshape(query.shape)


def _softmax(
    scores: Float[Array, "S K G Q L"], sinks: Float[Array, "H"] | None
) -> Float[Array, "S K G Q L"]:
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    num_rows, num_kv_heads, group, query_len, _ = scores.shape
    sinks = sinks.astype(scores.dtype).reshape(1, num_kv_heads, group, 1, 1)
    sinks = jnp.broadcast_to(sinks, (num_rows, num_kv_heads, group, query_len, 1))
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
