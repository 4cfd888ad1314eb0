"""Tiny hybrids, and rows of them that are driven by plans made by hand."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engines import InProcessExecutor, SteadyCost

from penstock.models.backends.base import Backend, load_backend
from penstock.models.batch.rows import RowTable
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.draft_rows import Drafted
from penstock.models.speculative.drafter import NoDrafter
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import (
    NO_SLOT,
    AddedRow,
    Chunk,
    Decode,
    RowResult,
    SamplingParams,
    StateSnapshot,
    StepPlan,
)
from penstock.scheduler.worker_config import WorkerConfig

DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
GRANITE: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "mamba_expand": 2,
    "shared_intermediate_size": 72,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
FALCON: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_ssm": 80,
    "mamba_d_state": 24,
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.4, 0.8, 1.2, 0.7],
    "mlp_multipliers": [1.5, 0.6],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-biases-taps4": (
        "Lfm2Config",
        {
            "layer_types": ["full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", {**DELTA_NET, **EXPERTS, "mlp_only_layers": [0], "attention_bias": True}),
    "qwen3.5": ("Qwen3_5TextConfig", {**DELTA_NET, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA_NET, **EXPERTS}),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 24,
            "mlp_bias": True,
        },
    ),
    "nemotron-3": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
        },
    ),
    "falcon-h1": ("FalconH1Config", FALCON),
    "falcon-h1-norm-biases": (
        "FalconH1Config",
        {
            **FALCON,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.01, 0.7],
        },
    ),
    "granite-hybrid": ("GraniteMoeHybridConfig", {**GRANITE, "num_local_experts": 0}),
    "granite-hybrid-experts-rope": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_n_groups": 2,
        },
    ),
}
TYPICAL = ("lfm2", "qwen3-next", "nemotron-h")
"""A variant of each kind of mixer."""
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


MAX_DRAFTS = 6


class Knowing(SpeculationController):
    """Drafts what is known to come, with errors. ``answers`` are the outputs of prompts."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]]) -> None:
        super().__init__(NoDrafter(), MAX_DRAFTS, SteadyCost(), runs_ahead=False, clock=lambda: 0.0)
        self._answers = answers

    def propose(
        self,
        plan: StepPlan,
        table: RowTable,
        wait_for_tokens: Callable[[], object],
        forced: Mapping[int, Sequence[int]],
    ) -> Drafted:
        drafts, room = {}, plan.max_drafts
        for decode in plan.decodes:
            row = table[decode.row]
            begin = len(row.history) - row.num_prompt_tokens
            most = min(decode.max_tokens - 1, room)
            # Every eleventh token is another, so all or some of a step's drafts are right, or none.
            known = enumerate(self._answers[tuple(row.history[: row.num_prompt_tokens])])
            tokens = [(token + 1) % 160 if at % 11 == 7 else token for at, token in known][begin : begin + most]
            if tokens:
                drafts[decode.row] = tokens
                room -= len(tokens)
        return Drafted(drafts)


class KnowingExecutor(InProcessExecutor):
    """Drafts the answers that it knows, if it knows any."""

    def __init__(self, config: WorkerConfig, answers: Mapping[tuple[int, ...], list[int]] | None) -> None:
        super().__init__(config)
        self._answers = answers

    def _drafting(self, config: WorkerConfig, backend: Backend) -> SpeculationController | None:
        return super()._drafting(config, backend) if self._answers is None else Knowing(self._answers)


