"""What of a loaded model its kernels are compiled for."""

import torch

from penstock.kernels.cuda.shapes import Shape
from penstock.models.cuda_model import logits_dtype
from penstock.models.loader import ACTIVATION_NAMES
from penstock.models.spec import ModelSpec, NormPlacement, QkNorm


def shape_of(
    spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype, num_logits: int, max_model_len: int, max_num_seqs: int,
    *, deterministic: bool,
) -> Shape:  # fmt: skip
    """The shape whose ``ahead.variants`` a backend launches."""
    return Shape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        vocab_size=spec.vocab_size,
        norm_eps=spec.norm_eps,
        norms_before=spec.norm_placement is not NormPlacement.POST,
        norms_after=spec.norm_placement is not NormPlacement.PRE,
        norms_heads=spec.qk_norm is QkNorm.HEAD,
        norms_queries=spec.qk_norm is QkNorm.ALL,
        activation=ACTIVATION_NAMES[spec.activation],
        windows=tuple(dict.fromkeys(spec.windows)),
        attention_scale=spec.attention_scale,
        cap=spec.attention_soft_cap,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_logits=num_logits,
        logits_dtype=logits_dtype(spec, dtype),
        max_positions=max_model_len,
        max_sequences=max_num_seqs,
        max_queries=(1,),
        deterministic=deterministic,
    )
