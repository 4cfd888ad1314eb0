"""Ragged paged attention: prefill, decoding and verification of drafts in one step, with a kernel for prefill and one
for everything shorter.

Grids depend only on a bucket's sizes, and lengths are read from device memory, so that a CUDA graph can capture it.
"""

from torch import Tensor

from penstock.kernels.cuda.attention.common import PagedKV, RaggedRows
from penstock.kernels.cuda.attention.decode import DecodeWorkspace, decode_attention, decode_variant
from penstock.kernels.cuda.attention.merge import merge_variant
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

    ``query`` and ``out`` are (T, H, D) in the shape's dtype; with latent attention, queries have ``rotated_dim`` more
    dimensions than the output. The last token of sequence b is at position ``contexts[b]
    - 1``, and the others are at the positions before it. Each sees positions up to its own p, and with a window w only
    those above p - w. The reference is ``paged_attention`` in ``kernels/reference``. Entries of ``out`` that belong to
    no sequence are not written. ``starts`` is the result of ``plan_attention`` for this step. ``any_longer``: sequences
    of more than ``shape.max_queries`` queries are computed too; if ``shape.max_queries`` is 0 they always are.
    """
    heads = (query.shape[0], shape.attention.num_heads)
    assert query.shape == (*heads, shape.attention.key_dim)
    assert out.shape == (*heads, shape.attention.head_dim)
    assert query.is_contiguous()
    assert out.is_contiguous()
    kv.check(shape.attention)
    starts.check(batch.num_sequences)
    if shape.max_queries:
        decode_attention(shape, query, kv, batch, starts.units, workspace, out)
    if any_longer and shape.extended is not None and workspace.extended is not None:
        decode_attention(shape.extended, query, kv, batch, starts.extended, workspace.extended, out)
    if (any_longer or not shape.max_queries) and query.shape[0] > shape.max_queries:
        prefill_attention(shape.attention, query, kv, batch, starts.tiles, shape.max_queries, out)


def attention_variants(shape: DecodeShape) -> list[KernelVariant]:
    """All variants that ``plan_attention`` and ``paged_attention`` launch for a shape."""
    decoding = [form for form in (shape, shape.extended) if form is not None and form.max_queries]
    return [
        plan_variant(shape),
        *(decode_variant(form) for form in decoding),
        *(merge_variant(form) for form in decoding if not form.is_merged_by_last),
        prefill_variant(shape.attention),
    ]
