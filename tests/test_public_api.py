"""What users may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jpaged

pytestmark = pytest.mark.smoke

PUBLIC_NAMES = {
    "AsyncEngine",
    "BeamSearchParams",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "JpagedError",
    "LLM",
    "PromptTooLongError",
    "RequestError",
    "RequestOutput",
    "RequestTiming",
    "SamplingParams",
    "TokenLogprobs",
    "UnsupportedModelError",
}


def test_public_names() -> None:
    assert set(dir(jpaged)) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(jpaged, name).__name__ == name


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(jpaged.__file__).read_text("utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname for node in imports for alias in node.names} == PUBLIC_NAMES
    for node in imports:
        for alias in node.names:
            assert getattr(jpaged, alias.name).__module__ == node.module


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'jpaged' has no attribute 'Engine'"):
        _ = jpaged.Engine


def test_import_alone_starts_no_jax() -> None:
    """Nor do the names that need none."""
    code = (
        "import sys, jpaged; jpaged.SamplingParams, jpaged.EngineConfig, jpaged.RequestError; "
        "print(sorted({'jax', 'flax', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_root()
    )
    assert result.stdout.strip() == "[]"


def _root() -> Path:
    return Path(__file__).parent.parent
