"""The registry of drafters: from ``--speculative-config`` to what drafts."""

from collections.abc import Callable
from importlib import import_module

from penstock.models.backend import Backend
from penstock.models.drafting import Drafter, Drafting
from penstock.models.errors import ModelError
from penstock.models.step_costs import StepCosts
from penstock.scheduler.plan import DraftMethod, SpeculationConfig, WorkerConfig

DrafterFactory = Callable[[SpeculationConfig, Backend], Drafter]

DRAFTERS = {
    DraftMethod.NGRAM: "penstock.models.ngram_drafter:load",
    DraftMethod.SUFFIX: "penstock.models.suffix_drafter:load",
}


def check_speculation(config: WorkerConfig) -> None:
    """Raises ModelError where drafts are asked for that cannot be made; before a model is loaded."""
    if config.speculation is None:
        return
    if config.speculation.method not in DRAFTERS:
        raise ModelError(
            f"--speculative-config: there is no drafter yet for method {config.speculation.method.value}: "
            f"give {' or '.join(method.value for method in DRAFTERS)}"
        )
    if config.tensor_parallel_size > 1:
        raise ModelError(
            "--speculative-config: is not for --tensor-parallel-size above 1, since ranks choose by their own clocks "
            "how much to draft, and must choose the same: leave one of the two out"
        )


def make_drafting(config: WorkerConfig, backend: Backend) -> Drafting | None:
    """What drafts for the rows of a loaded model, as the config, which was checked, asks; None: nothing does."""
    speculation, facts = config.speculation, backend.facts
    if speculation is None:
        return None
    module, _, attribute = DRAFTERS[speculation.method].partition(":")
    factory: DrafterFactory = getattr(import_module(module), attribute)
    costs = StepCosts(max(facts.max_num_batched_tokens, facts.max_num_seqs))
    return Drafting(factory(speculation, backend), speculation.num_speculative_tokens, costs, backend.runs_ahead)
