"""Keeps compiled programs on disk, so that a later start reads them instead of compiling.

An entry is one file, named by a hash of all that decides the code, with a digest of its content
before it. Whatever is wrong with an entry, the program is compiled and the entry replaced; whatever
is wrong with the folder, the engine starts without it. Several processes may share a folder.
"""

import hashlib
import logging
import os
import stat
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled, Lowered

from jpaged.errors import ConfigError
from jpaged.execution.compiler_options import compiler_options
from jpaged.startup.cache_folder import user_cache_folder
from jpaged.startup.interruption import cleaned_up
from jpaged.target import Target

SUFFIX = ".program"
# Settings outside of a program's text that change the code which XLA makes of it.
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

logger = logging.getLogger(__name__)


class ProgramCache:
    """A folder of compiled programs; without a folder, everything is compiled. Thread-safe."""

    def __init__(self, folder: Path | None, target: Target) -> None:
        self._folder = folder
        self._devices = target.devices
        self._machine = _machine(target)
        self._options = compiler_options(target)
        self._is_writable = folder is not None

    @classmethod
    def open(cls, folder: str | None, target: Target) -> "ProgramCache":
        """The cache in a folder, or in the user's cache folder, of programs for these devices.

        Where neither folder can be had, a warning says so. Raises `ConfigError` for a folder that
        is something else.
        """
        try:
            path = user_cache_folder() / "programs" if folder is None else Path(folder)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if folder is not None and isinstance(error, FileExistsError | NotADirectoryError):
                raise ConfigError(
                    f"compilation_cache_dir {folder!r} is not a folder: {error.strerror}. Choose "
                    "another one.",
                    option="compilation_cache_dir",
                ) from error
            _warn_about(error)
            return cls(None, target)
        return cls(path, target)

    def compile(self, lowered: Lowered) -> Compiled:
        """The compiled program, from its entry if there is a sound one."""
        text = lowered.as_text()
        # Programs that call back into Python hold addresses of this process.
        if self._folder is None or "python" in text and "callback" in text:
            return lowered.compile(compiler_options=self._options)
        path = self._folder / (_key(text, _signature(lowered), self._machine) + SUFFIX)
        compiled = _load(path, lowered, self._devices)
        if compiled is None:
            compiled = lowered.compile(compiler_options=self._options)
            self._keep(path, compiled)
        return compiled

    def _keep(self, path: Path, compiled: Compiled) -> None:
        if not self._is_writable:
            return
        try:
            content, _, _ = serialize(compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            logger.debug("a program cannot be kept: %s", error)
            return
        try:
            _write_whole(path, hashlib.sha256(content).digest() + content)
        except OSError as error:
            if self._is_writable:
                self._is_writable = False
                _warn_about(error)


def _warn_about(error: OSError) -> None:
    logger.warning(
        "compiled programs are not kept: %s. Every start compiles them again; "
        "compilation_cache_dir chooses another folder.",
        error,
    )


def _signature(lowered: Lowered) -> str:
    """All arguments and results. The text of a program lacks arguments that it does not use."""
    return f"{lowered.args_info}\0{lowered.in_tree}\0{lowered.out_tree}"


def _key(text: str, signature: str, machine: str) -> str:
    parts = [text, signature, jax.__version__, version("jaxlib"), machine]
    parts += [os.environ.get(name, "") for name in COMPILER_VARIABLES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _machine(target: Target) -> str:
    """What the compiler knows of the devices; of a CPU, its instructions and its cores."""
    parts = [target.platform, target.device_kind, str(target.mesh_shape)]
    parts += [device.client.platform_version for device in target.devices[:1]]
    parts += [f"{name}={value}" for name, value in compiler_options(target).items()]
    if target.is_cpu:
        parts += [str(os.cpu_count()), *_cpu_features()]
    return "\0".join(parts)


def _cpu_features() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


def _load(path: Path, lowered: Lowered, devices: tuple[Any, ...]) -> Compiled | None:
    """The program in a file; None if there is no file, or no sound one."""
    try:
        stored = _read_regular_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.debug("cannot read %s: %s", path, error)
        return None
    digest, content = stored[:32], stored[32:]
    if hashlib.sha256(content).digest() != digest:
        logger.info("%s is damaged: it is compiled again", path)
        return None
    try:
        return deserialize_and_load(
            content, lowered.in_tree, lowered.out_tree, execution_devices=devices
        )
    except Exception as error:  # made by a release that wrote something else under this key
        logger.info("%s cannot be loaded and is compiled again: %s", path, error)
        return None


def _read_regular_file(path: Path) -> bytes:
    # Opening a FIFO would wait for its other end.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is no file")
        return stream.read()


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all."""
    make = partial(tempfile.mkstemp, dir=path.parent, prefix=".", suffix=".part")
    with cleaned_up(make, _remove) as (file, name):
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        os.replace(name, path)


def _remove(made: tuple[int, str]) -> None:
    Path(made[1]).unlink(missing_ok=True)
