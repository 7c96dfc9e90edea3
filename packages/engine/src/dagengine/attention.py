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
        batch_invariant: what other backends are asked for as well.
    """

    name: str
    backend: AttentionBackend
    implementation: str
    reason: str
    runner: Runner
    batch_invariant: bool = False

    @property
    def device(self) -> torch.device:
        """Where it runs, which is where the model is."""
        return self.runner.device

    def why_not(self, name: str) -> str | None:
        """Why another backend cannot run the same model here, or None."""
        try:
            _tried(name, self.runner, "asked for", self.batch_invariant)
        except Exception as error:
            return as_dag_error(error, FIELD).message
        return None


def choose_backend(name: str, runner: Runner, *, batch_invariant: bool = False) -> ChosenBackend:
    """The backend `name`, or for `auto` the first of `PREFERRED` that can run the runner's model on its device.

    Args:
        batch_invariant: it must promise the same bits in any batch.
    Raises:
        DagError: the backend is unknown, or cannot run the model; of `auto`, when none can, or when one fails for
            another reason than that (a wrong setting is not a reason to take a slower backend).
    """
    if name != "auto":
        try:
            return _tried(name, runner, "asked for", batch_invariant)
        except Exception as error:
            raise as_dag_error(error, FIELD) from None
    refused: list[str] = []
    for each in PREFERRED:
        try:
            reason = "; ".join(refused) or f"the fastest on {runner.device.type}"
            return _tried(each, runner, reason, batch_invariant)
        except Exception as error:
            if not (isinstance(error, KernelError) and error.code == UNSUPPORTED):
                raise as_dag_error(error, FIELD) from None
            refused.append(f"{each} cannot run: {as_dag_error(error).message}")
    raise DagError("unsupported", "; ".join(refused), FIELD)


def make_backend(name: str, *, batch_invariant: bool = False) -> AttentionBackend:
    """A new instance. Raises: KernelError, also (capability_missing) where it does not promise what is asked for."""
    backend = get_backend(name)
    if not batch_invariant:
        return backend
    if not backend.capabilities.batch_invariant:
        message = f"backend {name!r} does not give a request the same bits in any batch; fused does"
        raise KernelError(UNSUPPORTED, message, "batch_invariant")
    return get_backend(name, batch_invariant=True)


def _tried(name: str, runner: Runner, reason: str, batch_invariant: bool) -> ChosenBackend:
    backend = make_backend(name, batch_invariant=batch_invariant)
    runner.try_backend(backend)
    return ChosenBackend(backend.name, backend, backend.implementation, reason, runner, batch_invariant)
