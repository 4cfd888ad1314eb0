"""Ragged paged attention: prefill, decoding and verification of drafts in one step, each by the kernel that is its own.

Grids are fixed by a bucket's sizes, and lengths are read from device memory, so that a CUDA graph may hold all of it.
"""

from torch import Tensor

from penstock.kernels.cuda.attention.common import PagedKV, RaggedRows
from penstock.kernels.cuda.attention.decode import DecodeWorkspace, decode_attention, decode_variant
from penstock.kernels.cuda.attention.merge import join_variant
from penstock.kernels.cuda.attention.plan import DecodeShape, WorkStarts, plan_variant
from penstock.kernels.cuda.attention.prefill import prefill_attention, prefill_variant
from penstock.kernels.cuda.core.launch import KernelVariant


def paged_attention(
    shape: DecodeShape,
    query: Tensor,
    kv: PagedKV,
    batch: RaggedRows,
    starts: WorkStarts,
    workspace: DecodeWorkspace,
    out: Tensor,
    *,
    any_longer: bool,
) -> None:
    """softmax(cap(scale q k^T)) v for each query head h with its KV head, h * K // H, over what each query sees.

    ``query`` and ``out`` are (T, H, D) in the shape's dtype. The last token of sequence b stands at position
    ``contexts[b] - 1``, those before it in front of that; each sees positions up to its own, and with a window w those
    above its own minus w. The reference is ``kernels.reference.paged_attention``. Tokens of no sequence are left as
    they are in ``out``. ``starts`` are those of ``plan_attention`` for this step. ``any_longer``: sequences of more
    than ``shape.max_queries`` queries are computed too, as they always are where that is 0.
    """
    heads = (shape.attention.num_heads, shape.attention.head_dim)
    assert query.shape == out.shape == (query.shape[0], *heads)
    assert query.is_contiguous()
    assert out.is_contiguous()
    kv.check(shape.attention)
    starts.check(batch.num_sequences)
    if shape.max_queries:
        decode_attention(shape, query, kv, batch, starts.units, workspace, out)
    if (any_longer or not shape.max_queries) and query.shape[0] > shape.max_queries:
        prefill_attention(shape.attention, query, kv, batch, starts.tiles, shape.max_queries, out)


def attention_variants(shape: DecodeShape) -> list[KernelVariant]:
    """All that ``plan_attention`` and ``paged_attention`` launch for that shape."""
    decoding = [decode_variant(shape), join_variant(shape)] if shape.max_queries else []
    return [plan_variant(shape), *decoding, prefill_variant(shape.attention)]
