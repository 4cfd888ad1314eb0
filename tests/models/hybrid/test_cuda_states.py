"""Recurrent states on the backend for GPUs: each row goes on as if it had computed all of its tokens itself. Without a
GPU its kernels run in Triton's interpreter, so models and prompts are as small as can be."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.batch.batch import build_batch
from penstock.models.batch.sampled_positions import GrammarBitmasks
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.worker.runner import _expect, _results, _skip_row
from penstock.scheduler.plan import Chunk, Decode, RowResult, StateSnapshot, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from without_gpu.recorded_graphs import record_graphs

from penstock.kernels.aot import describe, float_variants, variants
from penstock.kernels.cuda.core.launch import launches
from penstock.models.backends.cuda.shapes import shape_of

# Of the interpreter, which computes with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NUM_SEQS, MAX_MODEL_LEN = 6, 80


SMALLER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "convolution": ("Lfm2Config", {**SMALLER, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "delta-net": (
        "Qwen3_5TextConfig",
        {
            **SMALLER, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
        },
    ),
    "mamba": (
        "NemotronHConfig",
        {
            **SMALLER, "layers_block_type": ["mamba", "attention"], "head_dim": 16, "mamba_num_heads": 4,
            "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8,
        },
    ),
    "mamba-beside-attention": (
        "FalconH1Config",
        {
            **SMALLER, "head_dim": 16, "mamba_d_ssm": 24, "mamba_n_heads": 2, "mamba_d_head": 12, "mamba_d_state": 8,
            "mamba_n_groups": 1, "mamba_chunk_size": 16, "attention_in_multiplier": 0.8, "ssm_out_multiplier": 1.2,
        },
    ),
}  # fmt: skip
"""Models of two layers, one for each kind of mixer, and one with both in each layer."""
LONG = ("convolution", "delta-net", "mamba-beside-attention")
"""Those that take long in the interpreter."""
MAX_DRAFTS = 3
SIZES = {
    "max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 8 << 20, "uses_predictions": False,
    "speculation": SpeculationConfig(DraftMethod.NGRAM, MAX_DRAFTS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_compiles_late():
    before = launches.late
    yield
    assert launches.late == before, "a kernel was compiled after the warm-up"


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.soak)], ids=["called", "replayed"])
def graphs(request, monkeypatch):
    """Steps are called, or replayed from recordings of themselves."""
    if request.param and DEVICE == "cpu":
        record_graphs(monkeypatch)
    else:
        request.getfixturevalue("captures_are_checked")


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in TINY]
)
def test_rows_of_tiny_models(name, tmp_path, build_model, rows, check_greedy, prompt):
    """A prompt whose second part has a snapshot inside, and is long enough to be scanned in chunks; another row goes on
    from it, beside one that decodes; then drafts of which some are right, over a border whose state a third row needs;
    then a row with a grammar."""
    model = build_model(tmp_path, *TINY[name])
    play = rows(model.path, backend="cuda", device=DEVICE, **SIZES)
    spec = check_checkpoint(model.path).spec
    shape = shape_of(
        spec, torch.float32, torch.float32, spec.vocab_size, MAX_MODEL_LEN, MAX_NUM_SEQS, 2048, deterministic=False,
        max_drafts=MAX_DRAFTS,
    )  # fmt: skip
    ahead = set(map(describe, chain(variants(shape), float_variants(shape))))
    assert set(map(describe, launches.warmed)) == ahead, "what is warmed is what is compiled ahead"

    prompt = prompt[:61]
    truth = play.begin(play.row(0, prompt, slot=0), 11, snapshots=[StateSnapshot(0, 16, 4)]).token_ids
    again = play.row(1, prompt, 1, 4, like=0, at=16)
    decoded, begun = play.run(added=[again], chunks=[Chunk(1, 16, 61)], decodes=[Decode(0, 1)])
    assert begun.token_ids == truth
    truth += decoded.token_ids + play.decode(0, 3)
    check_greedy(model, prompt, truth)

    # Row 1 is at position 61. The border, at 64, is after the third of its tokens; the last draft is wrong.
    result = play.verify(1, [*truth[1:3], (truth[3] + 1) % 160], [StateSnapshot(1, 64, 5)])
    assert result.token_ids == truth[1:4]
    assert play.decode(1, 1) == truth[4:5]
    assert play.begin(play.row(2, prompt + truth[:4], 2, 5, like=1, at=64)).token_ids == truth[4:5]

    # Row 0 has a grammar now. Its mask comes late once; then a step starts before the one before it is finished.
    play.runner._rows[0].matcher = Anything()
    assert constrained(play, 0, is_late=True)().token_ids == []
    for finish in [constrained(play, 0), constrained(play, 0)]:
        truth += finish().token_ids
    check_greedy(model, prompt, truth)


@pytest.mark.soak
def test_every_hybrid(any_hybrid, rows, check_greedy, prompt):
    """All that the backend has, with whatever lies between their recurrent layers. The prompt's second part is just
    long enough to be scanned in chunks."""
    play = rows(any_hybrid.path, backend="cuda", device=DEVICE, **SIZES)
    tokens = play.begin(play.row(0, prompt[:39], slot=0), 7).token_ids + play.decode(0, 3)
    check_greedy(any_hybrid, prompt[:39], tokens)


class Anything:
    """A grammar that allows every token."""

    def fails_at(self, position: int) -> bool:
        return False


def constrained(play: Any, number: int, *, is_late: bool = False) -> Callable[[], RowResult]:
    """Starts a step of a row with a grammar. Returns a function that waits for its result."""
    rows, plan = play.runner._rows, StepPlan(0, [], [], [], [], [Decode(number, 1)])
    rows.apply(plan)
    batch = build_batch(rows, plan)
    assert batch.states[0].certain == 0
    words: Future[Any] = Future()
    words.set_result(np.full((1, 6), 0xFFFFFFFF, dtype=np.uint32))
    batch = replace(batch, masks=GrammarBitmasks([0], words, {number} if is_late else set()))
    started = play.backend.start_step(batch)
    place = (_skip_row if is_late else _expect)(batch.rows[0], int(batch.ends[0]), 1)

    def finish() -> RowResult:
        [result] = _results(batch, [place], started().sampled)
        play.backend.states.commit(batch, batch.state_commits([result.num_computed]))
        return result

    return finish
