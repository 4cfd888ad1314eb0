"""The whole model against the reference backend with the same weights in fp32: what it makes of some prompts, and of a
step after them."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from gpu_bench.figures import AccuracyFigures
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.attention.common import PAGE_SLOTS
from penstock.models.backends.base import Backend, load_backend
from penstock.models.backends.cuda.backend import CudaBackend
from penstock.models.backends.reference.backend import ReferenceBackend
from penstock.models.backends.tensor_parallel import ALONE
from penstock.models.backends.torch_common.host_pages import HostPages
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, RowResult, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

ROWS = 3
LONGEST = 256
"""Tokens: more take the reference long."""
ALLOWED = 1e-3
"""The error of a log-probability that is allowed in any case..."""
ALLOWED_TIMES = 1.5
"""... or as many times the error of plain torch in the model's dtype, whose rounding grows with depth and width."""
WITH_TOP = SamplingParams(temperature=0.0, logprobs=20)


def measure(model: Model, sizes: Sizes) -> Iterator[AccuracyFigures]:
    """On prompts of different lengths, computed but for their last token first, which a step of decoding then has."""
    longest = min(sizes.kernels.checked, LONGEST)
    lengths = [longest * (row + 1) // ROWS for row in range(ROWS)]
    with TemporaryDirectory() as folder:
        model.write_config(Path(folder))
        backend = load_backend(
            WorkerConfig(
                model=folder,
                device=sizes.device,
                backend="cuda",
                load_format="dummy",
                max_model_len=longest,
                max_num_seqs=ROWS,
                max_num_batched_tokens=sum(lengths),
                kv_cache_bytes=sum(-(-length // PAGE_SLOTS) for length in lengths) * PAGE_SLOTS * model.kv_bytes,
            )
        )
    assert isinstance(backend, CudaBackend)
    spec, facts = backend._spec, backend.facts

    def reference(weights: Any, dtype: torch.dtype) -> ReferenceBackend:
        pages = KVPages(spec, facts.num_blocks, PAGE_SLOTS, dtype, torch.device(sizes.device))
        return ReferenceBackend(spec, weights, pages, HostPages(pages.by_block, 0), facts, 1, spec.vocab_size, ALONE)

    weights = backend._model._weights
    plain, wide = reference(weights, model.shape.dtype), reference(_widened(weights), torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.shape.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    made, expected = _answers(backend, prompts), _answers(wide, prompts)
    error, of_torch = _error(made, expected), _error(_answers(plain, prompts), expected)
    same = sum(one.token_ids == other.token_ids for one, other in zip(made, expected, strict=True))
    allowed = max(ALLOWED, ALLOWED_TIMES * of_torch)
    yield AccuracyFigures(model.name, ROWS, longest, error, allowed, error <= allowed, same / ROWS)


def _widened(part: Any) -> Any:
    """The same weights in fp32."""
    if isinstance(part, Tensor):
        return part.float() if part.is_floating_point() else part
    if isinstance(part, tuple):
        return tuple(map(_widened, part))
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _widened(getattr(part, field.name)) for field in fields(part)})
    return part


def _answers(backend: Backend, prompts: list[list[int]]) -> list[RowResult]:
    runner = Runner(backend)
    blocks = iter(range(backend.facts.num_blocks))
    added = [
        AddedRow(row, 0, prompt, len(prompt), 0, [next(blocks) for _ in range(-(-len(prompt) // PAGE_SLOTS))], WITH_TOP)
        for row, prompt in enumerate(prompts)
    ]
    chunks = [Chunk(row, 0, len(prompt) - 1) for row, prompt in enumerate(prompts)]
    runner.run(StepPlan(0, [], added, [], chunks, []))
    last = [Chunk(row, len(prompt) - 1, len(prompt)) for row, prompt in enumerate(prompts)]
    return runner.run(StepPlan(0, [], [], [], last, [])).rows


def _error(made: list[RowResult], expected: list[RowResult]) -> float:
    return max(_distance(one, other) for one, other in zip(made, expected, strict=True))


def _distance(made: RowResult, expected: RowResult) -> float:
    """The largest, over the likeliest tokens that both have."""
    assert made.logprobs is not None
    assert expected.logprobs is not None
    known = dict(zip(expected.logprobs.top_token_ids, expected.logprobs.top, strict=True))
    ours = zip(made.logprobs.top_token_ids, made.logprobs.top, strict=True)
    distances = [abs(logprob - known[token_id]) for token_id, logprob in ours if token_id in known]
    return max(distances, default=float("inf"))
