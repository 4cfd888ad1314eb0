"""Creates the drafter that ``--speculative-config`` names."""

from penstock.models.backends.base import Backend
from penstock.models.errors import ModelError
from penstock.models.speculative import draft_model
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter, NoDrafter
from penstock.models.speculative.heads import drafter as heads
from penstock.models.speculative.ngram import NgramDrafter
from penstock.models.speculative.suffix import SuffixDrafter
from penstock.scheduler.worker_config import DraftMethod, WorkerConfig

WITH_HEAD = (DraftMethod.EAGLE3, DraftMethod.MTP)
MAKE_ROOM = {DraftMethod.DRAFT_MODEL: draft_model.with_room} | dict.fromkeys(WITH_HEAD, heads.with_room)
"""Reserves memory for the methods that keep keys and values of their own."""


def check_speculation(config: WorkerConfig) -> WorkerConfig:
    """Returns a config that leaves room for its drafter. Raises ModelError if no drafter can do what it requires."""
    if config.speculation is None:
        return config
    if config.tensor_parallel_size > 1:
        raise ModelError(
            "--speculative-config: does not work with --tensor-parallel-size above 1, since all ranks must draft the "
            "same number of tokens, and each chooses it by its own clock: remove one of the two"
        )
    if config.pipeline_parallel_size > 1 and config.speculation.method in WITH_HEAD:
        raise ModelError(
            "--speculative-config: a head reads hidden states that other stages compute, so it does not work with "
            "--pipeline-parallel-size above 1: choose another method, or remove one of the two"
        )
    make_room = MAKE_ROOM.get(config.speculation.method)
    return config if make_room is None else make_room(config)


def make_drafter(config: WorkerConfig, backend: Backend) -> Drafter:
    """Creates the drafter that the validated config names, or one that proposes nothing if it names none. Raises
    ModelError."""
    speculation = config.speculation
    if speculation is None:
        return NoDrafter()
    match speculation.method:
        case DraftMethod.NGRAM | DraftMethod.AUTO:
            return NgramDrafter(speculation)
        case DraftMethod.SUFFIX:
            return SuffixDrafter(speculation)
        case DraftMethod.DRAFT_MODEL:
            return draft_model.load(config, backend)
        case DraftMethod.EAGLE3 | DraftMethod.MTP:
            return heads.load(config, backend)


def make_controller(config: WorkerConfig, backend: Backend) -> SpeculationController | None:
    """Creates the controller that drafts for the rows of a loaded model; None if nothing may be drafted."""
    speculation, facts = config.speculation, backend.facts
    if speculation is None and not config.drafts_predictions:
        return None
    max_drafts = 0 if speculation is None else speculation.num_speculative_tokens
    costs = StepCost(max(facts.max_num_batched_tokens, facts.max_num_seqs))
    on_repetition = speculation is not None and speculation.method is DraftMethod.AUTO
    return SpeculationController(
        make_drafter(config, backend), max_drafts, costs, backend.runs_ahead, on_repetition=on_repetition
    )
