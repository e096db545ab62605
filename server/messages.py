"""Messages of chats on the wire.

Clients send back the messages that they got, from this server or another one, with everything
that was in them. Fields that hold nothing are therefore accepted; those that hold something that
the model would not see are refused by name.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, WrapValidator
from pydantic_core import PydanticCustomError

from jpaged.server.wire_model import EMPTY, Label, WireModel

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 8192


class ContentPart(WireModel):
    """A text part of a message. cache_control: ignored, as prefixes are cached anyway."""

    no_ops = {"citations": EMPTY, "annotations": EMPTY}

    type: Literal["text"]
    text: str
    cache_control: Label = None


def _supported_part(part: Any, validate: Callable[[Any], ContentPart]) -> ContentPart:
    """Refuse a part of another type by its type, before its fields are refused as unknown."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise PydanticCustomError(
            "unsupported_parameter",
            "is {kind}, which is not supported yet: only text is",
            {"field": "type", "kind": f"{kind!r:.100}"},
        )
    return validate(part)


def _text_or_parts(content: Any, validate: Callable[[Any], list[ContentPart]]) -> list[ContentPart]:
    # A pydantic union would report the errors of both alternatives.
    if isinstance(content, str):
        return [ContentPart.model_construct(type="text", text=content)]
    if not isinstance(content, list):
        raise PydanticCustomError("invalid_type", "should be a string or a list")
    return validate(content)


ContentParts = Annotated[
    list[Annotated[ContentPart, WrapValidator(_supported_part)]],
    FailFast(),
    WrapValidator(_text_or_parts),
]


class ChatMessage(WireModel):
    """One turn of a conversation.

    id, metadata: labels of clients that keep conversations.
    """

    no_ops = {
        "tool_calls": EMPTY,
        "tool_call_id": EMPTY,
        "function_call": EMPTY,
        "refusal": EMPTY,
        "audio": EMPTY,
        "images": EMPTY,
        "annotations": EMPTY,
        "reasoning": EMPTY,
        "reasoning_content": EMPTY,
        "reasoning_details": EMPTY,
        "thinking": EMPTY,
        "thinking_blocks": EMPTY,
        "provider_specific_fields": EMPTY,
        "parsed": EMPTY,
        "prefix": (False,),
        "partial": (False,),
        "name": ("",),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ContentParts
    name: str | None = None
    id: Label = None
    metadata: Label = None

    @property
    def text(self) -> str:
        """The text parts, joined by line breaks as in vLLM."""
        return "\n".join(part.text for part in self.content)


def _limited_parts(messages: Any) -> Any:
    """Check the number of parts before each of them is checked, which takes microseconds."""
    if isinstance(messages, list):
        contents = (each.get("content") for each in messages if isinstance(each, dict))
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        if num_parts > MAX_CONTENT_PARTS:
            raise PydanticCustomError(
                "too_long",
                "may have at most {limit} content parts together, not {number}: join texts",
                {"limit": MAX_CONTENT_PARTS, "number": num_parts},
            )
    return messages


Messages = Annotated[
    list[ChatMessage],
    FailFast(),
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_limited_parts),
]
