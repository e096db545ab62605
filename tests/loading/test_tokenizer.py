"""The tokenizer of a folder: text, chats and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jpaged.errors import CheckpointError, RequestError
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import (
    BOS,
    EOS,
    TAG,
    byte_level_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)

pytestmark = pytest.mark.smoke

LLAMA3_LIKE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "the quick 🔥"}]

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path, hf_config: dict[str, Any]) -> MakeFolder:
    """A model folder whose tokenizer puts BOS before a text."""

    def make(chat_template: str | None = LLAMA3_LIKE, **keys: Any) -> Path:
        backend = byte_level_tokenizer()
        bos_id = backend.token_to_id(BOS)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=BOS,
            eos_token=EOS,
            chat_template=chat_template,
            **keys,
        )
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(hf_config))
        return tmp_path

    return make


def test_text_is_tokenized_as_by_transformers(make_folder: MakeFolder) -> None:
    folder = make_folder()
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in ("", "the quick 🔥 fox", f"a{EOS}b{TAG} c", f"{BOS}x"):
        token_ids = ours.encode(text)
        assert token_ids == theirs(text)["input_ids"]
        plain = ours.encode(text, add_special_tokens=False)
        assert plain == theirs(text, add_special_tokens=False)["input_ids"] == token_ids[1:]
        for skip in (False, True):
            decoded = ours.decode(token_ids, skip_special_tokens=skip)
            assert decoded == theirs.decode(token_ids, skip_special_tokens=skip)
        assert ours.decode(plain, skip_special_tokens=False) == text


def test_special_tokens_are_those_that_decoding_skips(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer.from_folder(make_folder())
    skipped = {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if not tokenizer.decode([token_id], skip_special_tokens=True)
    }
    assert tokenizer.special_token_ids == skipped
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} == skipped


def test_ids_beyond_the_vocabulary_are_left_out(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer.from_folder(make_folder())
    token_ids = tokenizer.encode("the", add_special_tokens=False)
    padded = [tokenizer.vocab_size + 5, *token_ids, 2**31 - 1]
    assert tokenizer.decode(padded, skip_special_tokens=False) == "the"


def test_spaces_are_not_cleaned_up() -> None:
    backend = Backend(models.WordLevel({"a": 0, ",": 1, "b": 2}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert theirs.decode([0, 1, 2]) == "a, b"
    assert Tokenizer(theirs).decode([0, 1, 2], skip_special_tokens=True) == "a , b"


def test_limits_saved_for_training_do_not_cut_or_pad(make_folder: MakeFolder) -> None:
    folder = make_folder()
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.backend_tokenizer.truncation
    assert theirs.backend_tokenizer.padding
    tokenizer = Tokenizer(theirs)
    # At once, not at the first use: that would be a change while other threads read.
    assert not theirs.backend_tokenizer.truncation
    assert not theirs.backend_tokenizer.padding
    text = "the quick brown fox jumps over"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(tokenizer.encode, [text] * 64))
    assert tokenizer.decode(answers[0], skip_special_tokens=True) == text
    assert answers == [answers[0]] * 64


def test_chat_has_one_bos_and_the_ids_of_transformers(make_folder: MakeFolder) -> None:
    """O-32."""
    folder = make_folder()
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for add_generation_prompt in (True, False):
        keys = {"add_generation_prompt": add_generation_prompt}
        token_ids = ours.encode_chat(CHAT, **keys)
        assert token_ids == theirs.apply_chat_template(CHAT, **keys)["input_ids"]
        assert token_ids.count(ours.bos_token_id) == 1
        text = ours.render_chat(CHAT, **keys)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, **keys)
        assert text.endswith("[assistant]") == add_generation_prompt
    # Raw text gets what the tokenizer adds, and so a second one if it starts with one already.
    assert ours.encode(text).count(ours.bos_token_id) == 2


def test_model_without_a_chat_template_refuses_messages(make_folder: MakeFolder) -> None:
    """O-33."""
    tokenizer = Tokenizer.from_folder(make_folder(chat_template=None))
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("the")
    with pytest.raises(RequestError, match="no chat template for chats.*completions") as caught:
        tokenizer.encode_chat(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", ": roles must alternate$"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ messages[7]['content'] }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' .* is unsafe"),
        (
            "{{ namespace.__init__.__globals__ }}",
            "access to attribute '__init__' .* is unsafe|'__globals__'",
        ),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{% for x in range(999999999) %}{% endfor %}", "Range too big"),
        ("{% include 'x' %}", "no loader for this environment"),
    ],
)
def test_error_of_the_template_is_the_answer(
    make_folder: MakeFolder, template: str, message: str
) -> None:
    """O-33, O-59."""
    tokenizer = Tokenizer.from_folder(make_folder(chat_template=template))
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.render_chat(CHAT)
    assert caught.value.param == "messages"
    assert str(caught.value).startswith("the model's chat template does not take these messages")


ONE, TWO = "one {{ messages[0]['content'] }}", "two {{ messages[0]['content'] }}"


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


def with_templates(folder: Path, in_config: Any, files: dict[str, str]) -> Path:
    """The folder with these templates instead of its own."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": in_config
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("in_config", "files", "prefix"),
    [
        (named(default=ONE, tool_use=TWO), {}, "one"),
        (named(tool_use=TWO), {"chat_template.jinja": ONE}, "one"),
        (TWO, {"chat_template.jinja": ONE}, "one"),
        # With files, transformers leaves the config alone.
        (ONE, {"additional_chat_templates/rag.jinja": TWO}, None),
        (None, {"chat_template.jinja": ONE, "additional_chat_templates/rag.jinja": TWO}, "one"),
        (named(tool_use=TWO), {}, None),
        ([], {}, None),
        ("", {}, None),
    ],
)
def test_template_for_plain_chats_is_used(
    make_folder: MakeFolder, in_config: Any, files: dict[str, str], prefix: str | None
) -> None:
    """O-78: no other one; without it, texts can be completed all the same."""
    tokenizer = Tokenizer.from_folder(with_templates(make_folder(), in_config, files))
    assert tokenizer.has_chat_template == (prefix is not None)
    assert tokenizer.encode("the")
    if prefix is not None:
        assert tokenizer.render_chat(CHAT) == f"{prefix} {CHAT[0]['content']}"
        return
    other = "rag" if files else "tool_use"
    kind = f"plain chats, only for {other}" if in_config else "chats"
    with pytest.raises(RequestError, match=f"has no chat template for {kind}, so .* completions"):
        tokenizer.render_chat(CHAT)


