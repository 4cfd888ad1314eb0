"""Examples of models whose kernels differ."""

from dataclasses import replace
from typing import Any

import torch

from penstock.kernels.cuda.latent_kv import LatentShape
from penstock.kernels.cuda.model_shapes import Mixture, ModelShape
from penstock.kernels.cuda.recurrent.convolution import ConvolutionShape
from penstock.kernels.cuda.recurrent.gated_norm import GatedNormShape
from penstock.kernels.cuda.recurrent.scan import ScanShape
from penstock.kernels.cuda.recurrent.shapes import RecurrentShape


def _convolution(columns: int, channels: int, taps: int, first: int, stride: int, **more: Any) -> ConvolutionShape:
    """A convolution whose result is its silu, without ``more`` fields."""
    fields: dict[str, Any] = {"factor": None, "after": None, "is_biased": False, **more}
    return ConvolutionShape(torch.bfloat16, columns, channels, taps, first, stride=stride, **fields)


def _lfm2() -> RecurrentShape:
    """The layer of LFM2-1.2B, which has 10."""
    return RecurrentShape(
        convolution=_convolution(6144, 2048, 3, 4096, 10 * 2 * 2048, factor=0, after=2048),
        products=((6144, 2048, False), (2048, 2048, False)),
    )


def _delta_net() -> RecurrentShape:
    """The layer of Qwen3-Next-80B-A3B, which has 36."""
    columns, channels, stride = 12352, 8192, 36 * (3 * 8192 + 32 * 128 * 128)
    return RecurrentShape(
        convolution=_convolution(columns, channels, 4, 0, stride),
        scan=ScanShape(
            dtype=torch.bfloat16, columns=columns, channels=channels, query=0, key=2048, value=4096, beta=12288,
            decay=12320, heads=32, key_heads=16, key_size=128, value_size=128, unit_eps=1e-6, least_step=0.0,
            most_step=None, stride=stride,
        ),
        norm=GatedNormShape(
            dtype=torch.bfloat16, columns=columns, first=8192, parts=32, width=128, weights=1, gates_first=False,
            eps=1e-6,
        ),
        products=((columns, 2048, False), (2048, 4096, False)),
    )  # fmt: skip


def _mamba2(hidden: int, heads: int, groups: int, layers: int) -> RecurrentShape:
    """A layer whose heads have 64 values and 128 states, of a model that has ``layers`` of them."""
    inner, keys = heads * 64, groups * 128
    channels = inner + 2 * keys
    columns, stride = inner + channels + heads, layers * (3 * channels + heads * 128 * 64)
    return RecurrentShape(
        convolution=_convolution(columns, channels, 4, inner, stride, is_biased=True),
        scan=ScanShape(
            dtype=torch.bfloat16, columns=columns, channels=channels, query=inner + keys, key=inner, value=0, beta=None,
            decay=inner + channels, heads=heads, key_heads=groups, key_size=128, value_size=64, unit_eps=None,
            least_step=0.0, most_step=None, stride=stride,
        ),
        norm=GatedNormShape(
            dtype=torch.bfloat16, columns=columns, first=0, parts=groups, width=inner // groups, weights=groups,
            gates_first=True, eps=1e-5,
        ),
        products=((columns, hidden, False), (hidden, inner, False)),
    )  # fmt: skip


def _gemma4_e2b() -> ModelShape:
    """35 layers: those without a window have larger heads, and the last 20 take keys and values from others."""
    windowed = ModelShape(
        hidden_size=1536,
        intermediate_size=6144,
        num_heads=8,
        num_kv_heads=1,
        head_dim=256,
        rotary_dim=256,
        vocab_size=262144,
        norm_eps=1e-6,
        norms_after=True,
        norms_heads=True,
        norms_values=True,
        input_size=256,
        inputs_of_layers=35 * 256,
        ends_layers=True,
        activation="gelu_tanh",
        attention_scale=1.0,
        windows=(512,),
        logits_dtype=torch.float32,
        max_positions=131072,
    )
    full = replace(windowed, head_dim=512, rotary_dim=512, windows=(None,))
    last = [replace(kind, has_kv=False, intermediate_size=12288) for kind in (windowed, full)]
    return replace(windowed, others=(full, *last))


