"""The sampler's cases: the best token, a drawn one, filters, log-probabilities, and what drafts are kept."""

from functools import partial

import torch
from torch import Tensor

from gpu_bench.kernels.cases import Case, Make
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.accept_drafts import accept
from penstock.kernels.cuda.sampling.logprobs import MAX_TOP, logprobs, make_logprobs_workspace
from penstock.kernels.cuda.sampling.sample import sample
from penstock.kernels.cuda.sampling.tensors import (
    Lines,
    SamplerRows,
    SamplerShape,
    integer_line,
    make_workspace,
    number_line,
)
from penstock.kernels.reference import sampling as reference_sampling

WRONG = 0.02
"""Of the lines that are drawn: rounding may turn a choice between tokens that are as good as equal."""
TOP = 5
MAX_HISTORY = 64


def _shape(model: Model) -> SamplerShape:
    shape = model.shape
    return SamplerShape(shape.vocab_size, shape.dtype, shape.vocab_size, MAX_HISTORY)


def _integers(*size: int, device: torch.device, value: int = 0) -> Tensor:
    return torch.full(size, value, dtype=torch.int32, device=device)


def _rows(
    shape: SamplerShape, lines: int, device: torch.device, temperature: float, top_k: int, top_p: float
) -> SamplerRows:
    numbers = [number_line(temperature, top_p, 0.0, 1.0, 0.0, 0.0)] * lines
    integers = [integer_line(seed, top_k) for seed in range(lines)]
    empty = partial(_integers, device=device)
    return SamplerRows(
        numbers=torch.tensor(numbers, dtype=torch.float64, device=device),
        integers=torch.tensor(integers, dtype=torch.int64, device=device),
        histories=empty(lines, MAX_HISTORY),
        counts=empty(lines, shape.vocab_size),
        biases=empty(1, shape.vocab_size).float(),
        word_starts=empty(2),
        word_tokens=empty(1),
    )


def sampling(
    model: Model, sizes: Sizes, device: torch.device, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0
) -> Case:
    """sample, its eight kernels."""
    shape, lines = _shape(model), sizes.kernels.lines
    logits = (torch.randn(lines, shape.vocab_size, device=device) * 3).to(shape.dtype)
    rows = _rows(shape, lines, device, temperature, top_k, top_p)
    numbers = torch.arange(lines, dtype=torch.int32, device=device)
    zeros = _integers(lines, device=device)
    lines_of_rows = Lines(
        num_lines=_integers(1, device=device, value=lines),
        rows=numbers,
        positions=numbers % MAX_HISTORY,
        num_drafts=zeros,
        masks=zeros - 1,
        mask_words=_integers(1, shape.mask_words, device=device),
    )
    token_ids = torch.empty_like(zeros)
    run = partial(sample, shape, logits, rows, lines_of_rows, make_workspace(shape, lines, device), token_ids)

    def error() -> float:
        run()
        x = logits.float()
        if temperature == 0.0:
            return float((token_ids != x.argmax(1)).float().mean())
        x /= temperature
        if top_k:
            reference_sampling.keep_top_k(x, torch.full((lines,), top_k, device=device))
        if top_p < 1.0:
            reference_sampling.keep_top_p(x, torch.full((lines,), top_p, device=device))
        expected = reference_sampling.sample(x, numbers.long(), lines_of_rows.positions.long())
        return float((token_ids != expected).float().mean())

    filters = f", top_k {top_k}" * (top_k > 0) + f", top_p {top_p}" * (top_p < 1.0)
    text = f"{lines} lines, temperature {temperature}{filters}"
    return Case("sample", text, error, WRONG if temperature else 0.0, run, logits.nbytes)


def probabilities(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """logprobs, with some of the likeliest tokens."""
    shape, lines = _shape(model), sizes.kernels.lines
    logits = (torch.randn(lines, shape.vocab_size, device=device) * 3).to(shape.dtype)
    token_ids = torch.randint(shape.vocab_size, (lines,), dtype=torch.int32, device=device)
    chosen = torch.empty(lines, device=device)
    top_ids, top = _integers(lines, MAX_TOP, device=device), torch.empty(lines, MAX_TOP, device=device)
    wanted = _integers(lines, device=device, value=TOP)
    num_sampled = _integers(1, device=device, value=lines)
    room = make_logprobs_workspace(shape, lines, device)
    run = partial(logprobs, shape, logits, num_sampled, wanted, token_ids, room, chosen, top_ids, top)

    def error() -> float:
        run()
        expected = logits.float().log_softmax(1)
        best = expected.topk(TOP, dim=1).values
        of_tokens = expected.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
        return float(torch.maximum((chosen - of_tokens).abs().max(), (top[:, :TOP] - best).abs().max()))

    return Case("logprobs", f"{lines} lines, top {TOP}", error, 1e-3, run, logits.nbytes)


def acceptance(model: Model, sizes: Sizes, device: torch.device) -> Case:
    """accept: sequences of four lines, whose first draft is right."""
    shape, sequences = _shape(model), sizes.kernels.lines
    each, kept = 4, 2
    lines = each * sequences
    rows = _rows(shape, sequences, device, 0.0, 0, 1.0)
    token_ids = torch.randint(shape.vocab_size, (lines,), dtype=torch.int32, device=device)
    drafts = token_ids.clone()
    drafts[kept - 1 :: each] += 1
    starts = torch.arange(0, lines + 1, each, dtype=torch.int32, device=device)
    line_rows = torch.arange(sequences, dtype=torch.int32, device=device).repeat_interleave(each)
    num_kept, last = (_integers(sequences, device=device) for _ in range(2))
    run = partial(accept, shape, rows, starts, line_rows, drafts, token_ids, num_kept, last)

    def error() -> float:
        run()
        right = (num_kept == kept) & (last == token_ids[kept - 1 :: each])
        return float((~right).float().mean())

    return Case("accept", f"{sequences} rows of {each} lines", error, 0.0, run, 16 * lines)


CASES: list[Make] = [
    sampling,
    partial(sampling, temperature=0.8),
    partial(sampling, temperature=0.8, top_k=50),
    partial(sampling, temperature=0.8, top_p=0.9),
    probabilities,
    acceptance,
]
