"""The registry of drafters: from ``--speculative-config`` to what drafts."""

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
"""Of those that keep keys and values."""


def check_speculation(config: WorkerConfig) -> WorkerConfig:
    """The config of a model that leaves room for what its drafter needs. Raises ModelError where drafts are asked for
    that cannot be made; before a model is loaded."""
    if config.speculation is None:
        return config
    if config.tensor_parallel_size > 1:
        raise ModelError(
            "--speculative-config: is not for --tensor-parallel-size above 1, since ranks choose by their own clocks "
            "how much to draft, and must choose the same: leave one of the two out"
        )
    make_room = MAKE_ROOM.get(config.speculation.method)
    return config if make_room is None else make_room(config)


def make_drafter(config: WorkerConfig, backend: Backend) -> Drafter:
    """The drafter that the config, which was checked, asks for. Raises ModelError."""
    assert config.speculation is not None
    module, _, attribute = DRAFTERS[config.speculation.method].partition(":")
    factory: DrafterFactory = getattr(import_module(module), attribute)
    return factory(config, backend)


def make_controller(config: WorkerConfig, backend: Backend) -> SpeculationController | None:
    """What drafts for the rows of a loaded model, as the config, which was checked, asks; None: nothing does."""
    speculation, facts = config.speculation, backend.facts
    if speculation is None:
        return None
    costs = StepCost(max(facts.max_num_batched_tokens, facts.max_num_seqs))
    return SpeculationController(
        make_drafter(config, backend), speculation.num_speculative_tokens, costs, backend.runs_ahead
    )