SHAPES = {
    "Qwen3-0.6B": ModelShape(
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        norms_heads=True,
        max_positions=40960,
    ),
    "Llama-3.1-8B": ModelShape(
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=128256,
        norm_eps=1e-5,
        max_positions=131072,
    ),
    "Gemma-3-1B": ModelShape(
        hidden_size=1152,
        intermediate_size=6912,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rotary_dim=256,
        vocab_size=262144,
        norm_eps=1e-6,
        norms_after=True,
        norms_heads=True,
        activation="gelu_tanh",
        windows=(512, None),
        max_positions=32768,
    ),
    "Gemma-2-2B": ModelShape(
        hidden_size=2304,
        intermediate_size=9216,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rotary_dim=256,
        vocab_size=256000,
        norm_eps=1e-6,
        norms_after=True,
        activation="gelu_tanh",
        windows=(4096, None),
        cap=50.0,
        logits_dtype=torch.float32,
        max_positions=8192,
    ),
    "OLMo-2-1B": ModelShape(
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        rotary_dim=128,
        vocab_size=100352,
        norm_eps=1e-6,
        norms_before=False,
        norms_after=True,
        norms_queries=True,
        max_positions=4096,
    ),
    "Phi-4-mini": ModelShape(
        hidden_size=3072,
        intermediate_size=8192,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=96,
        vocab_size=200064,
        norm_eps=1e-5,
        max_positions=131072,
    ),
    "gpt-oss-20b": ModelShape(
        hidden_size=2880,
        intermediate_size=None,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rotary_dim=64,
        vocab_size=201088,
        norm_eps=1e-5,
        qkv_bias=True,
        output_bias=True,
        clamped_gate=(1.702, 7.0),
        windows=(128, None),
        experts=Mixture(num_experts=32, per_token=4, normalise=True, biased=True),
        expert_size=2880,
        max_positions=131072,
    ),
    "Qwen3-30B-A3B": ModelShape(
        hidden_size=2048,
        intermediate_size=None,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rotary_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        norms_heads=True,
        experts=Mixture(num_experts=128, per_token=8, normalise=True),
        expert_size=768,
        max_positions=40960,
    ),
    "Mixtral-8x7B": ModelShape(
        hidden_size=4096,
        intermediate_size=None,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=32000,
        norm_eps=1e-5,
        experts=Mixture(num_experts=8, per_token=2, normalise=True),
        expert_size=14336,
        max_positions=32768,
    ),
    "Llama-4-Scout": ModelShape(
        hidden_size=5120,
        intermediate_size=None,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=202048,
        norm_eps=1e-5,
        windows=(8192, None),
        chunked_windows=True,
        experts=Mixture(num_experts=16, per_token=1, normalise=True, scales_inputs=True),
        expert_size=8192,
        max_positions=262144,
    ),
    "LFM2-1.2B": ModelShape(
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rotary_dim=64,
        vocab_size=65536,
        norm_eps=1e-5,
        norms_heads=True,
        recurrent=(_lfm2(),),
        max_positions=128000,
    ),
    "Qwen3-Next-80B-A3B": ModelShape(
        hidden_size=2048,
        intermediate_size=None,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        rotary_dim=64,
        vocab_size=151936,
        norm_eps=1e-6,
        norms_heads=True,
        gated_attention=True,
        experts=Mixture(num_experts=512, per_token=10, normalise=True),
        expert_size=512,
        shared_size=512,
        recurrent=(_delta_net(),),
        max_positions=262144,
    ),
    "Granite-4.0-H-Tiny": ModelShape(
        hidden_size=1536,
        intermediate_size=None,
        num_heads=12,
        num_kv_heads=4,
        head_dim=128,
        rotary_dim=128,
        vocab_size=100352,
        norm_eps=1e-5,
        experts=Mixture(num_experts=64, per_token=6, normalise=True),
        expert_size=512,
        shared_size=1024,
        attention_scale=0.0078125,
        recurrent=(_mamba2(hidden=1536, heads=48, groups=1, layers=36),),
        max_positions=131072,
    ),
    "Nemotron-3-Nano-30B-A3B": ModelShape(
        hidden_size=2688,
        intermediate_size=None,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        rotary_dim=128,
        vocab_size=131072,
        norm_eps=1e-5,
        activation="relu_squared",
        gated_mlp=False,
        experts=Mixture(num_experts=128, per_token=6, normalise=True),
        expert_size=1856,
        shared_size=3712,
        recurrent=(_mamba2(hidden=2688, heads=64, groups=8, layers=23),),
        max_positions=262144,
    ),
    "Gemma-4-E2B": _gemma4_e2b(),
    "DeepSeek-V3": ModelShape(
        hidden_size=7168,
        intermediate_size=18432,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        rotary_dim=64,
        vocab_size=129280,
        norm_eps=1e-6,
        latent=LatentShape(
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        attention_scale=0.1352,
        experts=Mixture(num_experts=256, per_token=8, normalise=True),
        expert_size=2048,
        shared_size=2048,
        max_positions=163840,
    ),
}
SHAPES["gpt-oss-20b-mxfp4"] = replace(SHAPES["gpt-oss-20b"], has_fp4_experts=True)
SHAPES["DeepSeek-V2-Lite"] = replace(
    SHAPES["DeepSeek-V3"], hidden_size=2048, intermediate_size=10944, num_heads=16, vocab_size=102400,
    latent=LatentShape(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    experts=Mixture(num_experts=64, per_token=6, normalise=True), expert_size=1408, shared_size=2816,
)  # fmt: skip
