"""What an EAGLE-3 head computes is what plain torch computes, on every backend that has one."""

import numpy as np
import pytest
import torch

from penstock.models.backend import load_backend
from penstock.models.checkpoint import check_checkpoint
from penstock.models.cpu_head import load_head as load_cpu_head
from penstock.models.draft_head import HeadStep
from penstock.models.eagle import LoadHead
from penstock.models.eagle_checkpoint import check_head
from penstock.models.reference_head import load_head as load_reference_head

pytestmark = pytest.mark.usefixtures("cpu_library")

LOADERS: dict[str, LoadHead] = {"cpu": load_cpu_head, "reference": load_reference_head}
VOCAB, HIDDEN, BLOCK = 160, 64, 16
STEPS = (
    [(0, 0, 5), (1, 0, 5)],
    [(0, 5, 38), (1, 5, 38)],
    [(0, 38, 39), (1, 38, 39)],
    [(0, 39, 60)],
    [(0, 59, 60), (1, 38, 39)],
)
"""Of each: rows, and which of their positions are computed; the last ones twice, as where drafts are made again."""


class Played:
    """A head with two rows of random tokens and features."""

    def __init__(self, head, runs):
        self.head, self._runs = head, runs
        self.rng = np.random.default_rng(4)
        self.token_ids = self.rng.integers(0, VOCAB, (2, 64))
        self.features = self.rng.standard_normal((2, 64, 3 * HIDDEN)).astype(np.float32)
        self.known = [torch.from_numpy(row) @ head.tensors["fc.weight"].T for row in self.features]
        self._tables = np.arange(8).reshape(4, 2).T.copy()  # the rows' blocks lie between each other
        runs.renew(list(range(8)))

    def run(self, spans, hidden=None):
        """Computes positions of rows, and drafts after the last of each."""
        given = np.concatenate([self.features[row, start:end] for row, start, end in spans])
        return self._runs.run(
            HeadStep(
                token_ids=np.concatenate([self.token_ids[row, start:end] for row, start, end in spans]),
                starts=np.array([start for _, start, _ in spans]),
                ends=np.array([end for _, _, end in spans]),
                tables=self._tables[[row for row, _, _ in spans]],
                block_size=BLOCK,
                sampled=np.cumsum([end - start for _, start, end in spans]) - 1,
                features=given if hidden is None else None,
                hidden=hidden,
            )
        )

    def check(self, spans, given, result, tolerance):
        """``given``: of each span, what the layer goes on from at all positions up to its end."""
        for at, (row, _, end) in enumerate(spans):
            expected = self.head.layer(self.token_ids[row, :end], given[at][:end])[-1:]
            scale = float(expected.abs().max())
            np.testing.assert_allclose(result.hidden[at : at + 1], expected, atol=tolerance * scale)
            if tolerance < 0.01:
                token_id, probability = self.head.likeliest(expected)
                assert result.token_ids[at] == int(token_id)
                assert result.probabilities[at] == pytest.approx(float(probability), rel=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("backend", LOADERS)
def test_hidden_states_and_tokens_are_those_of_plain_torch(target_and_head, eagle_config, backend, dtype, tolerance):
    """Rows side by side, in pieces; then drafts, each from what came of the one before; then others in their place."""
    target, head = target_and_head
    config = eagle_config(target, head, backend, dtype=dtype)
    checked = check_head(head.path, check_checkpoint(target.path).spec)
    played = Played(head, LOADERS[backend](config, checked, load_backend(config)))
    for spans in STEPS:
        result = played.run(spans)
        played.check(spans, [played.known[row] for row, _, _ in spans], result, tolerance)
    given = [played.known[row][:end] for row, _, end in spans]
    for _ in range(3):
        given = [torch.cat((before, torch.from_numpy(x[None]))) for before, x in zip(given, result.hidden, strict=True)]
        spans = [(row, end, end + 1) for row, _, end in spans]
        result = played.run(spans, hidden=result.hidden)
        played.check(spans, given, result, tolerance)
    played.token_ids[:, 39:] = played.rng.integers(0, VOCAB, (2, 25))
    spans = [(1, 39, 44)]
    played.check(spans, [played.known[1]], played.run(spans), tolerance)
