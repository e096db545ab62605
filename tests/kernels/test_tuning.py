"""Files of measured sizes: read as they were written, and refused by name where they are wrong."""

import json
from dataclasses import asdict, replace

import pytest

from pallas_kernels.paged_attention.mosaic_sizes import MosaicSizes
from pallas_kernels.paged_attention.triton_sizes import choose_sizes
from pallas_kernels.paged_attention.tuning import (
    SHIPPED_FILE,
    TuningError,
    TuningKey,
    read_sizes,
    write_sizes,
)

KEY = TuningKey(
    device="TPU v5 lite",
    backend="pallas-tpu",
    num_kv_heads=8,
    group=4,
    head_dim=128,
    pool_dtype="bfloat16",
    block_size=16,
)
SIZES = MosaicSizes(fetch_bytes=2 << 20, chunk_tokens=256, prefill_queries=32)


def entry_of(key, sizes, changes=()):
    return {**asdict(key), "sizes": asdict(sizes), **dict(changes)}


@pytest.fixture
def file(tmp_path):
    def write(*entries):
        path = tmp_path / "tuning.json"
        path.write_text(json.dumps(entries))
        return path

    return write


def test_files_are_read_as_they_were_written(tmp_path):
    entries = {
        replace(KEY, block_size=32): SIZES,
        KEY: replace(SIZES, chunk_tokens=512),
        replace(KEY, backend="triton"): choose_sizes(group=4, head_dim=128, itemsize=2),
    }
    path = tmp_path / "tuning.json"
    write_sizes(path, entries)
    assert read_sizes(path) == entries
    written = path.read_text()
    write_sizes(path, dict(reversed(entries.items())))
    assert path.read_text() == written and len(written.splitlines()) == 2 + len(entries)
    write_sizes(path, {})
    assert read_sizes(path) == {}


def test_the_file_that_comes_with_the_kernels_can_be_read():
    read_sizes(SHIPPED_FILE)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"block_size": 0}, "block_size must be a number above 0, got 0"),
        ({"group": True}, "group must be a number above 0, got True"),
        ({"head_dim": "128"}, "head_dim must be a number above 0, got '128'"),
        ({"device": 5}, "device must be a text, got 5"),
        ({"backend": "cuda"}, "backend is 'cuda', and pallas-tpu, triton are possible"),
        ({"speed": 2}, "speed is not known; there are device, backend, "),
        ({"sizes": 3}, "sizes: an object is needed, got 3"),
        ({"sizes": {"fetch_bytes": 2 << 20}}, "sizes: chunk_tokens is missing"),
        ({"sizes": {**asdict(SIZES), "warps": 4}}, "sizes: warps is not known; there are fetch_b"),
        ({"sizes": {**asdict(SIZES), "chunk_tokens": 300}}, "chunk_tokens is 300, and 16, 32, "),
        ({"sizes": {**asdict(SIZES), "chunk_tokens": 256.0}}, "chunk_tokens is 256.0, and 16, "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file, changes, message):
    path = file(entry_of(replace(KEY, group=1), SIZES), entry_of(KEY, SIZES, changes))
    with pytest.raises(TuningError) as raised:
        read_sizes(path)
    assert str(raised.value).startswith(f"{path}, entry 2") and message in str(raised.value)


def test_files_that_are_no_list_of_entries(file, tmp_path):
    with pytest.raises(TuningError, match="entry 1: device is missing"):
        read_sizes(
            file({key: value for key, value in entry_of(KEY, SIZES).items() if key != "device"})
        )
    with pytest.raises(TuningError, match="entry 2: there is another one of device TPU v5 lite, "):
        read_sizes(file(entry_of(KEY, SIZES), entry_of(KEY, SIZES)))
    for text, message in [("{}", "a list of entries is needed"), ("[", "is no JSON")]:
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(TuningError, match=f"other.json.*{message}"):
            read_sizes(tmp_path / "other.json")
    with pytest.raises(TuningError, match="missing.json: No such file"):
        read_sizes(tmp_path / "missing.json")
