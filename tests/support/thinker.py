"""A tiny model of random weights whose chat template opens reasoning, with a tokenizer whose ids are bytes."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken

from penstock.models.architecture.registry import spec_from_config

EOS = 256
OPENS, CLOSES = 258, 259
"""The tokens after those of the byte tokenizer."""
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% if not loop.last or add_generation_prompt %}<|end|>"
    "{% endif %}{% if m.tool_calls %}<tool_call>\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "arguments": {{ m.tool_calls[0].function.arguments | tojson }}}\n'
    "</tool_call>{% endif %}{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif wait is not defined %}<think>\n{% endif %}{% endif %}"
)


def write_thinker(
    path: Path,
    byte_tokenizer: Path,
    template: str = TEMPLATE,
    marks: Sequence[str] = ("<think>", "</think>"),
    *,
    are_special: bool = False,
) -> Path:
    """Writes the model into a directory. ``marks`` are tokens of their own, which follow those of the byte tokenizer in
    another directory."""
    library = tokenizers.Tokenizer.from_file(str(byte_tokenizer / "tokenizer.json"))
    library.add_tokens([AddedToken(mark, special=are_special) for mark in marks])
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": library.get_vocab_size(), "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": EOS,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.normal(float(name.endswith("norm.weight")), 0.1, size, generator=generator)
        for name, size in spec_from_config(config).tensors()
    }
    save_file(tensors, path / "model.safetensors")
    return path
