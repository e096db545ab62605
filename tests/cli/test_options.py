"""O-62: the effective value of every option is the value given; bad ones are refused by name."""

import argparse
from dataclasses import fields
from typing import Any

import pytest

from jpaged.cli.commands import COMMANDS
from jpaged.cli.main import make_parser
from jpaged.cli.model_argument import apply_model_argument
from jpaged.cli.options import flag, integer, read_options
from jpaged.cli.sampling import read_sampling_options
from jpaged.config import EngineConfig
from jpaged.errors import ConfigError, RequestError
from jpaged.sampling_params import SamplingParams
from jpaged.server.api_keys import Secret
from jpaged.server.options import ServerOptions

# Field, what is typed, what it becomes. Every value differs from the default.
ENGINE_OPTIONS: list[tuple[str, list[str], Any]] = [
    ("model", ["--model", "some/model"], "some/model"),
    ("served_model_name", ["--served-model-name", "mine"], "mine"),
    ("skip_tokenizer_init", ["--skip-tokenizer-init"], True),
    ("generation_config", ["--generation-config", "vllm"], "vllm"),
    ("dtype", ["--dtype", "bfloat16"], "bfloat16"),
    ("kv_cache_dtype", ["--kv-cache-dtype", "int8"], "int8"),
    ("tensor_parallel_size", ["--tensor-parallel-size", "2"], 2),
    ("max_model_len", ["--max-model-len", "4K"], 4096),
    ("block_size", ["--block-size=32"], 32),
    ("max_num_seqs", ["--max-num-seqs", "7"], 7),
    ("max_num_batched_tokens", ["--max-num-batched-tokens", "1k"], 1000),
    ("bucket_growth", ["--bucket-growth", "4"], 4),
    ("enable_prefix_caching", ["--no-enable-prefix-caching"], False),
    ("gpu_memory_utilization", ["--gpu-memory-utilization", "0.5"], 0.5),
    ("kv_cache_memory_bytes", ["--kv-cache-memory-bytes", "2G"], 2**31),
    ("num_gpu_blocks_override", ["--num-gpu-blocks-override", "50"], 50),
    ("swap_space", ["--swap-space", "0.5"], 0.5),
    ("preemption_mode", ["--preemption-mode", "recompute"], "recompute"),
    ("attention_backend", ["--attention-backend", "xla"], "xla"),
    ("tuning_file", ["--tuning-file", "sizes.json"], "sizes.json"),
    ("seed", ["--seed", "-3"], -3),
    ("compilation_cache_dir", ["--compilation-cache-dir", "/cache"], "/cache"),
    ("check_invariants", ["--check-invariants"], True),
]
SERVER_OPTIONS: list[tuple[str, list[str], Any]] = [
    ("host", ["--host", "0.0.0.0"], "0.0.0.0"),
    ("port", ["--port", "0"], 0),
    ("api_key", ["--api-key", "a", "--api-key", "b"], (Secret("a"), Secret("b"))),
    ("api_key_file", ["--api-key-file", "keys"], "keys"),
    ("allowed_origins", ["--allowed-origins", "https://a.example"], ("https://a.example",)),
    ("ssl_certfile", ["--ssl-certfile", "a.pem"], "a.pem"),
    ("ssl_keyfile", ["--ssl-certfile", "a.pem", "--ssl-keyfile", "a.key"], "a.key"),
    ("root_path", ["--root-path", "/llm"], "/llm"),
    ("keep_alive_timeout", ["--keep-alive-timeout", "7"], 7),
    ("head_timeout", ["--head-timeout", "0.5"], 0.5),
    ("body_timeout", ["--body-timeout", "0.5"], 0.5),
    ("max_body_bytes_in_flight", ["--max-body-bytes-in-flight", "1G"], 2**30),
    ("max_queued_requests", ["--max-queued-requests", "3"], 3),
    ("shutdown_timeout", ["--shutdown-timeout", "2.5"], 2.5),
]


