"""Measured sizes of kernels, by device and by the shape of the attention.

A file of them is a JSON list of objects: the fields of `TuningKey`, and as "sizes" all sizes of the
backend. Backends choose sizes that no file has; see `mosaic_sizes` and `triton_sizes`.
`tuning.json` comes with the kernels.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from pallas_kernels.paged_attention.mosaic_sizes import MosaicSizes
from pallas_kernels.paged_attention.sizes import choices_of
from pallas_kernels.paged_attention.triton_sizes import TritonSizes

SHIPPED_FILE = Path(__file__).with_name("tuning.json")
SIZES = {"pallas-tpu": MosaicSizes, "triton": TritonSizes}

Sizes = MosaicSizes | TritonSizes


class TuningError(Exception):
    """A tuning file that cannot be used. The message names the file, the entry and the field."""


@dataclass(frozen=True, kw_only=True)
class TuningKey:
    """What sizes were measured for.

    device: `jax.Device.device_kind`. backend: its name. pool_dtype: name of the pool's type.
    """

    device: str
    backend: str
    num_kv_heads: int
    group: int
    head_dim: int
    pool_dtype: str
    block_size: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def read_sizes(path: Path) -> dict[TuningKey, Sizes]:
    """Read all entries, each checked as far as possible without its device."""
    try:
        entries = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise TuningError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TuningError(f"{path} is no JSON: {error}") from error
    if not isinstance(entries, list):
        raise TuningError(f"{path}: a list of entries is needed, got {entries!r:.50}")
    read: dict[TuningKey, Sizes] = {}
    for number, entry in enumerate(entries, start=1):
        where = f"{path}, entry {number}"
        key, sizes = _read_entry(entry, where)
        if key in read:
            raise TuningError(f"{where}: there is another one of {key}")
        read[key] = sizes
    return read


def write_sizes(path: Path, entries: Mapping[TuningKey, Sizes]) -> None:
    """Write one entry a line, sorted. If it raises OSError the file is unchanged."""
    lines = [
        json.dumps({**asdict(key), "sizes": asdict(entries[key])})
        for key in sorted(entries, key=astuple)
    ]
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    os.replace(unfinished, path)


def _read_entry(entry: Any, where: str) -> tuple[TuningKey, Sizes]:
    types = {each.name: each.type for each in fields(TuningKey)}
    values = _read_fields(entry, [*types, "sizes"], where)
    sizes = values.pop("sizes")
    for name, value in values.items():
        if type(value) is not types[name] or not value or (types[name] is int and value < 0):
            wanted = "a number above 0" if types[name] is int else "a text"
            raise TuningError(f"{where}: {name} must be {wanted}, got {value!r}")
    key = TuningKey(**values)
    if key.backend not in SIZES:
        raise TuningError(f"{where}: backend is {key.backend!r}, and {_listed(SIZES)} are possible")
    choices = choices_of(SIZES[key.backend])
    sizes = _read_fields(sizes, list(choices), f"{where}, sizes")
    for name, value in sizes.items():
        if type(value) is not int or value not in choices[name]:
            raise TuningError(
                f"{where}, sizes: {name} is {value!r}, and {_listed(choices[name])} are possible"
            )
    return key, SIZES[key.backend](**sizes)


def _read_fields(values: Any, names: list[str], where: str) -> dict[str, Any]:
    """Return `values`, which must be an object with just these names."""
    if not isinstance(values, dict):
        raise TuningError(f"{where}: an object is needed, got {values!r:.50}")
    for name in values:
        if name not in names:
            raise TuningError(f"{where}: {name} is not known; there are {_listed(names)}")
    for name in names:
        if name not in values:
            raise TuningError(f"{where}: {name} is missing")
    return dict(values)


def _listed(choices: Any) -> str:
    return ", ".join(map(str, choices))
