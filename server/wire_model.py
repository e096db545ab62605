"""Base class of the JSON objects that clients send, which refuses unknown fields by name."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

# What a client sends for a field that it has no use for. An object of nothing but these and
# nulls is as empty as {}.
EMPTY = ("", [], {})

# The type of fields that only label a request or hint at how to serve it. No answer depends on
# them, so any value is accepted and none is read.
Label = Any


class WireModel(BaseModel):
    """A JSON object of a client: every field is known and of its exact type, or refused.

    A field counts as not given when it is null, as OpenAI documents it, or when its value is
    listed in `no_ops`.

    no_ops: values that change nothing, by field. Fields that are not offered are listed with
        those of their values that are accepted all the same; without any, they are always refused.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if not cls._is_no_op(name, value)}

    @classmethod
    def _is_no_op(cls, name: str, value: Any) -> bool:
        """Whether a field changes nothing. Raises for one that is unknown or not supported."""
        if value is None or any(_is_same(value, no_op) for no_op in cls.no_ops.get(name, ())):
            return True
        if name in cls.model_fields:
            return False
        if name in cls.no_ops:
            raise PydanticCustomError(
                "unsupported_parameter", "is not supported yet: leave it out", {"field": name}
            )
        raise PydanticCustomError("unknown_parameter", "is not known", {"field": name})


def _is_same(value: Any, no_op: Any) -> bool:
    if no_op == {}:
        return isinstance(value, dict) and all(map(_says_nothing, value.values()))
    # In Python True == 1; on the wire they are two things.
    return isinstance(value, bool) == isinstance(no_op, bool) and value == no_op


def _says_nothing(value: Any) -> bool:
    return value is None or any(_is_same(value, empty) for empty in EMPTY)
