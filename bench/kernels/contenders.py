"""What a contender of the benchmark of kernels is, and how one program attends over all pools."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jpaged.bench.kernels.cases import Case, CaseInputs


class NotApplicable(Exception):
    """A contender cannot run a case; the message says why."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    run: attends over every pool of the inputs, and returns the answers without waiting.
    run_poisoned: the answer over the poisoned pool; None for peers, which may read unused slots.
    """

    name: str
    run: Callable[[], list[Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    run_poisoned: Callable[[], Any] | None = None


# Raises `NotApplicable`, or whatever a peer or a compiler raises.
MakeContender = Callable[[Case, CaseInputs], Contender]


def describe_failure(failure: Exception) -> str:
    """Describe a failure in one line."""
    message = str(failure).strip().partition("\n")[0]
    return f"failed: {type(failure).__name__}: {message:.200}"


def chained(attend: Callable[[Array, Any], Array]) -> Callable[[Array, list[Any]], list[Array]]:
    """Make one program that attends over one pool after the other, as the layers of a step do."""

    def attend_all(query: Array, pools: list[Any]) -> list[Array]:
        answers = []
        for pool in pools:
            answers.append(attend(query, pool))
            query, _ = lax.optimization_barrier((query, answers[-1]))
        return answers

    return jax.jit(attend_all)


def run_all(attend_all: Callable[[list[Any]], list[Any]], pools: list[Any]) -> list[Any]:
    """Attend over all pools: in one program on a GPU, so that launches do not show.

    On a CPU a launch is nothing beside the work, and large programs take long to compile.
    """
    if jax.default_backend() != "cpu":
        return attend_all(pools)
    return [answer for pool in pools for answer in attend_all([pool])]


def as_numpy(answer: Any, case: Case) -> Float[np.ndarray, "T H D"]:
    """Convert an answer of any contender to float32."""
    if not isinstance(answer, jax.Array):
        answer = answer.transpose(1, 2).float().cpu().numpy()
        return answer.reshape(case.num_tokens, case.shape.num_heads, case.shape.head_dim)
    return np.asarray(answer.astype(jnp.float32))