def parse(*argv: str) -> argparse.Namespace:
    return make_parser().parse_args(argv)


@pytest.mark.parametrize(
    ("config_class", "table"), [(EngineConfig, ENGINE_OPTIONS), (ServerOptions, SERVER_OPTIONS)]
)
def test_every_option_takes_effect(config_class: type, table: list[tuple[str, Any, Any]]) -> None:
    assert [name for name, _, _ in table] == [item.name for item in fields(config_class)]
    for name, typed, expected in table:
        default = read_options(config_class, parse("serve"))
        config = read_options(config_class, parse("serve", *typed))
        assert getattr(config, name) == expected != getattr(default, name), name
        # A key needs a certificate, too.
        typed_names = {word.partition("=")[0].replace("--no-", "--") for word in typed}
        others = [item.name for item in fields(config_class) if flag(item.name) not in typed_names]
        assert all(getattr(config, other) == getattr(default, other) for other in others)


def test_defaults_are_those_of_the_classes() -> None:
    for command in ("serve", "chat"):
        assert read_options(EngineConfig, parse(command)) == EngineConfig()
    assert read_options(ServerOptions, parse("serve")) == ServerOptions()
    # What is not given is left to the model's defaults.
    assert read_sampling_options(parse("generate", "hi")) == {"max_tokens": 256}
    assert read_sampling_options(parse("chat")) == {"max_tokens": None}


def test_options_can_be_switched_off() -> None:
    config = read_options(EngineConfig, parse("serve", "--no-check-invariants"))
    assert config.check_invariants is False


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_model_as_a_positional_argument(command: str) -> None:
    for argv in (["a/model"], ["--model", "a/model"], ["a/model", "--model", "a/model"]):
        arguments = parse(command, *argv)
        apply_model_argument(arguments)
        assert read_options(EngineConfig, arguments).model == "a/model"
    with pytest.raises(ConfigError, match="two models given: a and --model b"):
        apply_model_argument(parse(command, "a", "--model", "b"))


SAMPLING_OPTIONS: list[tuple[str, list[str], Any]] = [
    ("max_tokens", ["--max-tokens", "5"], 5),
    ("temperature", ["--temperature", "0"], 0),
    ("top_p", ["--top-p", "0.5"], 0.5),
    ("top_k", ["--top-k", "-1"], -1),
    ("seed", ["--seed", "9"], 9),
    ("seed", ["--seed", "-1"], None),  # O-74: draws one
    ("stop", ["--stop", "a", "--stop", "b"], ("a", "b")),
]


@pytest.mark.parametrize(("name", "typed", "expected"), SAMPLING_OPTIONS)
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_sampling_options(command: list[str], name: str, typed: list[str], expected: Any) -> None:
    arguments = parse(*command, *typed)
    given = read_sampling_options(arguments)
    assert given.keys() == {name, "max_tokens"}
    assert getattr(SamplingParams(**given), name) == expected
    # --seed is the sample's here, and not the engine's.
    assert read_options(EngineConfig, arguments) == EngineConfig()


