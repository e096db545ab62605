"""Every error that jpaged raises on purpose.

    JpagedError
    ├── ConfigError              an engine or server option
    ├── UnsupportedModelError    an architecture or a feature of a model
    ├── CheckpointError          the files of a model: missing, truncated, of another shape
    ├── RequestError             a request that is refused; `param` names the field
    │   └── PromptTooLongError   prompt, or prompt plus max_tokens, beyond a limit
    └── EngineDeadError          the engine loop has stopped; nothing can be served any more

A message names the field, the limit, the value given and the remedy.
"""


class JpagedError(Exception):
    """Base of all errors raised by jpaged."""


class ConfigError(JpagedError):
    """An engine or server option has a value that cannot work.

    `option` is the name of that option, or None when no single one is at fault.
    """

    def __init__(self, message: str, *, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class UnsupportedModelError(JpagedError):
    """The model's architecture, or a feature that its config asks for, is not implemented."""


class CheckpointError(JpagedError):
    """A file of the model is missing, damaged or does not fit the architecture."""


class RequestError(JpagedError):
    """A request is refused before any work is done for it.

    `param` is the name of the offending field, or None when no single field is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt, alone or together with `max_tokens`, exceeds a limit of the engine."""


class EngineDeadError(JpagedError):
    """The engine loop has stopped after an error; `__cause__` is that error."""
