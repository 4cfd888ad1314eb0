"""Attention's cases: decoding, verification of drafts, fp8 KV, the same bits in every batch, and prefill."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from gpu_bench.kernels.cases import ULP, Case, Make, distance
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.attention.common import PAGE_SLOTS, AttentionShape, PagedKV, RaggedRows
from penstock.kernels.cuda.attention.decode import DecodeWorkspace
from penstock.kernels.cuda.attention.paged import paged_attention
from penstock.kernels.cuda.attention.plan import DecodeShape, WorkStarts, plan_attention
from penstock.kernels.reference import ops as reference

FP8_SCALE = 0.5


@dataclass(frozen=True)
class Step:
    """A step's attention in one layer."""

    shape: DecodeShape
    lengths: Sequence[tuple[int, int]]
    """Of each sequence its queries and its context."""
    query: Tensor
    kv: PagedKV
    batch: RaggedRows
    starts: WorkStarts
    workspace: DecodeWorkspace
    out: Tensor

    @classmethod
    def make(cls, shape: DecodeShape, lengths: Sequence[tuple[int, int]], device: torch.device) -> "Step":
        """On random pages, in random order."""
        attention = shape.attention
        heads = attention.num_kv_heads
        max_pages = max(-(-context // PAGE_SLOTS) for _, context in lengths)
        num_pages = len(lengths) * max_pages
        pages = torch.randn(num_pages, *attention.page_shape, device=device, dtype=attention.dtype)
        scale = FP8_SCALE if attention.kv_dtype != attention.dtype else 1.0
        scales = torch.full((heads,), scale, device=device)
        tokens = sum(queries for queries, _ in lengths)
        query = torch.randn(tokens, attention.num_heads, attention.key_dim, device=device, dtype=attention.dtype)
        multiprocessors = 1
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(
            shape,
            lengths,
            query,
            PagedKV(
                pages.to(attention.kv_dtype),
                scales,
                scales.clone(),
                torch.full((attention.num_heads,), -torch.inf, device=device),
            ),
            RaggedRows(
                torch.randperm(num_pages, dtype=torch.int32, device=device).view(len(lengths), max_pages),
                torch.arange(len(lengths), dtype=torch.int32, device=device),
                _integers(accumulate((queries for queries, _ in lengths), initial=0), device),
                _integers((context for _, context in lengths), device),
            ),
            WorkStarts.allocate(len(lengths), device),
            DecodeWorkspace.allocate(shape, multiprocessors, device),
            query.new_empty(tokens, attention.num_heads, attention.head_dim),
        )

    def run(self) -> None:
        """Divides the work and does it."""
        plan_attention(self.shape, self.batch, self.starts, self.workspace.num_multiprocessors)
        any_longer = any(queries > self.shape.max_queries for queries, _ in self.lengths)
        paged_attention(
            self.shape, self.query, self.kv, self.batch, self.starts, self.workspace, self.out, any_longer=any_longer
        )

    def error(self) -> float:
        """The distance from the reference, on what the pages hold."""
        self.run()
        return self.error_of(self.out)

    def error_of(self, out: Tensor) -> float:
        """The same of any output."""
        attention, scale = self.shape.attention, float(self.kv.key_scales[0])
        # The second of two parts, or with latents the only one.
        keys, values = (self.kv.pages[:, part].transpose(0, 1).float() * scale for part in (0, -1))
        starts = self.batch.query_starts.tolist()
        expected = reference.paged_attention(
            self.query.float(),
            keys,
            values,
            self.batch.tables.long().tolist(),
            [(starts[i], starts[i + 1]) for i in range(len(self.lengths))],
            [context - queries for queries, context in self.lengths],
            None,
            scale=attention.scale,
        )
        return distance(out, expected[..., attention.rotated_dim :])

    @property
    def num_bytes(self) -> int:
        """Keys, values, queries and results."""
        attention = self.shape.attention
        read = sum(context for _, context in self.lengths) * math.prod(attention.page_shape) // PAGE_SLOTS
        return read * self.kv.pages.itemsize + self.query.nbytes + self.out.nbytes

    @property
    def products(self) -> float:
        """Of queries with keys and of weights with values, for what is seen."""
        pairs = sum(queries * (context - (queries - 1) / 2) for queries, context in self.lengths)
        attention = self.shape.attention
        return 2.0 * pairs * attention.num_heads * (attention.key_dim + attention.head_dim)


def _integers(numbers: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device=device)


def shape_of_step(model: Model, queries: int, *, fp8: bool = False) -> DecodeShape:
    """The shape of steps whose decoding rows have at most ``queries`` queries."""
    shape = model.shape
    kv_dtype = torch.float8_e4m3fn if fp8 else shape.kv_dtype
    attention = AttentionShape(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, kv_dtype, shape.head_dim**-0.5
    )
    return DecodeShape(attention, queries)


def decoding(
    model: Model,
    sizes: Sizes,
    device: torch.device,
    *,
    verifies: bool = False,
    deterministic: bool = False,
    fp8: bool = False,
) -> Case:
    """Rows of one context each; checked on rows of all lengths."""
    batch, context, checked = sizes.kernels.batch, sizes.kernels.context, sizes.kernels.checked
    queries = sizes.kernels.verified if verifies else 1
    shape = shape_of_step(model, 0 if deterministic else queries, fp8=fp8)
    step = Step.make(shape, [(queries, context)] * batch, device)
    ragged = [(queries, max(queries, checked * (row + 1) // batch)) for row in range(batch)]
    text = f"{batch} rows of {context}" + f", {queries} queries" * (queries > 1)
    text += ", fp8 KV" * fp8 + ", deterministic" * deterministic
    small = Step.make(shape, ragged, device)
    return Case("attention", text, small.error, ULP[model.shape.dtype], step.run, step.num_bytes, step.products)


def prefill(model: Model, sizes: Sizes, device: torch.device, fp8: bool = False) -> Case:
    """One prompt; checked on a shorter one, half of which is there already."""
    shape = shape_of_step(model, 1, fp8=fp8)
    prompt, checked = sizes.kernels.prompt, sizes.kernels.checked
    step = Step.make(shape, [(prompt, prompt)], device)
    small = Step.make(shape, [(checked // 2, checked), (1, checked // 2)], device)
    text = f"prompt of {prompt}" + ", fp8 KV" * fp8
    return Case("attention", text, small.error, ULP[model.shape.dtype], step.run, step.num_bytes, step.products)


CASES: list[Make] = [
    decoding,
    partial(decoding, verifies=True),
    partial(decoding, fp8=True),
    partial(decoding, deterministic=True),
    prefill,
    partial(prefill, fp8=True),
]