class Rows:
    """A runner, and its plans."""

    def __init__(self, config: WorkerConfig) -> None:
        self.backend = load_backend(config)
        self.runner = Runner(self.backend)
        self._free = list(range(self.backend.facts.num_blocks))
        self._blocks: dict[int, list[int]] = {}
        self._num_blocks = min(20, self.backend.facts.max_model_len // 16)
        """The blocks of a row."""

    def run(self, **lists: Any) -> list[RowResult]:
        """Runs a plan of these lists."""
        empty: dict[str, Any] = {"dropped": [], "added": [], "blocks": [], "chunks": [], "decodes": []}
        return self.runner.run(StepPlan(0, **{**empty, **lists})).rows

    def row(
        self, number: int, tokens: Sequence[int], slot: int, source: int = NO_SLOT, like: int = -1, at: int = 0
    ) -> AddedRow:
        """Returns a row that begins, with the state in ``source`` and the blocks of row ``like`` up to ``at``."""
        blocks = self._blocks[like][: at // 16] if at else []
        blocks = blocks + [self._free.pop() for _ in range(self._num_blocks - len(blocks))]
        self._blocks[number] = blocks
        return AddedRow(
            number,
            0,
            list(tokens),
            len(tokens),
            at,
            blocks,
            GREEDY,
            max_drafts=16,
            state_slot=slot,
            state_source=source,
        )

    def begin(self, row: AddedRow, *ends: int, snapshots: Sequence[StateSnapshot] = ()) -> RowResult:
        """Computes a row's history in chunks that end here, and then its rest."""
        self.run(added=[row], snapshots=list(snapshots))
        start = row.num_computed
        for end in (*ends, len(row.token_ids)):
            [result] = self.run(chunks=[Chunk(row.row, start, end)])
            start = end
        return result

    def decode(self, number: int, count: int, snapshots: Sequence[StateSnapshot] = ()) -> list[int]:
        """Returns the next tokens of a row."""
        tokens: list[int] = []
        for step in range(count):
            named = list(snapshots) if step == 0 else []
            tokens += self.run(decodes=[Decode(number, 1)], snapshots=named)[0].token_ids
        return tokens

    def verify(self, number: int, drafts: Sequence[int], snapshots: Sequence[StateSnapshot] = ()) -> RowResult:
        """Runs a step with these drafts."""
        plan = StepPlan(0, [], [], [], [], [Decode(number, len(drafts) + 1)], snapshots=list(snapshots))
        self.runner._apply(plan)
        [result] = self.runner._compute(plan, Drafted({number: list(drafts)}), 0)().rows
        return result


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory, build_model: Callable[..., Any]) -> Callable[[str], Any]:
    """The model of a variant's name; each is made once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = build_model(tmp_path_factory.mktemp(name), *VARIANTS[name])
        return made[name]

    return get


@pytest.fixture(scope="session", params=list(VARIANTS))
def any_hybrid(request: pytest.FixtureRequest, hybrid: Callable[[str], Any]) -> Any:
    """Every variant in turn."""
    return hybrid(request.param)


@pytest.fixture(
    scope="session",
    params=[name if name in TYPICAL else pytest.param(name, marks=pytest.mark.soak) for name in VARIANTS],
)
def typical_hybrid(request: pytest.FixtureRequest, hybrid: Callable[[str], Any]) -> Any:
    """Each of ``TYPICAL`` in turn, and in the soak tests every variant."""
    return hybrid(request.param)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each that runs recurrent layers, in turn. Tests that name them may add the one for GPUs, only for ``TYPICAL``
    models, since it takes minutes in Triton's interpreter."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    if request.param == "cuda":
        pytest.importorskip("triton")
        if request.node.callspec.params["typical_hybrid"] not in TYPICAL:
            pytest.skip("it takes minutes")
    return str(request.param)


@pytest.fixture
def knowing_executor(worker_config: Callable[..., WorkerConfig]) -> Callable[..., KnowingExecutor]:
    """An executor in this process: ``knowing_executor(path, answers=None, num_blocks=None, **config)``."""

    def make(
        path: Path,
        answers: Mapping[tuple[int, ...], list[int]] | None = None,
        num_blocks: int | None = None,
        **config: Any,
    ) -> KnowingExecutor:
        return KnowingExecutor(msgspec.structs.replace(worker_config(path, **config), num_blocks=num_blocks), answers)

    return make


@pytest.fixture
def rows(worker_config: Callable[..., WorkerConfig]) -> Callable[..., Rows]:
    """Rows of a model: ``rows(path, **config)``."""

    def make(path: Path, **config: Any) -> Rows:
        return Rows(worker_config(path, **{"max_num_seqs": 8, "max_model_len": 400, **config}))

    return make


@pytest.fixture
def check_greedy() -> Callable[..., None]:
    """``check_greedy(model, prompt, token_ids)``: they are transformers' greedy continuation."""

    def check(model: Any, prompt: list[int], token_ids: list[int]) -> None:
        logits = model.logits(prompt + token_ids)[len(prompt) - 1 : -1]
        assert token_ids == logits.argmax(-1).tolist()

    return check


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of 75 tokens, four blocks and a part."""
    return torch.randint(0, 160, (75,), generator=torch.Generator().manual_seed(5)).tolist()
