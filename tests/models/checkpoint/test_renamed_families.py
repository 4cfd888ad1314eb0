"""Families whose code is not part of transformers: Llama under other names. The oracle is Llama itself."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.scheduler.plan import SamplingParams

Tensors = dict[str, torch.Tensor]

EXAONE = {
    r"^model\.layers\.": "transformer.h.",
    r"^model\.embed_tokens\.": "transformer.wte.",
    r"^model\.norm\.": "transformer.ln_f.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    r"self_attn\.o_proj": "attn.attention.out_proj",
    r"self_attn\.": "attn.attention.",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
INTERNLM2 = {
    r"^model\.embed_tokens\.": "model.tok_embeddings.",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    r"self_attn\.o_proj": "attention.wo",
    r"mlp\.gate_proj": "feed_forward.w1",
    r"mlp\.down_proj": "feed_forward.w2",
    r"mlp\.up_proj": "feed_forward.w3",
}


def rename(tensors: Tensors, names: dict[str, str]) -> Tensors:
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        renamed[name] = tensor
    return renamed


def join_qkv(tensors: Tensors, num_heads: int, num_kv_heads: int) -> Tensors:
    """InternLM 2's: the query heads of a key head, that key head, its value head, and so on."""
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        query, key, value = (tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv")
        size = len(query) // num_heads
        parts = [
            part
            for head in range(num_kv_heads)
            for part in (
                query.view(num_kv_heads, -1, query.shape[1])[head],
                key[head * size : (head + 1) * size],
                value[head * size : (head + 1) * size],
            )
        ]
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(parts)
    return tensors


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("architecture", ["ExaoneForCausalLM", "InternLM2ForCausalLM"])
async def test_tokens_are_those_of_llama(
    architecture: str,
    backend: str,
    tmp_path: Path,
    build_model: Callable[..., Any],
    in_process: Callable[..., Any],
    start_engine: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    if backend == "cpu":
        request.getfixturevalue("cpu_library")
    model = build_model(tmp_path, "LlamaConfig", {})
    weights, file = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [architecture]}
    if architecture == "ExaoneForCausalLM":
        weights = rename(weights, EXAONE)
        config |= {"num_layers": config.pop("num_hidden_layers"), "activation_function": config.pop("hidden_act")}
        config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    else:
        weights = rename(join_qkv(weights, config["num_attention_heads"], config["num_key_value_heads"]), INTERNLM2)
    save_file(weights, tmp_path / "model.safetensors")
    file.write_text(json.dumps(config))
    prompt = [3, 9, 1, 33, 12, 5, 70, 81, 2, 14, 99, 4]
    engine = await start_engine(in_process(tmp_path, backend=backend, max_model_len=64))
    [answer] = await engine.run([prompt], SamplingParams(temperature=0.0), 12)
    assert answer.token_ids == model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1].argmax(-1).tolist()
