"""How GPU kernels cut up their work unless a measurement says otherwise.

- `decode_tile`: as many K/V tokens as make 16 KiB of keys (64 of 128 dimensions in bfloat16), of
  which `decode_stages` are on their way at once: enough to hide the time that memory takes to
  answer, and a few programs still share a multiprocessor. With more query heads a program takes
  less, as a tile of scores has to stay in registers.
- `decode_programs`: a sequence is split until there are about 16 programs for each of an A100's 108
  or an H100's 132 multiprocessors, so that the last ones to finish do not leave many idle.
- `prefill_rows`, `prefill_tile`: as many queries and K/V tokens as the registers of 8 warps hold;
  with more, A100's compiler spills.
- Four warps multiply up to 64 rows; more rows take eight.
"""

from dataclasses import dataclass

from pallas_kernels.paged_attention.sizes import power_of_two_from, powers_of_two, size
from pallas_kernels.paged_attention.triton_tiles import padded_head_dim

MAX_SPLITS = 64
MIN_SPLIT_TILES = 2  # less work is not worth a program
WANTED_PROGRAMS = 2048
TILE_BYTES = 16 << 10  # of a tile's keys; its values take as much
TILES, WARPS, STAGES = powers_of_two(16, 256), powers_of_two(1, 16), (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True, kw_only=True)
class TritonSizes:
    """Sizes that a measurement may choose.

    tile: K/V tokens a tile. warps: of a program. stages: tiles on their way at once.

    decode_programs: a sequence is split until there are so many.
    prefill_rows: query rows of a program, tokens times heads.
    """

    decode_tile: int = size(*TILES)
    decode_warps: int = size(*WARPS)
    decode_stages: int = size(*STAGES)
    decode_programs: int = size(*powers_of_two(64, 1 << 16))
    prefill_tile: int = size(*TILES)
    prefill_rows: int = size(*TILES)
    prefill_warps: int = size(*WARPS)
    prefill_stages: int = size(*STAGES)


def choose_sizes(group: int, head_dim: int, itemsize: int) -> TritonSizes:
    """Choose all sizes. itemsize: bytes of a number in the pool."""
    return TritonSizes(
        decode_tile=_decode_tile(group, head_dim, itemsize),
        decode_warps=8 if decode_rows(group, head_dim) > 64 else 4,
        decode_stages=3,
        decode_programs=WANTED_PROGRAMS,
        prefill_tile=_prefill_tile(head_dim, itemsize),
        prefill_rows=prefill_rows(head_dim),
        prefill_warps=8,
        prefill_stages=3,
    )


def choose_num_splits(num_programs: int, max_tiles: int, wanted: int = WANTED_PROGRAMS) -> int:
    """Choose a power of two. num_programs: number of programs with one split."""
    wanted_splits = -(-wanted // num_programs)
    useful = -(-max_tiles // MIN_SPLIT_TILES)
    return min(power_of_two_from(min(wanted_splits, useful)), MAX_SPLITS)


def decode_rows(group: int, head_dim: int) -> int:
    """Rows of a program, one a query head: tensor cores take 16 at least."""
    return min(max(16, power_of_two_from(group)), 128 if head_dim <= 128 else 64)


def prefill_rows(head_dim: int) -> int:
    return 128 if head_dim <= 128 else 64


def _decode_tile(group: int, head_dim: int, itemsize: int) -> int:
    tokens = TILE_BYTES // (padded_head_dim(head_dim) * itemsize)
    # Not more scores than the registers hold.
    most = {128: 32, 64: 64}.get(decode_rows(group, head_dim), 128)
    return min(max(tokens, 16), most)


def _prefill_tile(head_dim: int, itemsize: int) -> int:
    if itemsize > 2:
        return 16
    return 64 if head_dim <= 64 else 32
