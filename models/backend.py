"""What runs a model on a device, and the registry of those that can. Imports no tensor library until one is chosen."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.models.batch import Batch
from penstock.models.checkpoint import CheckpointInfo, check_checkpoint
from penstock.models.errors import ModelError
from penstock.scheduler.plan import WorkerConfig, WorkerFacts

if TYPE_CHECKING:
    from torch import Tensor


class Backend(Protocol):
    """A loaded model with its KV pages. Not thread safe; calls run strictly in order."""

    @property
    def facts(self) -> WorkerFacts:
        """What was loaded, and the limits that follow."""
        ...

    def renew(self, block_ids: list[int]) -> None:
        """The blocks have a new owner, who will write them: forgets what they held, so that nothing of it can be
        read."""
        ...

    def forward(self, batch: Batch) -> "Tensor":
        """Runs the layers, writing the KV of every token; returns (T, hidden) after the last norm."""
        ...

    def logits(self, hidden: "Tensor") -> "Tensor":
        """(N, hidden) -> (N, tokenizer's vocabulary), in at least fp32, the caller's to change."""
        ...


BackendFactory = Callable[[WorkerConfig, CheckpointInfo], Backend]

BACKENDS = {"reference": "penstock.models.reference_backend:load"}
"""Name of each backend, and where its factory is."""

DEFAULT_BACKEND = "reference"
"""What ``auto`` means."""


def load_backend(config: WorkerConfig) -> Backend:
    """Checks the model's files and loads them with the backend that the config names. Raises ModelError."""
    name = DEFAULT_BACKEND if config.backend == "auto" else config.backend
    if name not in BACKENDS:
        raise ModelError(
            f"backend {name}: there is none of that name: choose auto or one of {', '.join(sorted(BACKENDS))}"
        )
    info = check_checkpoint(Path(config.model), weights=config.load_format != "dummy")
    module, _, attribute = BACKENDS[name].partition(":")
    factory: BackendFactory = getattr(import_module(module), attribute)
    return factory(config, info)
