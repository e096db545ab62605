"""Messages of the role developer, by what the model's chat template knows."""

import pytest
from transformers import PreTrainedTokenizerFast

from jpaged.text.chat_roles import with_known_roles
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import BOS, byte_level_tokenizer

LLAMA3_LIKE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n"
    "{% endfor %}"
)
STRICT = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
)
DEFAULT_PROMPT = (
    "{% if messages[0]['role'] != 'system' %}[system]You help developers.\n{% endif %}" + STRICT
)
OWN_BRANCH = (
    "{% for message in messages %}{% if message['role'] == 'developer' %}[rule]"
    "{% else %}[{{ message['role'] }}]{% endif %}{{ message['content'] }}\n{% endfor %}"
)
Turns = list[tuple[str, str]]


def render(template: str, turns: Turns) -> str:
    backend = byte_level_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, chat_template=template
    )
    messages = [{"role": role, "content": content} for role, content in turns]
    return Tokenizer(tokenizer).render_chat(messages)


@pytest.mark.parametrize("template", [LLAMA3_LIKE, STRICT, DEFAULT_PROMPT])
@pytest.mark.parametrize(
    "roles",
    [
        ["developer", "user"],
        ["system", "developer", "user"],
        ["user", "developer", "user"],
    ],
)
def test_templates_that_know_system_messages_only(template: str, roles: list[str]) -> None:
    """O-64: rendered as system messages would be, each in its place."""
    turns = [(role, f"text {number}") for number, role in enumerate(roles)]
    as_system = [("system" if role == "developer" else role, text) for role, text in turns]
    text = render(template, turns)
    assert text == render(template, as_system)
    assert "[developer]" not in text
    assert all(content in text for _, content in turns)


def test_template_that_names_developer_decides_itself() -> None:
    """O-64"""
    turns = [("system", "a"), ("developer", "b"), ("user", "c")]
    assert render(OWN_BRANCH, turns) == "[system]a\n[rule]b\n[user]c\n"


@pytest.mark.parametrize("name", ["'developer'", '"developer"'])
def test_messages_are_not_changed_in_place(name: str) -> None:
    messages = [{"role": "developer", "content": "a"}]
    assert with_known_roles(messages, f"{{{{ {name} }}}}") == messages
    assert with_known_roles(messages, "developer")[0]["role"] == "system"
    assert messages[0]["role"] == "developer"