BAD_OPTIONS = [
    *(("--block-size", value) for value in ("0", "-1", "3.5", "12", "512", "")),
    *(("--max-model-len", value) for value in ("0", "-5", "4x", "nan")),
    *(("--max-num-seqs", value) for value in ("0", "two")),
    *(("--gpu-memory-utilization", value) for value in ("0", "1.5", "nan", "half")),
    *(("--dtype", value) for value in ("int8", "")),
    ("--num-gpu-blocks-override", "0"),
    ("--seed", "1.5"),
    ("--attention-backend", "magic"),
    *(("--kv-cache-dtype", value) for value in ("fp8", "bfloat16", "")),
    *(("--port", value) for value in ("99999", "-1", "http", "80.5")),
    *(("--shutdown-timeout", value) for value in ("-1", "nan", "inf", "soon")),
    ("--host", ""),
    ("--ssl-keyfile", "a.key"),
    *(("--allowed-origins", value) for value in ("", "a.example", "https://a.example/")),
    *(("--root-path", value) for value in ("llm", "/llm/", "/")),
    *(("--head-timeout", value) for value in ("0", "nan", "inf")),
    *(("--body-timeout", value) for value in ("0", "nan", "inf")),
    *(("--max-body-bytes-in-flight", value) for value in ("0", "1.5")),
    *(("--max-queued-requests", value) for value in ("0", "-1")),
    *(("--keep-alive-timeout", value) for value in ("0", "1.5")),
    ("--served-model-name", ""),
    ("--unheard-of", "1"),
    ("--block", "16"),  # no abbreviations: the next release may have another --block...
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS)
def test_bad_values_are_refused_by_name(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the parser, which exits with 2, or by the config, for which `main` does."""
    try:
        arguments = parse("serve", f"{name}={value}")
        read_options(ServerOptions, arguments)
        read_options(EngineConfig, arguments)
    except SystemExit as stop:
        assert stop.code == 2
        message = capsys.readouterr().err
    except ConfigError as error:
        message = str(error)
    else:
        pytest.fail(f"{name} {value} was taken")
    assert name in message


@pytest.mark.parametrize(
    ("config_class", "name"),
    [(kind, item.name) for kind in (EngineConfig, ServerOptions) for item in fields(kind)],
)
def test_values_of_another_type_are_refused_by_name(config_class: type, name: str) -> None:
    """O-62: whatever the option; an object is of no option's type, and bools are no numbers."""
    got = "another value" if name == "api_key" else "<object"
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got {got}") as refused:
        config_class(**{name: object()})
    assert refused.value.option == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "8000"),
        ("port", True),
        ("allowed_origins", ["https://a.example"]),
        ("allowed_origins", "https://a.example"),
        ("allowed_origins", (b"https://a.example",)),
        ("api_key", ("hush",)),
        ("body_timeout", float("nan")),
    ],
)
def test_server_options_of_another_type(name: str, value: Any) -> None:
    """Those that look right, too; a key is shown in no error."""
    with pytest.raises(ConfigError, match=f"^{name} must be") as refused:
        ServerOptions(**{name: value})
    assert refused.value.option == name and "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("tuning_file", 5),
        ("served_model_name", 5),
        ("max_num_seqs", True),
        ("seed", 2**70),
        ("seed", -(2**31) - 1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be") as refused:
        EngineConfig(**{name: value})
    assert refused.value.option == name


def test_a_step_has_a_token_for_every_request() -> None:
    with pytest.raises(ConfigError, match="must be at least max_num_seqs"):
        EngineConfig(max_num_seqs=1000, max_num_batched_tokens=999)


def test_bad_sampling_values_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="--top-p: top_p must be a number"):
        read_sampling_options(parse("generate", "hi", "--top-p", "1.5"))
    with pytest.raises(RequestError, match="--max-tokens: max_tokens must be an integer"):
        read_sampling_options(parse("generate", "hi", "--max-tokens", "0"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5),
        ("-5", -5),
        ("+5", 5),
        ("1k", 1000),
        ("1K", 1024),
        ("2m", 2 * 10**6),
        ("3G", 3 << 30),
    ],
)
def test_integers(text: str, expected: int) -> None:
    assert integer(text) == expected


@pytest.mark.parametrize("text", ["", "k", "1.5", "1kk", "1 k", "0x10", "1_000", "nan"])
def test_other_texts_are_no_integers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not an integer"):
        integer(text)


ENGINE_COMMANDS = [command for command in COMMANDS if command.name != "bench"]


@pytest.mark.parametrize("command", ENGINE_COMMANDS, ids=lambda command: command.name)
def test_help_shows_every_option_and_default(command: Any) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for item in fields(EngineConfig):
        shown = flag(item.name) in text
        assert shown or command.name != "serve", item.name
    assert "at once (default: 64 on a CPU, else 256)" in text
    assert "default: off" in text and "False" not in text
    assert "random keys (default: 0)" in text or command.name != "serve"