BROKEN = "{% for message in messages %}"


@pytest.mark.parametrize(
    ("in_config", "files", "message"),
    [
        (BROKEN, {}, r"in .*tokenizer_config\.json is no valid Jinja .*Unexpected end"),
        (ONE, {"chat_template.jinja": BROKEN}, r"in .*chat_template\.jinja is no valid Jinja"),
        (named(default=BROKEN), {}, "is no valid Jinja template"),
        (5, {}, r"chat_template in .*tokenizer_config\.json must be a text or a list .* got 5"),
        ([ONE], {}, r"must be a text or a list of objects with name and template, got \[\"one"),
        ([{"name": "default"}], {}, "must be a text or a list of objects"),
        ({"default": ONE}, {}, "must be a text or a list of objects"),
        (named(default=ONE) * 2, {}, "has two templates of the name 'default'"),
    ],
)
def test_what_is_no_template_is_named_at_start(
    make_folder: MakeFolder, in_config: Any, files: dict[str, str], message: str
) -> None:
    """O-78."""
    folder = with_templates(make_folder(), in_config, files)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(folder)


PIPELINE_TEXTS = (
    *("the quick  fox", " a\n\n\tb", "theorem (a b : ℕ)", "Ciao! Come stai?", "2023 漢字 🔥"),
    *(f"x{EOS}y {TAG} z", " hello world", ""),
)
TOKENIZER_CLASSES = (
    *("LlamaTokenizerFast", "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"),
    *("PreTrainedTokenizerFast", "TokenizersBackend", None),
)


@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("class_name", TOKENIZER_CLASSES)
def test_text_is_split_as_tokenizer_json_says(
    tmp_path: Path, make_tokenizer: Callable[[], Backend], class_name: str | None
) -> None:
    """O-77: whatever class the config names. The oracle reads the file alone, as AutoTokenizer
    builds the pipeline of the class instead, which drops a first space, or fails."""
    save_tokenizer(make_tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": class_name}
    path.write_text(json.dumps(config))
    raw = Backend.from_file(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.eos_token_id, ours.has_chat_template) == (raw.token_to_id(EOS), True)
    for text in PIPELINE_TEXTS:
        token_ids = raw.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == token_ids, repr(text)
        assert ours.encode(text) == raw.encode(text).ids
        decoded = raw.decode(token_ids, skip_special_tokens=False)
        assert ours.decode(token_ids, skip_special_tokens=False) == decoded


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"at least one message, got \[\]"),
        ("hello", "messages must be a list .* got 'hello'"),
        ({"role": "user"}, "messages must be a list"),
        (["hello"], r"messages\[0\] must be an object with a role, got 'hello'"),
        ([*CHAT, {"content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] must be an object with a role"),
    ],
)
def test_what_is_no_chat_is_refused(make_folder: MakeFolder, messages: Any, message: str) -> None:
    """O-33."""
    tokenizer = Tokenizer.from_folder(make_folder())
    render_unchecked = Tokenizer.render_chat.__wrapped__  # past the tests' type checker
    with pytest.raises(RequestError, match=message) as caught:
        render_unchecked(tokenizer, messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("content", ["{}", "[", '{"model": {"type": "Magic"}}'])
def test_damaged_tokenizer_is_refused(make_folder: MakeFolder, content: str) -> None:
    folder = make_folder()
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"cannot load the tokenizer of {folder}: ."):
        Tokenizer.from_folder(folder)


def test_import_is_silent_without_torch() -> None:
    """transformers would say that it found no PyTorch."""
    hide_torch = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *rest:"
        " None if name.split('.')[0] == 'torch' else find(name, *rest);"
    )
    command = [sys.executable, "-c", hide_torch + "import jpaged.text.tokenizer"]
    loud = [sys.executable, "-c", hide_torch + "import transformers"]
    root = Path(__file__).parents[2]

    def output_of(command: list[str]) -> str:
        result = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
        return result.stdout + result.stderr

    assert "PyTorch was not found" in output_of(loud)
    assert output_of(command) == ""
