"""Paged attention in float64 numpy, one sequence after the other."""

import numpy as np


def paged_attention_oracle(batch, *, scale, window=None, softcap=None, sinks=None):
    """`batch` is a `RaggedBatch`; the options are those of `PagedAttention.attend`."""
    pool, query = batch.pool.astype(np.float64), batch.query.astype(np.float64)
    if batch.kv_scales is not None:
        pool = pool * batch.kv_scales[:, None]
    num_kv_heads = pool.shape[2] // 2
    group = query.shape[1] // num_kv_heads
    out = np.zeros(query.shape, np.float64)
    for row, context_len in enumerate(batch.context_lens):
        start, end = batch.query_starts[row], batch.query_starts[row + 1]
        tokens = pool[batch.block_tables[row]].reshape(-1, *pool.shape[2:])[:context_len]
        tokens = np.nan_to_num(tokens)  # what is outside of the window may be gone
        positions = np.arange(context_len)
        own_positions = positions[context_len - (end - start) :][:, None]
        visible = positions <= own_positions
        if window is not None:
            visible &= positions > own_positions - window
        for head in range(query.shape[1]):
            first = 2 * (head // group)
            keys, values = tokens[:, first], tokens[:, first + 1]
            scores = query[start:end, head] @ keys.T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(visible, scores, -np.inf)
            maximum = scores.max(axis=-1, keepdims=True, initial=-1e30)
            weights = np.exp(scores - maximum)
            denominator = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                denominator += np.exp(np.float64(sinks[head]) - maximum)
            out[start:end, head] = weights / denominator @ values
    return out
