"""Models that see images are served for text: greedy output equals that of the whole model in transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWENS_EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
QWENS_TOKENS = {
    "image_token_id": 160,
    "video_token_id": 161,
    "vision_start_token_id": 162,
    "vision_end_token_id": 163,
}
"""Ids that no output contains."""
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA4S_EYES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "vision_output_dim": 16,
}
MLLAMAS_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "attention_heads": 2,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {"vision_config": {"model_type": "pixtral", **EYES, "image_size": 28, "patch_size": 14}}

WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**TEXT, "head_dim": 24, "sliding_window": 9},
            "vision_config": {**EYES, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": {
                **TEXT,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "head_dim": 16,
                "global_head_dim": 24,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": 160,
                "sliding_window": 9,
                "pad_token_id": 0,
            },
            "vision_config": {**EYES, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16},
        },
    ),
    "kimi-k2.5": (
        "Kimi_K25",
        {
            "text_config": {
                "model_type": "deepseek_v3",
                **TEXT,
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 24,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "text_config": {
                **TEXT,
                "head_dim": 16,
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 10,
                "floor_scale": 4,
            },
            "vision_config": LLAMA4S_EYES,
        },
    ),
    "mllama": (
        "Mllama",
        {
            "text_config": {**TEXT, "num_hidden_layers": 4, "bos_token_id": 1, "cross_attention_layers": [0, 2]},
            "vision_config": MLLAMAS_EYES,
        },
    ),
    "mistral3": ("Mistral3", {"text_config": {"model_type": "mistral", **TEXT}, **PIXTRAL}),
    "mistral3-ministral3": (
        "Mistral3",
        {"text_config": {"model_type": "ministral3", **TEXT, "head_dim": 16}, **PIXTRAL},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWENS_EYES, "fullatt_block_indexes": [0]},
            **QWENS_TOKENS,
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "text_config": {**TEXT, "head_dim": 16, "rope_parameters": MROPE},
            "vision_config": {**QWENS_EYES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWENS_TOKENS,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "text_config": {**TEXT, **EXPERTS, "head_dim": 16, "rope_parameters": MROPE},
            "vision_config": {**QWENS_EYES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **QWENS_TOKENS,
        },
    ),
}


def build(name: str, path: Path) -> Any:
    """Saves a random model, and returns transformers' own instance of it."""
    prefix, fields = WRAPPERS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{prefix}Config")(**fields)
    module = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        language_model = getattr(module, "model", module).language_model
        for parameter in language_model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=1.0, std=0.3)
        for buffer_name, buffer in language_model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.normal_(mean=1.0, std=0.3)
    module.save_pretrained(path)
    return module


def turn_experts(path: Path) -> None:
    """Stores experts as Qwen3-VL-MoE is published."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name and tensor.shape[-1] in (TEXT["hidden_size"], EXPERTS["moe_intermediate_size"]):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, path / "model.safetensors")


def name_layers(path: Path) -> None:
    """Names layers as Kimi K2.5 is published. transformers, which reads these names, writes others."""
    tensors = load_file(path / "model.safetensors")
    written = "language_model.model.blocks."
    renamed = {name.replace(written, "language_model.model.layers."): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors")


def add_unused(path: Path) -> None:
    """Adds the tensors that Gemma 4 is published with, though its last layers take keys and values from others."""
    tensors = load_file(path / "model.safetensors")
    for layer in (2, 3):
        prefix = f"model.language_model.layers.{layer}.self_attn."
        tensors |= {f"{prefix}{name}.weight": torch.ones(32, 64) for name in ("k_proj", "v_proj")}
        tensors[f"{prefix}k_norm.weight"] = torch.ones(16)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", WRAPPERS)
async def test_text_is_that_of_the_whole_model(
    name: str,
    backend: str,
    tmp_path: Path,
    in_process: Callable[..., Any],
    start_engine: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    if backend == "cpu":
        request.getfixturevalue("cpu_library")
    module = build(name, tmp_path)
    if name == "qwen3-vl-moe":
        turn_experts(tmp_path)
    if name == "gemma4":
        add_unused(tmp_path)
    if name == "kimi-k2.5":
        name_layers(tmp_path)
    prompt = [3, 9, 1, 33, 12, 5, 70, 81, 2, 14, 99, 4]
    engine = await start_engine(in_process(tmp_path, backend=backend, max_model_len=64))
    [answer] = await engine.run([prompt], SamplingParams(temperature=0.0), 12)
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + answer.token_ids])).logits[0]
    assert answer.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_the_log_says_what_is_not_loaded(tmp_path: Path) -> None:
    build("mistral3", tmp_path)
    info = check_checkpoint(tmp_path)
    assert info.spec.architecture == "MistralForCausalLM"
    [warning] = info.warnings
    assert "only the language model of Mistral3ForConditionalGeneration is served, for text" in warning


def test_a_config_without_a_text_config_is_read_as_published(tmp_path: Path) -> None:
    """Qwen2.5-VL is published with the language model's fields beside ``vision_config``."""
    build("qwen2.5-vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    for absent in ({}, {"text_config": None}):
        (tmp_path / "config.json").write_text(json.dumps({**text, **config, **absent}))
        assert check_checkpoint(tmp_path).spec.architecture == "Qwen2ForCausalLM"


def test_kimi_k25_is_read_as_published(tmp_path: Path) -> None:
    """Its config.json has the names of the classes that are published with it."""
    build("kimi-k2.5", tmp_path)
    name_layers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["text_config"]["model_type"] = "kimi_k2"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(tmp_path).spec.architecture == "DeepseekV3ForCausalLM"


def test_an_unknown_language_model_is_named(tmp_path: Path) -> None:
    build("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mamba"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"text_config\.model_type is 'mamba': it names no supported language model"):
        check_checkpoint(tmp_path)


def test_layers_that_attend_to_images_are_left_out(tmp_path: Path, worker_config: Callable[..., Any]) -> None:
    """Llama 3.2 Vision's; its embedding has 8 rows more than its head."""
    build("mllama", tmp_path)
    with pytest.raises(ModelError, match="text skips some of the model's layers, and this backend runs all of them"):
        load_backend(worker_config(tmp_path, backend="transformers"))
    info = check_checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    [name] = [name for name in stored if name.endswith("layers.3.self_attn.q_proj.weight")]
    assert info.spec.num_layers == 2
    assert info.tensors["model.embed_tokens.weight"].shape == (160, 64)
    files = TensorFiles(entry.file for entry in info.tensors.values())
    query = files.array(info.tensors["model.layers.1.self_attn.q_proj.weight"])
    assert (torch.from_numpy(query.copy()) == stored[name]).all()
    stored[name.replace("q_proj.weight", "k_scale")] = torch.tensor(0.5)
    save_file(stored, tmp_path / "model.safetensors")
    assert list(check_checkpoint(tmp_path).kv_scales) == ["model.layers.1.self_attn.k_scale"]
    [embedding] = [name for name in stored if name.endswith("embed_tokens.weight")]
    stored[embedding] = stored[embedding][:160].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has the shape \[160, 64\], .* calls for \[168, 64\]"):
        check_checkpoint(tmp_path)


def test_a_tensor_of_the_language_model_that_has_no_place_is_still_refused(tmp_path: Path) -> None:
    build("mistral3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["language_model.model.layers.0.self_attn.extra.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has no place in MistralForCausalLM"):
        check_checkpoint(tmp_path)
