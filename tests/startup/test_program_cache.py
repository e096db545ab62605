"""Compiled programs on disk: what is wrong with them costs time and at most one warning."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Lowered

from jpaged.errors import CheckpointError, ConfigError
from jpaged.startup import program_cache
from jpaged.startup.demo_model import demo_model_file
from jpaged.startup.program_cache import ProgramCache
from jpaged.target import detect_target

XS = jnp.arange(4.0)


def program(factor: float = 3.0) -> Lowered:
    return jax.jit(lambda xs: xs * factor).lower(jax.ShapeDtypeStruct((4,), jnp.float32))


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many programs have been compiled instead of being read."""
    compiled = []
    compile_really = Lowered.compile
    monkeypatch.setattr(
        Lowered,
        "compile",
        lambda self, **options: compiled.append(self) or compile_really(self, **options),
    )
    return lambda: len(compiled)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING]


def open_cache(folder: str | None) -> ProgramCache:
    return ProgramCache.open(folder, detect_target())


def run(cache: ProgramCache, factor: float = 3.0) -> None:
    assert cache.compile(program(factor))(XS).tolist() == [0, factor, 2 * factor, 3 * factor]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_every_folder_gets_its_own_programs(tmp_path: Path, num_compiled: Any) -> None:
    """Whatever folders other engines of the process use; names may be of any kind."""
    folders = [tmp_path / "one", tmp_path / "two words 漢字" / "below"]
    for folder in folders * 2:
        run(open_cache(str(folder)))
        assert len(entries(folder)) == 1
    assert num_compiled() == 2
    run(open_cache(str(folders[0])), factor=5.0)
    assert num_compiled() == 3
    assert jax.config.jax_compilation_cache_dir is None


def write(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content(path.read_bytes())) and None


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


@pytest.mark.parametrize(
    "damage",
    [
        write(lambda content: content[: len(content) // 2]),
        write(lambda content: b""),
        write(lambda content: os.urandom(len(content))),
        write(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        replace_by(os.mkfifo),
    ],
    ids=["half", "empty", "random", "one bit", "fifo"],
)
def test_damaged_entries_are_replaced(
    tmp_path: Path,
    num_compiled: Any,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    """O-86: by the next start, which compiles them, and says nothing; a FIFO does not hang it."""
    run(open_cache(str(tmp_path)))
    [entry] = entries(tmp_path)
    sound = entry.read_bytes()
    damage(entry)
    for _ in range(2):
        run(open_cache(str(tmp_path)))
    assert num_compiled() == 2
    assert entries(tmp_path) == [entry] and len(entry.read_bytes()) == len(sound)
    assert not warnings(caplog)


def test_a_folder_in_the_place_of_an_entry(tmp_path: Path, caplog: Any) -> None:
    """O-86: it cannot be replaced: one warning."""
    run(open_cache(str(tmp_path)))
    [entry] = entries(tmp_path)
    replace_by(os.mkdir)(entry)
    run(open_cache(str(tmp_path)))
    assert len(warnings(caplog)) == 1
    assert entries(tmp_path) == [entry]


def test_a_full_disk_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O-86: however many programs there are; none is left half written."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(program_cache.os, "replace", fail)
    cache = open_cache(str(tmp_path))
    for factor in (2.0, 3.0, 4.0):
        run(cache, factor)
    [warning] = warnings(caplog)
    assert "No space left" in warning and "compilation_cache_dir" in warning
    assert entries(tmp_path) == []


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """O-86: in one line that names the option."""
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(ConfigError, match="compilation_cache_dir .* is not a folder") as error:
            open_cache(str(tmp_path / name))
        assert error.value.option == "compilation_cache_dir"


def test_users_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O-85: nothing is kept, with one warning; a folder that is given is used, and the home not
    asked for. The demo model says how to choose a folder."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    run(open_cache(str(tmp_path)))
    assert not warnings(caplog)
    run(open_cache(None))
    [warning] = warnings(caplog)
    assert "no home" in warning and "compilation_cache_dir" in warning
    with pytest.raises(CheckpointError, match="no home folder .XDG_CACHE_HOME chooses another"):
        demo_model_file()


def test_a_home_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """O-85: for root, who may write anywhere, a file stands in for it."""
    (tmp_path / ".cache").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    run(open_cache(None))
    assert len(warnings(caplog)) == 1
    with pytest.raises(CheckpointError, match=r"\.cache.*XDG_CACHE_HOME chooses another one"):
        demo_model_file()


def test_two_starts_at_once(tmp_path: Path) -> None:
    """O-86: both finish, and one entry is left."""
    code = (
        "import sys\n"
        "from tests.startup.test_program_cache import open_cache, run\n"
        "from pathlib import Path\n"
        "for factor in (2.0, 3.0, 4.0): run(open_cache(sys.argv[1]), factor)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(entries(tmp_path)) == 3


def test_arguments_without_use_are_a_part_of_a_program(tmp_path: Path) -> None:
    """They are not in its text, but a compiled program refuses others than its own."""
    cache = open_cache(str(tmp_path))
    for size in (3, 5, 3):
        unused = jax.ShapeDtypeStruct((size,), jnp.float32)
        used = jax.ShapeDtypeStruct((4,), jnp.float32)
        lowered = jax.jit(lambda used, unused: used + 1).lower(used, unused)
        compiled = cache.compile(lowered)
        assert compiled(XS, jnp.zeros(size)).tolist() == [1, 2, 3, 4]
    assert len(entries(tmp_path)) == 2
