"""Writes and reads the demo model as a Hugging Face folder: config.json, generation_config.json, model.safetensors.

The parameters' names are those of transformers' Qwen3ForCausalLM already, so nothing is renamed.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from penstock.models.train_demo.network import Decoder, Shape
from penstock.models.train_demo.tokenize_corpus import END_OF_TEXT, IM_END, special_id


def write_config(shape: Shape, out: Path) -> None:
    """Writes config.json and generation_config.json; the tokenizer must be in `out` already."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    end_of_text, end_of_turn = special_id(tokenizer, END_OF_TEXT), special_id(tokenizer, IM_END)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
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
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
        "torch_dtype": "bfloat16",
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


def write_weights(model: Decoder, out: Path) -> int:
    """Writes model.safetensors in bf16; returns its size in bytes."""
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    new = out / "model.new"
    save_file(tensors, new, metadata={"format": "pt"})
    new.chmod(0o644)
    new.replace(out / "model.safetensors")
    return (out / "model.safetensors").stat().st_size


def read_shape(folder: Path) -> Shape:
    """The sizes that config.json states."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )


def read_model(folder: Path) -> Decoder:
    """The model of a folder, its bf16 weights widened to fp32."""
    model = Decoder(read_shape(folder))
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return model
