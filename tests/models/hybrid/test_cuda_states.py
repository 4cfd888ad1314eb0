"""Recurrent states on the backend for GPUs: each row goes on as if it had computed all of its tokens itself. Without a
GPU its kernels run in Triton's interpreter, so models and prompts are as small as can be."""

from importlib.util import find_spec
from itertools import chain

import pytest
import torch

from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.scheduler.plan import Chunk, Decode, StateSnapshot
from penstock.scheduler.worker_config import MAX_PREDICTED_DRAFTS

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.kernels.aot import describe, float_variants, variants
from penstock.kernels.cuda.core.launch import launches
from penstock.models.backends.cuda.shapes import shape_of

# Of the interpreter, which computes with numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("captures_are_checked"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NUM_SEQS, MAX_MODEL_LEN = 6, 64


@pytest.fixture
def play(typical_hybrid, rows):
    """Rows of each model."""
    before = launches.late
    yield rows(
        typical_hybrid.path, backend="cuda", device=DEVICE, num_blocks=24, max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    assert launches.late == before, "a kernel was compiled after the warm-up"


def test_rows_that_share_drafts_and_snapshots(typical_hybrid, play, check_greedy, prompt):
    """A prompt in chunks with a snapshot inside one; another row goes on from it, beside rows that decode; then drafts
    of which some are right, over a border whose state a third row needs."""
    spec = check_checkpoint(typical_hybrid.path).spec
    shape = shape_of(
        spec, torch.float32, torch.float32, spec.vocab_size, MAX_MODEL_LEN, MAX_NUM_SEQS, 2048, deterministic=False,
        max_drafts=MAX_PREDICTED_DRAFTS,
    )  # fmt: skip
    ahead = set(map(describe, chain(variants(shape), float_variants(shape))))
    assert set(map(describe, launches.warmed)) == ahead, "what is warmed is what is compiled ahead"

    one, two = prompt[:27], prompt[40:43]
    truth = play.begin(play.row(0, one, slot=0), 11, snapshots=[StateSnapshot(0, 16, 4)]).token_ids
    again, other = play.row(1, one, 1, 4, like=0, at=16), play.row(2, two, 2)
    results = play.run(added=[again, other], chunks=[Chunk(1, 16, 27), Chunk(2, 0, 3)], decodes=[Decode(0, 1)])
    tokens = {result.row: result.token_ids for result in results}
    assert tokens[1] == truth
    truth += tokens[0]
    for _ in range(8):
        decodes = [Decode(0, 1), Decode(2, 1)]
        for result in play.run(decodes=decodes):
            (truth if result.row == 0 else tokens[2]).extend(result.token_ids)
    check_greedy(typical_hybrid, one, truth)
    check_greedy(typical_hybrid, two, tokens[2])

    # The row is at position 27. The border, at 32, is after the fifth of its tokens; the last draft is wrong.
    drafts = [*truth[1:6], (truth[6] + 1) % 160]
    result = play.verify(1, drafts, [StateSnapshot(1, 32, 5)])
    assert result.token_ids == truth[1:7]
    assert play.decode(1, 2) == truth[7:9]
    longer = one + truth[:7]
    result = play.begin(play.row(3, longer, 3, 5, like=1, at=32))
    assert result.token_ids == truth[7:8]
