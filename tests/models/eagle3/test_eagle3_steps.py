"""What an EAGLE-3 head computes is what plain torch computes, on every backend that has one."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.backends.base import load_backend
from penstock.models.backends.cuda.steps.features import DeviceFeatures
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.eagle import check_eagle_head
from penstock.models.speculative.heads.drafter import HEADS, LoadHead
from penstock.models.speculative.heads.head import Draws, HeadStep
from penstock.scheduler.plan import SamplingParams

pytestmark = pytest.mark.usefixtures("cpu_library")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL: dict[str, Any] = {"device": DEVICE, "max_num_seqs": 2, "max_model_len": 64}
VOCAB, HIDDEN, BLOCK = 160, 64, 16
STEPS = (
    [(0, 0, 5), (1, 0, 5)],
    [(0, 5, 38), (1, 5, 38)],
    [(0, 38, 39), (1, 38, 39)],
    [(0, 39, 60)],
    [(0, 59, 60), (1, 38, 39)],
)
"""Of each: rows, and which of their positions are computed; the last ones twice, as where drafts are made again."""
FEW_STEPS = ([(1, 0, 3), (0, 0, 5)], [(0, 5, 18)], [(1, 3, 4), (0, 18, 20)], [(0, 19, 20), (1, 3, 4)])
"""Where kernels are interpreted."""
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, seed=6))
"""Of the rows."""


def on_host(lines):
    return lines.tensor.float().cpu().numpy() if isinstance(lines, DeviceFeatures) else lines


class Played:
    """A head with two rows of random tokens and features."""

    def __init__(self, head, runs, lines):
        self.head, self._runs = head, runs
        self.sampled = lines
        self.rng = np.random.default_rng(4)
        self.token_ids = self.rng.integers(0, VOCAB, (2, 64))
        self.features = self.rng.standard_normal((2, 64, 3 * HIDDEN)).astype(np.float32)
        self.known = [torch.from_numpy(row) @ head.tensors["fc.weight"].T for row in self.features]
        self._tables = np.arange(8).reshape(4, 2).T.copy()  # the rows' blocks lie between each other
        runs.reset_blocks(list(range(8)))

    def run(self, spans, hidden=None):
        """Computes positions of rows, and drafts after the last of each."""
        parts = [self.sampled(self.features[row, start:end]) for row, start, end in spans]
        return self._runs.run(
            HeadStep(
                token_ids=np.concatenate([self.token_ids[row, start:end] for row, start, end in spans]),
                starts=np.array([start for _, start, _ in spans]),
                ends=np.array([end for _, _, end in spans]),
                tables=self._tables[[row for row, _, _ in spans]],
                block_size=BLOCK,
                sampled=np.cumsum([end - start for _, start, end in spans]) - 1,
                draws=Draws(
                    np.array([SAMPLINGS[row].temperature for row, _, _ in spans]),
                    np.array([SAMPLINGS[row].seed for row, _, _ in spans], dtype=np.uint64),
                    np.array([end + 1 for _, _, end in spans]),
                ),
                features=parts if hidden is None else None,
                hidden=hidden,
            )
        )

    def check(self, spans, given, result, tolerance):
        """``given``: of each span, what the layer goes on from at all positions up to its end."""
        for at, (row, _, end) in enumerate(spans):
            expected = self.head.layer(self.token_ids[row, :end], given[at][:end])[-1:]
            scale = float(expected.abs().max())
            np.testing.assert_allclose(on_host(result.hidden)[at : at + 1], expected, atol=tolerance * scale)
            if tolerance < 0.01:
                token_id, probability, noise = self.head.choice(expected, SAMPLINGS[row], end + 1)
                draft = result.drafts()[at]
                assert draft.token_id == on_host(result.token_ids)[at] == token_id
                assert draft.probability == pytest.approx(probability, rel=1e-3)
                assert draft.noise == pytest.approx(noise)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("backend", ["cpu", "reference", pytest.param("cuda", marks=pytest.mark.soak)])
def test_hidden_states_and_tokens_are_those_of_plain_torch(target_and_head, eagle_config, backend, dtype, tolerance):
    """Rows side by side, in pieces; then drafts, each from what came of the one before; then others in their place."""
    target, head = target_and_head
    is_cuda = backend == "cuda"
    if is_cuda:
        pytest.importorskip("triton")
    config = eagle_config(target, head, backend, dtype=dtype, **(SMALL if is_cuda else {}))
    checked = check_eagle_head(head.path, check_checkpoint(target.path).spec)
    load_head: LoadHead = import_module(HEADS[backend]).load_head
    runs = load_head(config, checked, load_backend(config))

    def lines(values):
        return DeviceFeatures.of(torch.from_numpy(values).to(DEVICE, getattr(torch, dtype))) if is_cuda else values

    played = Played(head, runs, lines)
    for spans in FEW_STEPS if is_cuda and DEVICE == "cpu" else STEPS:
        result = played.run(spans)
        played.check(spans, [played.known[row] for row, _, _ in spans], result, tolerance)
    given = [played.known[row][:end] for row, _, end in spans]
    for _ in range(3):
        came = torch.from_numpy(on_host(result.hidden))
        given = [torch.cat((before, x[None])) for before, x in zip(given, came, strict=True)]
        spans = [(row, end, end + 1) for row, _, end in spans]
        result = played.run(spans, hidden=result.hidden)
        played.check(spans, given, result, tolerance)
    row, begin, _ = spans[-1]
    begin -= 2
    played.token_ids[:, begin:] = played.rng.integers(0, VOCAB, (2, 64 - begin))
    spans = [(row, begin, begin + 5)]
    played.check(spans, [played.known[row]], played.run(spans), tolerance)
