"""From a checkpoint's tensors to a model's parameters on the devices."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jpaged.errors import CheckpointError
from jpaged.models.formats.tensor_source import TensorSource
from jpaged.models.shard_reading import Index, read_shard
from jpaged.models.tied_head import HEAD
from jpaged.models.weight_spec import Part, WeightSpec
from jpaged.progress import Progress

NUM_READERS = 4
# Ends of names of tensors that no parameter needs: buffers with what is computed here.
UNREAD_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def load_weights(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Sequence[WeightSpec],
    source: TensorSource,
    *,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Read every parameter in `abstract`, in its type and with its sharding where it has one.

    Of each parameter, what the devices of this process hold is read, shard by shard. Several are
    read at once, but all that are on the host take no more memory than the largest one.

    Nothing is read before names and shapes are checked: one `CheckpointError` lists all that is
    missing, does not fit or would not be read. A tensor that is not read belongs to a variant of
    the architecture that computes something else, such as one with biases.
    """
    _check_fit(abstract, table, source)
    shards = {spec.path: _shards(abstract[spec.path]) for spec in table}
    sizes = [each.num_bytes for parts in shards.values() for each in parts]
    budget = _Budget(max(sizes, default=0))
    with (
        (progress or Progress()).bar(sum(sizes), "loading weights") as advance,
        ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as readers,
    ):
        read = partial(_load, source=source, budget=budget, advance=advance)
        futures = {
            spec.path: [readers.submit(read, spec, shard) for shard in shards[spec.path]]
            for spec in table
        }
        try:
            return {
                path: _assemble(abstract[path], [part.result() for part in parts])
                for path, parts in futures.items()
            }
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Shard:
    """A part of a parameter. devices: all that hold it; None is JAX's default device."""

    index: Index
    dtype: np.dtype
    devices: list[jax.Device | None]

    @property
    def num_bytes(self) -> int:
        shape = [each.stop - each.start for each in self.index]
        return int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize


def _shards(abstract: jax.ShapeDtypeStruct) -> list[_Shard]:
    """The different parts that devices of this process hold."""
    dtype = np.dtype(abstract.dtype)
    if abstract.sharding is None:
        return [_Shard(tuple(slice(0, size) for size in abstract.shape), dtype, [None])]
    shards: dict[Any, _Shard] = {}
    indices = abstract.sharding.addressable_devices_indices_map(abstract.shape)
    for device, index in indices.items():
        assert index is not None
        bounds = tuple(
            each.indices(size)[:2] for each, size in zip(index, abstract.shape, strict=True)
        )
        whole = tuple(slice(*each) for each in bounds)
        shards.setdefault(bounds, _Shard(whole, dtype, [])).devices.append(device)
    return list(shards.values())


def _assemble(abstract: jax.ShapeDtypeStruct, parts: list[list[jax.Array]]) -> jax.Array:
    arrays = [array for part in parts for array in part]
    if abstract.sharding is None:
        return arrays[0]
    return jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, arrays)


@dataclass
class _Budget:
    """Bytes that may be on the host at once."""

    num_bytes: int
    _taken: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Wait until so many are free, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken + num_bytes <= self.num_bytes)
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


def _load(
    spec: WeightSpec,
    shard: _Shard,
    *,
    source: TensorSource,
    budget: _Budget,
    advance: Callable[[int], None],
) -> list[jax.Array]:
    """The shard on each of its devices."""
    with budget.taken(shard.num_bytes):
        host = read_shard(spec, shard.index, shard.dtype, source, advance)
        arrays = [jax.device_put(host, device) for device in shard.devices]
        # Transfers run in the background: the host's memory is free once they are done.
        return jax.block_until_ready(arrays)


def _check_fit(
    abstract: Mapping[str, jax.ShapeDtypeStruct], table: Sequence[WeightSpec], source: TensorSource
) -> None:
    present = set(source.names())
    failures = []
    for spec in table:
        assert spec.path in abstract, f"the weight table names {spec.path}, which is no parameter"
        shape = abstract[spec.path].shape
        assert spec.describes(shape), f"{spec} is not the layout of a parameter {shape}"
        for part in spec.parts:
            if part.tensor not in present:
                failures.append(f"{part.tensor} is missing")
            else:
                failures += _shape_failures(spec, part, shape, source)
    for path in sorted(set(abstract) - {spec.path for spec in table}):
        failures.append(f"parameter {path} is in no row of the weight table")
    failures += [f"{name} is used by no parameter" for name in _unused(table, source)]
    if failures:
        raise CheckpointError("the checkpoint does not fit the model:\n  " + "\n  ".join(failures))


def _shape_failures(
    spec: WeightSpec, part: Part, shape: tuple[int, ...], source: TensorSource
) -> list[str]:
    wanted, stored = (part.num_rows, *spec.columns(shape)), source.shape(part.tensor)
    if stored == wanted:
        return []
    return [
        f"{part.tensor} {list(stored)} in {source.location(part.tensor)}: expected shape "
        f"{list(wanted)} for parameter {spec.path}"
    ]


def _unused(table: Sequence[WeightSpec], source: TensorSource) -> list[str]:
    """Names of tensors that no parameter is made from.

    Left out are buffers, which are computed here, and the head of a tied model.
    """
    used = {name for spec in table for name in spec.tensors}
    may_be_unread = UNREAD_BUFFERS if HEAD in used else (*UNREAD_BUFFERS, HEAD)
    return sorted(
        name for name in source.names() if name not in used and not name.endswith(may_be_unread)
    )
