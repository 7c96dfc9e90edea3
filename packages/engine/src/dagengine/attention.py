"""Which attention backend a model runs with where a request names none, and why. Knows backends by name only."""

from __future__ import annotations

from dataclasses import dataclass

from dagengine_kernels import AttentionBackend, KernelError, get_backend
from dagengine_kernels.errors import UNSUPPORTED

from .errors import DagError, as_dag_error
from .runner import Runner

PREFERRED = ("fused", "segmented")
"""What `auto` tries, the fastest first."""

FIELD = "attention_backend"


@dataclass(frozen=True, eq=False)
class ChosenBackend:
    """A backend that can run the model.

    Attributes:
        implementation: what really runs, as the backend names it.
        reason: why it was chosen, for people.
    """

    name: str
    backend: AttentionBackend
    implementation: str
    reason: str


def choose_backend(name: str, runner: Runner) -> ChosenBackend:
    """The backend `name`, or for `auto` the first of `PREFERRED` that can run the runner's model on its device.

    Raises:
        DagError: the backend is unknown, or cannot run the model; of `auto`, when none can, or when one fails for
            another reason than that (a wrong setting is not a reason to take a slower backend).
    """
    if name != "auto":
        try:
            return _tried(name, runner, "asked for")
        except Exception as error:
            raise as_dag_error(error, FIELD) from None
    refused: list[str] = []
    for each in PREFERRED:
        try:
            return _tried(each, runner, "; ".join(refused) or f"the fastest on {runner.device.type}")
        except Exception as error:
            if not (isinstance(error, KernelError) and error.code == UNSUPPORTED):
                raise as_dag_error(error, FIELD) from None
            refused.append(f"{each} cannot run: {as_dag_error(error).message}")
    raise DagError("unsupported", "; ".join(refused), FIELD)


def _tried(name: str, runner: Runner, reason: str) -> ChosenBackend:
    backend = get_backend(name)
    runner.try_backend(backend)
    return ChosenBackend(backend.name, backend, backend.implementation, reason)
