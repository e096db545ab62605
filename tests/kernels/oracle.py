"""Paged attention in float64 numpy, one token after the other."""

import numpy as np


def paged_attention_oracle(query, pool, block_tables, context_lens, query_starts, *, scale):
    """Arguments as in `AttentionMetadata`; pool [N, B, 2K, D] interleaved by head."""
    num_heads, head_dim = query.shape[1:]
    group = num_heads // (pool.shape[2] // 2)
    out = np.zeros(query.shape, np.float64)
    for row, context_len in enumerate(context_lens):
        start, end = query_starts[row], query_starts[row + 1]
        tokens = pool[block_tables[row]].reshape(-1, *pool.shape[2:]).astype(np.float64)
        for token in range(start, end):
            visible = context_len - (end - token) + 1
            for head in range(num_heads):
                key = tokens[:visible, 2 * (head // group)]
                value = tokens[:visible, 2 * (head // group) + 1]
                scores = key @ query[token, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[token, head] = weights / weights.sum() @ value
    assert out.shape[-1] == head_dim
    return out
