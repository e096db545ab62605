"""Paged attention in float64 numpy, one token after the other."""

import numpy as np


def paged_attention_oracle(query, pool, block_tables, context_lens, query_starts, *, scale):
    """Arguments as in `AttentionMetadata`; pool [N, B, 2K, D] interleaved by head."""
    num_kv_heads = pool.shape[2] // 2
    out = np.zeros(query.shape, np.float64)
    for row, context_len in enumerate(context_lens):
        start, end = query_starts[row], query_starts[row + 1]
        tokens = pool[block_tables[row]].reshape(-1, *pool.shape[2:])[:context_len]
        # "t H d": every query head has the key and value head of its group.
        group = query.shape[1] // num_kv_heads
        keys = np.repeat(tokens[:, 0::2], group, axis=1).astype(np.float64)
        values = np.repeat(tokens[:, 1::2], group, axis=1).astype(np.float64)
        for token in range(start, end):
            visible = context_len - (end - token) + 1
            scores = np.einsum("hd,thd->ht", query[token].astype(np.float64), keys[:visible])
            weights = np.exp(scores * scale - (scores * scale).max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[token] = np.einsum("ht,thd->hd", weights, values[:visible])
    return out
