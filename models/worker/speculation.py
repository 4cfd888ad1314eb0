"""The registry of drafters: maps ``--speculative-config`` to a drafter."""

from collections.abc import Callable
from importlib import import_module

from penstock.models.backends.base import Backend
from penstock.models.errors import ModelError
from penstock.models.speculative import draft_model
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter
from penstock.models.speculative.eagle import drafter as eagle
from penstock.scheduler.plan import DraftMethod, WorkerConfig

DrafterFactory = Callable[[WorkerConfig, Backend], Drafter]

DRAFTERS = {
    DraftMethod.NGRAM: "penstock.models.speculative.ngram:load",
    DraftMethod.SUFFIX: "penstock.models.speculative.suffix:load",
    DraftMethod.DRAFT_MODEL: "penstock.models.speculative.draft_model:load",
    DraftMethod.EAGLE3: "penstock.models.speculative.eagle.drafter:load",
}

MAKE_ROOM = {DraftMethod.DRAFT_MODEL: draft_model.with_room, DraftMethod.EAGLE3: eagle.with_room}
"""Reserves memory for the methods that keep keys and values of their own."""


def check_speculation(config: WorkerConfig) -> WorkerConfig:
    """Returns a config of the model that leaves room for its drafter. Called before a model is loaded. Raises
    ModelError if the config requires drafts that cannot be made."""
    if config.speculation is None:
        return config
    if config.tensor_parallel_size > 1:
        raise ModelError(
            "--speculative-config: does not work with --tensor-parallel-size above 1, since all ranks must draft the "
            "same number of tokens, and each chooses it by its own clock: remove one of the two"
        )
    make_room = MAKE_ROOM.get(config.speculation.method)
    return config if make_room is None else make_room(config)


def make_drafter(config: WorkerConfig, backend: Backend) -> Drafter:
    """Creates the drafter that the checked config names. Raises ModelError."""
    assert config.speculation is not None
    module, _, attribute = DRAFTERS[config.speculation.method].partition(":")
    factory: DrafterFactory = getattr(import_module(module), attribute)
    return factory(config, backend)


def make_controller(config: WorkerConfig, backend: Backend) -> SpeculationController | None:
    """Creates the controller that drafts for the rows of a loaded model, as the checked config specifies; None if it
    has no speculation."""
    speculation, facts = config.speculation, backend.facts
    if speculation is None:
        return None
    costs = StepCost(max(facts.max_num_batched_tokens, facts.max_num_seqs))
    return SpeculationController(
        make_drafter(config, backend), speculation.num_speculative_tokens, costs, backend.runs_ahead
    )
