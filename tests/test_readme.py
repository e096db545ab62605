"""What the README shows works."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

import jpaged
from tests.demo_engine import DEMO_OPTIONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_python_example(
    demo_model_path: Path,
    programs_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it stands, with a smaller engine than a user gets, which other tests compile as well."""
    options = {**DEMO_OPTIONS, "compilation_cache_dir": str(programs_folder)}
    del options["max_model_len"]  # the example gives it
    monkeypatch.setattr(jpaged, "LLM", partial(jpaged.LLM, **options))
    example = "\n".join(code_blocks("python"))
    exec(compile(example, "README.md", "exec"), {})
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith("The capital of France is")
    assert first_line.endswith((" stop", " length"))


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", README + contributing))
    assert {"serve", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"Makefile has no {target}"


def test_curl_example_is_a_valid_request() -> None:
    from jpaged.config import DEMO_MODEL
    from jpaged.server.protocol import ChatCompletionRequest

    [body] = re.findall(r"curl .*?-d '(.*?)'", README, re.DOTALL)
    request = ChatCompletionRequest.model_validate(json.loads(body))
    assert request.model == DEMO_MODEL


def test_links_and_folders_exist() -> None:
    links = re.findall(r"\]\(([^)]*)\)", README)
    folders = re.findall(r"^\| `(\w+/)`", README, re.MULTILINE)
    assert folders
    for path in links + folders:
        assert (ROOT / path).exists(), f"README names {path}"


def test_all_cases_named_in_tests_are_explained() -> None:
    case = re.compile(r"\bO-\d+\b")
    named = {
        name
        for path in ROOT.glob("tests/**/*.py")
        for name in case.findall(path.read_text("utf-8"))
    }
    explained = re.findall(r"^\| (O-\d+) \|", (ROOT / "tests/README.md").read_text("utf-8"), re.M)
    assert explained == sorted(named, key=lambda name: int(name.removeprefix("O-")))


def test_options_of_the_server_guide_exist() -> None:
    """Its commands can be parsed, and every option of the server that it names is one."""
    from dataclasses import fields

    from jpaged.cli.main import make_parser
    from jpaged.cli.options import flag
    from jpaged.config import EngineConfig
    from jpaged.server.options import ServerOptions

    guide = (ROOT / "docs/serving.md").read_text("utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", guide)) - {"--help"}
    server = {flag(item.name) for item in fields(ServerOptions)}
    assert server <= named <= server | {flag(item.name) for item in fields(EngineConfig)}
    commands = re.findall(r"^jpaged (serve .*)$", guide, re.MULTILINE)
    assert commands
    for command in commands:
        make_parser().parse_args(command.split())


def test_the_table_of_routes_is_complete() -> None:
    from jpaged.server.app import router

    rows = re.findall(
        r"^\| `(/.*?)` \| (.*?) \|", (ROOT / "docs/api.md").read_text("utf-8"), re.MULTILINE
    )
    shown = {path: set(methods.split(", ")) for path, methods in rows}
    served = {route.path.replace(":path", ""): route.methods for route in router.routes}
    assert shown == served
