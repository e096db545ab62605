"""From a checkpoint's tensors to a model's parameters on the device."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from jpaged.errors import CheckpointError
from jpaged.models.formats.tensor_source import TensorSource
from jpaged.models.tied_head import HEAD
from jpaged.progress import Progress

NUM_READERS = 4
# Rows transposed at once: that many cache lines are open while a row of the result is written.
TRANSPOSE_ROWS = 16
# Ends of names of tensors that no parameter needs: buffers with what is computed here.
UNREAD_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How one parameter is made from a checkpoint.

    path: the parameter's path in the model's state, for example "layers.0.attention.qkv".
    sources: tensors of the checkpoint, put one below the other (along axis 0).
    transpose: store [in, out] instead of the checkpoint's [out, in].
    """

    path: str
    sources: tuple[str, ...]
    transpose: bool = False


def load_weights(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Sequence[WeightSpec],
    source: TensorSource,
    *,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Read every parameter in `abstract`, in its type and with its sharding where it has one.

    Nothing is read before names and shapes are checked: one `CheckpointError` lists all that is
    missing, does not fit or would not be read. A tensor that is not read belongs to a variant of
    the architecture that computes something else, such as one with biases.
    """
    _check_fit(abstract, table, source)
    num_bytes = sum(source.num_bytes(name) for spec in table for name in spec.sources)
    with (
        (progress or Progress()).bar(num_bytes, "loading weights") as advance,
        ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as readers,
    ):
        futures = {
            spec.path: readers.submit(_load, spec, abstract[spec.path], source, advance)
            for spec in table
        }
        try:
            return {path: future.result() for path, future in futures.items()}
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


def _check_fit(
    abstract: Mapping[str, jax.ShapeDtypeStruct], table: Sequence[WeightSpec], source: TensorSource
) -> None:
    present = set(source.names())
    failures = []
    for spec in table:
        assert spec.path in abstract, f"the weight table names {spec.path}, which is no parameter"
        missing = [name for name in spec.sources if name not in present]
        failures += [f"{name} is missing" for name in missing]
        if not missing:
            failures += _shape_failures(spec, abstract[spec.path].shape, source)
    for path in sorted(set(abstract) - {spec.path for spec in table}):
        failures.append(f"parameter {path} is in no row of the weight table")
    failures += [f"{name} is used by no parameter" for name in _unused(table, source)]
    if failures:
        raise CheckpointError("the checkpoint does not fit the model:\n  " + "\n  ".join(failures))


def _shape_failures(spec: WeightSpec, expected: tuple[int, ...], source: TensorSource) -> list[str]:
    shapes = [source.shape(name) for name in spec.sources]
    stored = (sum(shape[0] for shape in shapes if shape), *shapes[0][1:])
    wanted = tuple(reversed(expected)) if spec.transpose else expected
    if stored == wanted and len({shape[1:] for shape in shapes}) == 1:
        return []
    described = ", ".join(
        f"{name} {list(shape)} in {source.location(name)}"
        for name, shape in zip(spec.sources, shapes, strict=True)
    )
    together = " together" if len(shapes) > 1 else ""
    return [f"{described}: expected shape {list(wanted)}{together} for parameter {spec.path}"]


def _unused(table: Sequence[WeightSpec], source: TensorSource) -> list[str]:
    """Names of tensors that no parameter is made from.

    Left out are buffers, which are computed here, and the head of a tied model.
    """
    used = {name for spec in table for name in spec.sources}
    may_be_unread = UNREAD_BUFFERS if HEAD in used else (*UNREAD_BUFFERS, HEAD)
    return sorted(
        name for name in source.names() if name not in used and not name.endswith(may_be_unread)
    )


def _load(
    spec: WeightSpec,
    abstract: jax.ShapeDtypeStruct,
    source: TensorSource,
    advance: Callable[[int], None],
) -> jax.Array:
    host = _read_on_host(spec, abstract, source, advance)
    if abstract.sharding is None:
        array = jax.device_put(host)
    else:
        array = jax.make_array_from_callback(
            abstract.shape, abstract.sharding, lambda index: host[index]
        )
    # Transfers run in the background: without waiting, all parameters would be on the host at once.
    return array.block_until_ready()


def _read_on_host(
    spec: WeightSpec,
    abstract: jax.ShapeDtypeStruct,
    source: TensorSource,
    advance: Callable[[int], None],
) -> np.ndarray:
    """Read a parameter into a new array, never a view of the file, which may change later."""
    host = np.empty(abstract.shape, abstract.dtype)
    rows = host.T if spec.transpose else host
    start = 0
    for name in spec.sources:
        values = source.read(name)
        try:
            _copy(values, rows[start : start + len(values)], is_transposed=spec.transpose)
        except FloatingPointError as error:
            raise CheckpointError(
                f"{name} in {source.location(name)} has values beyond the range of "
                f"{host.dtype}; choose another dtype"
            ) from error
        start += len(values)
        advance(source.num_bytes(name))
    return host


def _copy(values: np.ndarray, rows: np.ndarray, *, is_transposed: bool) -> None:
    step = TRANSPOSE_ROWS if is_transposed else len(values)
    with np.errstate(over="raise"):
        for start in range(0, len(values), step):
            rows[start : start + step] = values[start : start + step]
