"""Which attention backend a model runs with where a request names none, and why. Knows backends by name only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
        runner: whose model it runs.
    """

    name: str
    backend: AttentionBackend
    implementation: str
    reason: str
    runner: Runner

    @property
    def device(self) -> torch.device:
        """Where it runs, which is where the model is."""
        return self.runner.device

    def why_not(self, name: str) -> str | None:
        """Why another backend cannot run the same model here, or None."""
        try:
            _tried(name, self.runner, "asked for")
        except Exception as error:
            return as_dag_error(error, FIELD).message
        return None


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
    return ChosenBackend(backend.name, backend, backend.implementation, reason, runner)
