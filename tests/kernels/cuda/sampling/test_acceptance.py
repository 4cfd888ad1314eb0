"""Drafts are accepted as a plain loop accepts them, and what is kept is counted."""

import torch

from penstock.kernels.cuda.accept_drafts import BLOCK, accept
from penstock.kernels.cuda.sampling.tensors import SamplerRows, SamplerShape, integer_line
from penstock.models.batch.token_counts import TokenCounts

VOCAB = 40


def make_rows(counts, device):
    num_rows = len(counts)
    lines = [integer_line(0, 0, counts=row if row % 2 else -1) for row in range(num_rows)]
    empty = torch.zeros(1, device=device)
    return SamplerRows(
        numbers=empty,
        integers=torch.tensor(lines, dtype=torch.int64, device=device),
        histories=empty,
        counts=counts,
        biases=empty,
        word_starts=empty,
        word_tokens=empty,
    )


def test_what_is_kept_is_counted(device):
    prompt = [3, 4, 4]
    # Of each sequence, the tokens that were chosen, and what was expected of all but the last.
    sequences = [
        ([5], []),
        ([5, 6, 6, 6], [5, 6, 6]),
        ([], []),
        ([5, 6, 7], [5, 9]),
        ([1, 2], [2]),
        ([4] * BLOCK, [4] * (BLOCK - 1)),
        ([4] * (2 * BLOCK + 1), [4] * (2 * BLOCK)),
        ([5] * (2 * BLOCK), [5] * (BLOCK + 1) + [6] + [5] * (BLOCK - 3)),
        ([3, 3, 3], [3, 3]),
        # A draft behind the last line is none.
        ([8, 9], [8, 9]),
    ]
    expected = []
    for tokens, drafts in sequences:
        kept = 0
        while kept < len(tokens) and (kept == 0 or tokens[kept - 1] == drafts[kept - 1]):
            kept += 1
        expected.append(kept)

    def whole(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    numbers = [7, 1, 2, 3, 4, 9, 8, 5, 6, 0]
    counts = torch.zeros(len(numbers), VOCAB, dtype=torch.int32, device=device)
    counts[:, prompt] = 1
    rows = make_rows(counts, device)
    starts = [0]
    for tokens, _ in sequences:
        starts.append(starts[-1] + len(tokens))
    token_ids = [token_id for tokens, _ in sequences for token_id in tokens]
    drafts = [token_id for tokens, drafts in sequences for token_id in [*drafts, -1][: len(tokens)]]
    line_rows = [row for row, (tokens, _) in zip(numbers, sequences, strict=True) for _ in tokens]
    kept, last = whole([-9] * len(numbers)), whole([-9] * len(numbers))
    shape = SamplerShape(VOCAB, torch.float32, VOCAB, 100, slice=64)
    accept(shape, rows, whole(starts), whole(line_rows), whole(drafts), whole(token_ids), kept, last)
    assert kept.tolist() == expected
    assert last.tolist() == [tokens[k - 1] if k else -9 for k, (tokens, _) in zip(expected, sequences, strict=True)]
    for row, k, (tokens, _) in zip(numbers, expected, sequences, strict=True):
        reference = TokenCounts(prompt + tokens[:k] * (row % 2), len(prompt))
        wanted = torch.zeros(VOCAB, dtype=torch.int32)
        wanted[reference.ids] = torch.from_numpy(reference.output + 1).int()
        assert rows.counts[row].tolist() == wanted.tolist()
