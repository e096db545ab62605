"""Paged-attention kernels. Imports JAX and nothing of jpaged.

Axis letters: T tokens in a step, S sequences, M blocks per table row, N blocks in the pool, B block
size, H query heads, K KV heads, G = H / K, D head dimension; S1 = S + 1, K2 = 2 K.
"""
