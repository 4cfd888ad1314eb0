"""Architectures without an implementation here run as modules of transformers, token for token; what cannot run so is
refused by name."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
NUM_TOKENS = 24
GEMMA3N = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 160,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0, 0.0],
    "sliding_window": 9,
    "final_logit_softcapping": 5.0,
}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", {"initializer_range": 0.1, "hidden_act": "xielu"}),
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "sliding_window": None}),
}
OURS = {
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 160,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 9,
            "initializer_range": 0.1,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "gemma2": ("Gemma2Config", {"sliding_window": 9, "head_dim": 16}),
    "gpt2": ("GPT2Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
"""Also run by the fallback on demand: a factor of logits, caps and windows, shared keys, and layers that the head
calls."""

Load = Callable[..., Any]


@pytest.mark.parametrize(
    "name", ["apertus", "gemma3n", "helium", "phimoe", "cohere", "gemma2", "gemma4", "gpt2", "opt"]
)
async def test_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, build_model: Load, in_process: Load, start_engine: Load, prompts: list[list[int]]
) -> None:
    """Chunked, batched and after a preemption."""
    model = build_model(tmp_path, *(FOREIGN | OURS)[name])
    backend = "auto" if name in FOREIGN else "transformers"
    preemptions = 0
    for config in ({"max_num_batched_tokens": 32}, {}):
        executor = in_process(tmp_path, num_blocks=16, max_model_len=200, backend=backend)
        engine = await start_engine(executor, **config)
        answers = await engine.run(prompts[3:], GREEDY, NUM_TOKENS)
        for prompt, answer in zip(prompts[3:], answers, strict=True):
            logits = model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
            assert answer.token_ids == logits.argmax(-1).tolist()
            chosen = logits.log_softmax(-1).max(-1).values
            torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=2e-4, rtol=0)
        preemptions += engine.stats.preemptions
    assert preemptions > 0


async def test_the_language_model_of_a_model_that_sees_images(
    tmp_path: Path, build_model: Load, in_process: Load, start_engine: Load, edit_config: Load, prompts: list[list[int]]
) -> None:
    model = build_model(tmp_path, *FOREIGN["gemma3n"])
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, architectures=["Gemma3nForConditionalGeneration"], model_type="gemma3n", text_config=config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors["model.vision_tower.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert check_checkpoint(tmp_path).spec.kv_sources == (0, 1, 2, 2, 1)
    engine = await start_engine(in_process(tmp_path, backend="auto", max_model_len=200))
    [answer] = await engine.run(prompts[-1:], GREEDY, NUM_TOKENS)
    logits = model.logits(prompts[-1] + answer.token_ids)[len(prompts[-1]) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()


def test_the_log_names_it_once(
    tmp_path: Path, build_model: Load, worker_config: Load, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(tmp_path, *FOREIGN["helium"])
    caplog.set_level(logging.INFO)
    facts = load_backend(worker_config(tmp_path, backend="auto")).facts
    assert (facts.backend, facts.architecture) == ("transformers", "HeliumForCausalLM")
    lines = [record.getMessage() for record in caplog.records]
    [line] = [line for line in lines if "SLOW" in line]
    assert line.startswith(
        "SLOW: HeliumForCausalLM runs as a module of transformers, with this service's paged attention"
    )


@pytest.mark.parametrize(
    ("config_class", "changes", "says"),
    [
        ("MambaConfig", {"state_size": 8}, "num_attention_heads is missing|not supported"),
        ("BloomConfig", {"n_layer": 3, "n_head": 4}, "BloomForCausalLM: has attention, or a state, of its own"),
        ("YoutuConfig", {}, "keys of 192 dimensions and values of 128, which is not supported"),
        (
            "BambaConfig",
            {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
            "BambaForCausalLM: has .* which our KV cache does not hold: it is not supported",
        ),
    ],
)
def test_what_has_other_state_is_refused_by_name(
    config_class: str, changes: dict[str, Any], says: str, tmp_path: Path, build_model: Load, worker_config: Load
) -> None:
    build_model(tmp_path, config_class, changes)
    with pytest.raises(ModelError, match=says):
        load_backend(worker_config(tmp_path, backend="auto"))


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, build_model: Load, worker_config: Load) -> None:
    """transformers itself would go on with random numbers."""
    build_model(tmp_path, *FOREIGN["helium"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_backend(worker_config(tmp_path, backend="auto"))


def test_an_architecture_that_nobody_has_is_refused(
    tmp_path: Path, build_model: Load, worker_config: Load, edit_config: Load
) -> None:
    build_model(tmp_path, "LlamaConfig", {})
    edit_config(tmp_path, architectures=["LamaForCausalLM"])
    with pytest.raises(ModelError, match=r"LamaForCausalLM, which transformers does not have.* closest is Llama"):
        load_backend(worker_config(tmp_path, backend="auto"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"backend": "cpu"},
            r"--backend cpu: .*architectures names HeliumForCausalLM, which it does not have; the closest is ",
        ),
        ({"quantization": "int8"}, "--quantization int8: is not for the transformers backend"),
        ({"load_format": "dummy"}, "--load-format dummy: is not for the transformers backend"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is 2, and this backend has one process"),
    ],
)
def test_what_it_does_not_have_names_the_flag(
    changes: dict[str, Any], says: str, tmp_path: Path, build_model: Load, worker_config: Load
) -> None:
    build_model(tmp_path, *FOREIGN["helium"])
    with pytest.raises(ModelError, match=says):
        load_backend(worker_config(tmp_path, **{"backend": "auto", **changes}))
