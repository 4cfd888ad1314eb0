"""The attention of a model's layers by the project's own kernels. Libraries can compute it instead:
``attention_libraries``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cuda.attention.common import PagedKV, RaggedRows
from penstock.kernels.cuda.attention.decode import DecodeWorkspace
from penstock.kernels.cuda.attention.paged import paged_attention
from penstock.kernels.cuda.attention.plan import DecodeShape, WorkStarts, plan_attention
from penstock.kernels.cuda.model_shapes import ModelShape

INTERPRETED_MULTIPROCESSORS = 1
"""The number of multiprocessors that attention is divided over in the interpreter."""

StepAttention = Callable[[int | None, Tensor, PagedKV, Tensor, RaggedRows | None], None]
"""Computes a layer's attention in one step, from the layer's window, its queries (T, H, D) and its keys and values. The
fourth argument is the output, (T, H, D). Entries of tokens without a sequence stay as they are, or become 0. The last
one are the step's rows, if the layer has other tables than those that the step was planned with."""


class ModelAttention(Protocol):
    """The attention of all layers of a model."""

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can capture a step's attention: neither reads from the device."""

    def plan(self, rows: RaggedRows, longest: int) -> StepAttention:
        """Prepares a step, none of whose sequences has over ``longest`` tokens."""


@dataclass(frozen=True)
class WindowAttention:
    """Shared by the layers of one window, for steps whose decoding rows have at most ``shape.max_queries`` queries."""

    shape: DecodeShape
    starts: WorkStarts
    """Allocated for the most sequences of a step."""
    workspace: DecodeWorkspace

    @classmethod
    def allocate(cls, shape: DecodeShape, max_sequences: int, device: torch.device) -> "WindowAttention":
        multiprocessors = INTERPRETED_MULTIPROCESSORS
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        starts = WorkStarts.allocate(max_sequences, device)
        return cls(shape, starts, DecodeWorkspace.allocate(shape, multiprocessors, device))


class TritonAttention:
    """Attention by the kernels of ``penstock.kernels.cuda.attention``."""

    can_be_captured = True

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._forms: dict[int | None, list[WindowAttention]] = {}
        for decode in shape.attention():
            form = WindowAttention.allocate(decode, shape.max_sequences, device)
            self._forms.setdefault(decode.attention.window, []).append(form)

    def plan(self, rows: RaggedRows, longest: int) -> StepAttention:
        """Divides the step's attention for each window."""
        planned = {}
        for window, forms in self._forms.items():
            form = next((form for form in forms if longest <= form.shape.max_queries), forms[-1])
            starts = form.starts.first(rows.num_sequences)
            plan_attention(form.shape, rows, starts, form.workspace.num_multiprocessors)
            planned[window] = replace(form, starts=starts)

        def attend(window: int | None, query: Tensor, kv: PagedKV, out: Tensor, of_group: RaggedRows | None) -> None:
            form = planned[window]
            any_longer = longest > form.shape.max_queries
            found = rows if of_group is None else of_group
            paged_attention(form.shape, query, kv, found, form.starts, form.workspace, out, any_longer=any_longer)

        return attend
