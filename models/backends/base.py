"""What runs a model on a device, and the registry of those that can. Imports no tensor library until one is chosen."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.checkpoint.checkpoint import CheckpointInfo, check_checkpoint
from penstock.models.errors import ModelError
from penstock.scheduler.plan import WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A loaded model with its KV pages. Not thread safe; calls run strictly in order."""

    @property
    def facts(self) -> WorkerFacts:
        """What was loaded, and the limits that follow."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether ``start_step`` returns before the batch is computed."""
        ...

    def reset_blocks(self, block_ids: list[int]) -> None:
        """The blocks have a new owner, who will write them: forgets what they held, so that nothing of it can be
        read."""
        ...

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Copies blocks to slots of the host tier, for which ``facts`` say how many there are: pairs of block and slot.
        Whatever is called later finds it done."""
        ...

    def copy_in(self, copies: list[tuple[int, int]]) -> None:
        """Copies slots of the host tier to blocks, bit for bit what was copied out: pairs of slot and block. Whatever
        is called later finds it done."""
        ...

    def prefault(self) -> None:
        """Has the system give what the first requests will write, when nothing is computed. Called once, when nothing
        is measured any more."""
        ...

    def start_step(self, batch: Batch) -> "Finish":
        """Has the layers run, writing the KV of every token, and the next token chosen of each row that has all its
        history computed; adds to the vectors of those that are pooled. Where that goes on without the caller, the next
        batch may begin before this one is finished: its rows' newest tokens are ``UNKNOWN`` then."""
        ...


Finish = Callable[[], BatchResult]
"""Waits until a batch is computed. It is called once for each batch, in their order, perhaps by another thread than
``start_step``."""


class SynchronousBackend(ABC):
    """Half of a backend that has computed a batch as soon as it began."""

    runs_ahead = False

    @abstractmethod
    def run(self, batch: Batch) -> BatchResult:
        """The whole step."""

    def start_step(self, batch: Batch) -> Finish:
        """Computes it, and says so."""
        result = self.run(batch)
        return lambda: result


BackendFactory = Callable[[WorkerConfig, CheckpointInfo], Backend]
Objection = Callable[[WorkerConfig, CheckpointInfo], str | None]
"""Why a backend cannot run a model as the config asks; None if it can."""


@dataclass(frozen=True)
class _Entry:
    """A backend that can be had."""

    factory: str
    """Where it is: module:attribute."""
    unsupported_reason: str | None
    """What says why it cannot be had; None: nothing speaks against it."""
    device: str | None
    """For which ``auto`` considers it; None: for all."""


_HERE = "penstock.models.backends"
BACKENDS = {
    "cpu": _Entry(f"{_HERE}.cpu.backend:load", f"{_HERE}.cpu.backend:unsupported_reason", "cpu"),
    "cuda": _Entry(f"{_HERE}.cuda.backend:load", f"{_HERE}.cuda.backend:unsupported_reason", "cuda"),
    "reference": _Entry(f"{_HERE}.reference.backend:load", None, None),
}
"""By name; ``auto`` is the first that can."""


def load_backend(config: WorkerConfig) -> Backend:
    """Checks the model's files and loads them with the backend that the config names, or with the best one. Raises
    ModelError."""
    is_auto = config.backend == "auto"
    kind = config.device.partition(":")[0]
    names = [name for name, entry in BACKENDS.items() if entry.device in (kind, None)] if is_auto else [config.backend]
    if names[0] not in BACKENDS:
        raise ModelError(
            f"--backend {names[0]}: there is none of that name: choose auto or one of {', '.join(BACKENDS)}"
        )
    info = check_checkpoint(Path(config.model), weights=config.load_format != "dummy")
    for warning in info.warnings if config.tensor_parallel_rank == 0 else ():
        logger.warning("%s", warning)
    for name in names:
        entry = BACKENDS[name]
        why_not = _why_not(entry, config, info)
        if why_not is None:
            load: BackendFactory = _found(entry.factory)
            return load(config, info)
        if not is_auto:
            raise ModelError(f"--backend {name}: {why_not}")
        logger.warning("SLOW: this model runs on the backend in plain torch, not on the one for %s: %s", kind, why_not)
    raise AssertionError("the last backend has no objections")


def _why_not(entry: _Entry, config: WorkerConfig, info: CheckpointInfo) -> str | None:
    if entry.unsupported_reason is None:
        return None
    try:
        unsupported_reason: Objection = _found(entry.unsupported_reason)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'penstock[server]'"
    return unsupported_reason(config, info)


def _found(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
