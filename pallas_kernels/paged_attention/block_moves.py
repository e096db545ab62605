"""How backends copy whole blocks of a pool, whatever the pool's layout."""

from jaxtyping import Array, Int, Num


class BlockMoves:
    """The methods of `PagedAttention` that move whole blocks. The first axis of a pool is N."""

    def copy_blocks(
        self, pool: Num[Array, "N ..."], sources: Int[Array, "P"], targets: Int[Array, "P"]
    ) -> Num[Array, "N ..."]:
        return pool.at[targets].set(pool[sources], mode="drop")

    def gather_blocks(
        self, pool: Num[Array, "N ..."], blocks: Int[Array, "P"]
    ) -> Num[Array, "P ..."]:
        return pool[blocks]

    def scatter_blocks(
        self, pool: Num[Array, "N ..."], blocks: Int[Array, "P"], values: Num[Array, "P ..."]
    ) -> Num[Array, "N ..."]:
        return pool.at[blocks].set(values, mode="drop")
