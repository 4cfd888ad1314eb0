"""Models that can be written as GGUF files, and a check of a file's output."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.scheduler.plan import SamplingParams

VARIANTS = json.loads((Path(__file__).parents[1] / "variants.json").read_text())
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 12
TOLERANCE = 2e-4


WITHOUT = {
    "deepseek-v3": {
        "rope_parameters": VARIANTS["deepseek-v3"]["changes"]["rope_parameters"] | {"mscale": 1.3},
    },
    "dots1": {"sliding_window": None, "layer_types": None},
    "glm": {"head_dim": 16},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24},
    "gpt-oss": {"swiglu_limit": 7.0},
    "llama4": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    "llama4-two-experts": {
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "use_qk_norm": True,
    },
    "mixtral": {"sliding_window": None},
    "qwen2-moe": {"mlp_only_layers": []},
    "qwen2-tied": {"sliding_window": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "starcoder2": {"sliding_window": None},
}
"""The fields of a variant that the format cannot express."""
GRANITE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 8, "mamba_d_state": 24,
    "mamba_expand": 2, "mamba_n_groups": 2, "shared_intermediate_size": 72, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0, "num_experts_per_tok": 2,
}  # fmt: skip
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1, "num_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "granite-hybrid": ("GraniteMoeHybridConfig", GRANITE | {"num_local_experts": 0}),
    "granite-hybrid-experts": ("GraniteMoeHybridConfig", GRANITE | {"num_local_experts": 4, "mamba_proj_bias": True}),
}  # fmt: skip
"""Models with recurrent layers, by the class of their config and its changes."""


@pytest.fixture(params=["reference", pytest.param("cpu", marks=pytest.mark.soak)])
def backend(request):
    """Each backend that runs on a CPU, in turn. They share the code that reads files, so only the long tests use the
    second."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    return request.param


@pytest.fixture(scope="module")
def model_of(build_model, tmp_path_factory):
    """Returns a model of a variant, without the fields that the format cannot express."""
    made = {}

    def get(variant):
        if variant not in made:
            config, changes = HYBRIDS.get(variant) or (VARIANTS[variant]["config"], VARIANTS[variant]["changes"])
            made[variant] = build_model(tmp_path_factory.mktemp(variant), config, changes | WITHOUT.get(variant, {}))
        return made[variant]

    return get


@pytest.fixture
def check_output(backend, in_process, start_engine, prompts):
    """Checks that the greedy output of a file is that of transformers' model."""

    async def check(model, file):
        engine = await start_engine(in_process(file, backend=backend), enable_prefix_caching=False)
        answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
            assert answer.token_ids == logits.argmax(-1).tolist()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=TOLERANCE, rtol=0)

    return check
