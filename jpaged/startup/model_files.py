"""From the name of a model to its files, and from the files to what an engine needs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download

from jpaged.config import DEMO_MODEL, MODELS_GENERATION_CONFIG, NO_GENERATION_CONFIG
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.formats.gguf_config import gguf_model_config
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.models.formats.gguf_generation import sampling_config
from jpaged.models.formats.gguf_source import GgufSource
from jpaged.models.formats.gguf_split import open_gguf
from jpaged.models.formats.safetensors_source import SafetensorsSource
from jpaged.models.formats.tensor_source import TensorSource
from jpaged.startup.demo_model import RECOMMENDED_SAMPLING, demo_model_file
from jpaged.text.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Neither pickled weights nor code, and nothing from sub-folders.
HUB_FILES = ["model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Files of a model on this machine.

    name: what the model is called when it is served.
    recommended: generation config of a model whose files have none.
    """

    kind: Literal["gguf", "folder"]
    path: Path
    name: str
    recommended: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def gguf(self) -> GgufFile:
        """The opened file with all its parts, shared by all that read it."""
        return open_gguf(self.path)


def resolve_model(name: str) -> ModelFiles:
    """Find a model, and fetch it if need be. Raises `CheckpointError`.

    name: the demo model's name, a folder in Hugging Face format, a .gguf file, or a Hub id.
    """
    if name == DEMO_MODEL:
        return ModelFiles(
            kind="gguf", path=demo_model_file(), name=name, recommended=RECOMMENDED_SAMPLING
        )
    path = Path(name)
    if not name or not _exists(path):
        return _hub_model(name)
    if path.is_dir():
        return ModelFiles(kind="folder", path=path, name=name)
    if path.suffix.lower() != ".gguf":
        raise _no_such_model(name, "it is a file, but no .gguf file")
    return ModelFiles(kind="gguf", path=path, name=name)


def load_model_config(files: ModelFiles) -> ModelConfig:
    if files.kind == "gguf":
        return gguf_model_config(files.gguf)
    return ModelConfig.from_hf(_read_json(files.path, CONFIG_FILE))


def load_generation_config(files: ModelFiles, source: str) -> ConfigReader:
    """Read how to generate; empty when the model's files say nothing about it.

    source: the option `generation_config`. A folder's file takes the place of the model's own.
    """
    if source not in (MODELS_GENERATION_CONFIG, NO_GENERATION_CONFIG):
        folder = Path(source)
        return ConfigReader(
            _read_json(folder, GENERATION_CONFIG_FILE), name=str(folder / GENERATION_CONFIG_FILE)
        )
    if files.kind == "gguf":
        values = sampling_config(files.gguf.metadata) or files.recommended
        return ConfigReader(values, name=files.path.name)
    has_file = (files.path / GENERATION_CONFIG_FILE).is_file()
    values = _read_json(files.path, GENERATION_CONFIG_FILE) if has_file else files.recommended
    return ConfigReader(values, name=GENERATION_CONFIG_FILE)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    if files.kind == "gguf":
        return Tokenizer.from_gguf(files.gguf)
    return Tokenizer.from_folder(files.path)


def open_weights(files: ModelFiles) -> TensorSource:
    """Checks that the files are whole; values are read later."""
    if files.kind == "gguf":
        return GgufSource(files.gguf, load_model_config(files))
    return SafetensorsSource(files.path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # for example, the name is too long to be one
        return False


def _hub_model(name: str) -> ModelFiles:
    if not HUB_ID.fullmatch(name) or ".." in name:
        raise _no_such_model(name)
    try:
        folder = snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"])
    except Exception as error:  # The library lets errors of its HTTP client through.
        raise CheckpointError(
            f"no such model {name!r}: there is no such folder, and fetching it from the Hugging "
            f"Face Hub failed: {error}"
        ) from error
    return ModelFiles(kind="folder", path=Path(folder), name=name)


def _no_such_model(name: str, reason: str = "there is no such file or folder") -> CheckpointError:
    return CheckpointError(
        f"no such model {name!r:.200}: {reason}. A model is a folder in Hugging Face format "
        "(config.json, safetensors, tokenizer), a .gguf file, a Hub id such as 'org/name', or "
        f"{DEMO_MODEL!r}"
    )


def _read_json(folder: Path, file_name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / file_name).read_text("utf-8"))
    except FileNotFoundError as error:
        gguf_files = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; to serve a GGUF file, name it: {', '.join(gguf_files)}" if gguf_files else ""
        raise CheckpointError(f"{folder} has no {file_name}{hint}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / file_name}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / file_name} must hold a JSON object")
    return content
