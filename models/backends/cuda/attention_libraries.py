"""Attention by libraries, on the same pages: FlashInfer, whose layout of pages is the project's, and FlashAttention 3,
which reads the pages as views. Neither is a requirement; a library is imported when a model is loaded that uses it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cuda.attention.common import PAGE_SLOTS, AttentionShape, PagedKV, RaggedRows
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.cuda.attention import ModelAttention, StepAttention, TritonAttention
from penstock.scheduler.worker_config import WorkerConfig

WORKSPACE_BYTES = 256 << 20
"""The size of the memory that FlashInfer's kernels share."""


class FlashAttention:
    """FlashAttention 3. Lengths stay on the device, so a CUDA graph can capture it."""

    can_be_captured = True

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._attend: Any = import_module("flash_attn_interface").flash_attn_with_kvcache
        self._shapes = _shapes_by_window(shape)

    def plan(self, rows: RaggedRows, longest: int) -> StepAttention:
        """Selects the pages of the step's sequences."""
        tables = rows.tables.index_select(0, rows.rows)

        def attend(window: int | None, query: Tensor, kv: PagedKV, out: Tensor, of_group: RaggedRows | None) -> None:
            assert of_group is None, "with this library all layers are in one group"
            shape = self._shapes[window]
            # (pages, 16, K, D) each, without a copy.
            keys, values = (part.transpose(1, 2) for part in kv.pages.unbind(1))
            made: Tensor = self._attend(
                query,
                keys,
                values,
                cache_seqlens=rows.contexts,
                page_table=tables,
                cu_seqlens_q=rows.query_starts,
                max_seqlen_q=longest,
                softmax_scale=shape.scale,
                causal=True,
                window_size=(_tokens_before(shape), 0),
                softcap=shape.cap or 0.0,
            )
            # Tokens that pad a graph have no result.
            is_padding = torch.arange(len(query), device=query.device) >= rows.query_starts[-1:]
            out.copy_(made.masked_fill(is_padding[:, None, None], 0.0))

        return attend


class FlashInferAttention:
    """FlashInfer. It divides a step's work on the host, which waits for the lengths: no graph captures that."""

    can_be_captured = False

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        wrapper: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._shapes = _shapes_by_window(shape)
        self._wrappers = {window: wrapper(workspace, "HND") for window in self._shapes}

    def plan(self, rows: RaggedRows, longest: int) -> StepAttention:
        """Waits for the lengths, and has FlashInfer divide the work."""
        contexts, starts = rows.contexts.cpu(), rows.query_starts.cpu()
        tables = rows.tables.index_select(0, rows.rows)
        has_queries = starts.diff() > 0
        contexts = contexts[has_queries]
        num_pages = (contexts + (PAGE_SLOTS - 1)) // PAGE_SLOTS
        # Sequences without queries pad a step, and FlashInfer knows none without a key.
        query_starts = torch.cat((starts[:1], starts[1:][has_queries]))
        used = torch.arange(tables.shape[1])[None, :] < num_pages[:, None]
        pages = tables[has_queries.to(tables.device)][used.to(tables.device)]
        num_tokens = int(starts[-1])
        if not num_tokens:  # a warm-up, in which the library compiles what it needs for steps of one token and more
            query_starts, contexts, num_pages = starts.new_tensor([0, 1]), contexts.new_ones(1), contexts.new_ones(1)
            pages = tables.new_zeros(1)
        page_starts = torch.cat((num_pages.new_zeros(1), num_pages.cumsum(0, dtype=torch.int32)))
        for window, shape in self._shapes.items():
            self._wrappers[window].plan(
                query_starts,
                page_starts,
                pages,
                contexts - (num_pages - 1) * PAGE_SLOTS,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                PAGE_SLOTS,
                causal=True,
                sm_scale=shape.scale,
                window_left=_tokens_before(shape),
                logits_soft_cap=shape.cap or 0.0,
                q_data_type=shape.dtype,
                kv_data_type=shape.kv_dtype,
            )

        def attend(window: int | None, query: Tensor, kv: PagedKV, out: Tensor, of_group: RaggedRows | None) -> None:
            assert of_group is None, "with this library all layers are in one group"
            if num_tokens:
                out[:num_tokens] = self._wrappers[window].run(query[:num_tokens], kv.pages)

        return attend


def _shapes_by_window(shape: ModelShape) -> dict[int | None, AttentionShape]:
    return {decode.attention.window: decode.attention for decode in shape.attention()}


def _tokens_before(shape: AttentionShape) -> int:
    """Returns the number of tokens before its own that a query sees; -1: all."""
    return -1 if shape.window is None else shape.window - 1


@dataclass(frozen=True)
class AttentionLibrary:
    """How attention by a library is made, and what it needs."""

    make: Callable[[ModelShape, torch.device], ModelAttention]
    module: str
    """The name of its module."""
    remedy: str
    """How to install it."""
    head_dims: tuple[int, ...] = ()
    """The sizes of heads that it has; empty: multiples of 8 up to 256."""

    def problem_with(self, config: WorkerConfig, spec: ModelSpec, dtype: str) -> str | None:
        """Returns what keeps the library from computing a model's attention; None if nothing does."""
        if find_spec(self.module) is None:
            return f"{self.module} is not installed: {self.remedy}, or leave it out"
        sizes = {spec.at(layer).head_dim for layer in range(spec.num_layers)}
        others = sorted(sizes - set(self.head_dims or range(8, 257, 8)))
        problems = {
            "--deterministic needs the same bits in every batch, which it does not give": config.deterministic,
            f"the activations are in {dtype}, and it computes in 16 bits": dtype not in ("bfloat16", "float16"),
            "it is not used with a KV cache in fp8": config.kv_cache_dtype == "fp8",
            f"it has no heads of {', '.join(map(str, others))} dimensions": bool(others),
            "it has no attention sinks, which this model has": spec.sinks,
            "it has no attention in chunks, which this model has": spec.chunked_windows,
            "it is not used with latent attention, which this model has": spec.latent is not None,
        }
        found = next((problem for problem, there_is in problems.items() if there_is), None)
        return None if found is None else f"{found}: leave it out"


LIBRARIES = {
    "flashinfer": AttentionLibrary(
        FlashInferAttention, "flashinfer", "pip install flashinfer-python", head_dims=(64, 128, 256)
    ),
    "fa": AttentionLibrary(FlashAttention, "flash_attn_interface", "install FlashAttention 3"),
}
"""The values of ``--attention-backend`` besides triton."""


def unsupported_attention(config: WorkerConfig, spec: ModelSpec, dtype: str) -> str | None:
    """Returns why the library that ``--attention-backend`` names cannot compute the model's attention in a dtype, and a
    remedy; None if it can."""
    if config.attention_backend == "triton":
        return None
    if config.attention_backend not in LIBRARIES:
        return f"--attention-backend {config.attention_backend}: must be triton or one of {', '.join(LIBRARIES)}"
    problem = LIBRARIES[config.attention_backend].problem_with(config, spec, dtype)
    return problem and f"--attention-backend {config.attention_backend}: {problem}"


def make_attention(name: str, shape: ModelShape, device: torch.device) -> ModelAttention:
    """Returns the attention that ``--attention-backend`` names, which ``unsupported_attention`` has checked."""
    return TritonAttention(shape, device) if name == "triton" else LIBRARIES[name].make(shape, device)
