"""An engine that runs in its caller's thread: each step ends with the outputs of its requests."""

from jpaged.engine import Engine
from jpaged.generation import Generation
from jpaged.inputs import InputProcessor, Params, Prompt
from jpaged.output_processor import OutputProcessor


class InlineEngine:
    """Prompts in, outputs out. Not thread-safe: one thread calls everything.

    core: the engine that schedules and computes; it knows tokens only.
    """

    def __init__(self, core: Engine, inputs: InputProcessor) -> None:
        self.core = core
        self.inputs = inputs
        self._outputs = OutputProcessor(core)

    def make_request(self, request_id: str, prompt: Prompt, params: Params) -> Generation:
        """Tokenize and check a request without queueing it.

        Raises `RequestError` that names the field at fault.
        """
        generation = self.inputs.request(request_id, prompt, params)
        self.core.check_fits(generation.group)
        return generation

    def add_request(self, generation: Generation) -> None:
        """Queue a request made by `make_request`."""
        self._outputs.add(generation)
        self.core.add_request(generation.group)

    def fork(self, generation: Generation, index: int, *, seed: int | None = None) -> int:
        """Let one more answer begin as answer `index` does so far; see `Engine.fork`."""
        child = self.core.fork(generation.group, index, seed=seed)
        generation.add_answer()
        return child

    def abort(self, generation: Generation) -> None:
        """End a request and free its blocks; nothing happens if it has finished already."""
        self._outputs.abort(generation)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.core.has_unfinished

    def step(self) -> list[Generation]:
        """Run a step. Returns the requests that have new tokens or are finished."""
        return self._outputs.process(self.core.step())
