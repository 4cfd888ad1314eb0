"""Writes and reads the demo model as a Hugging Face folder (config.json, generation_config.json, model.safetensors),
and EAGLE-3 heads in the form of the published ones.

The networks' parameters already have the names of transformers' Qwen3ForCausalLM, or of the published heads, so nothing
is renamed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from penstock.models.train_demo.eagle3 import Head, HeadShape
from penstock.models.train_demo.network import Decoder, DecoderShape
from penstock.models.train_demo.tokenize_corpus import END_OF_TEXT, IM_END, special_id


def common_config(shape: DecoderShape, tokenizer: Tokenizer) -> dict[str, object]:
    """Returns the fields of config.json that are common to all decoders."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": special_id(tokenizer, IM_END),
        "pad_token_id": special_id(tokenizer, END_OF_TEXT),
        "torch_dtype": "bfloat16",
    }


def write_config(shape: DecoderShape, tokenizer: Tokenizer, out: Path) -> None:
    """Writes config.json and generation_config.json."""
    end_of_text, end_of_turn = special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **common_config(shape, tokenizer),
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_head_config(shape: HeadShape, tokenizer: Tokenizer, out: Path) -> None:
    """Writes a head's config.json."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **common_config(shape, tokenizer),
        "tie_word_embeddings": False,
        "mlp_bias": False,
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_weights(state: Mapping[str, Tensor], out: Path) -> int:
    """Writes model.safetensors with floats in bf16. Returns its size in bytes."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in state.items()
    }
    new = out / "model.new"
    save_file(tensors, new, metadata={"format": "pt"})
    new.chmod(0o644)
    new.replace(out / "model.safetensors")
    return (out / "model.safetensors").stat().st_size


def read_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes in a config.json by their names in ``DecoderShape``."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "max_positions": config["max_position_embeddings"],
        "rope_theta": config["rope_theta"],
        "norm_eps": config["rms_norm_eps"],
    }


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the tensors of a folder, with floats converted to fp32."""
    tensors = load_file(folder / "model.safetensors")
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def read_model(folder: Path) -> Decoder:
    """Reads a folder's model."""
    model = Decoder(DecoderShape(**read_shape(json.loads((folder / "config.json").read_text()))))
    model.load_state_dict(read_weights(folder))
    return model


def read_head(folder: Path) -> Head:
    """Reads a folder's EAGLE-3 head."""
    config = json.loads((folder / "config.json").read_text())
    layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
    shape = HeadShape(**read_shape(config), draft_vocab_size=config["draft_vocab_size"], aux_layers=layers)
    tensors = read_weights(folder)
    head = Head(shape, tensors["t2d"].nonzero().squeeze(1))
    head.load_state_dict(tensors)
    return head
