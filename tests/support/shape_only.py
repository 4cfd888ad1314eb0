"""The shape of a model that benchmarks serve with ``--load-format dummy``."""

import json
from pathlib import Path

from cpu_bench.floors import SHAPES

SHAPE = SHAPES["M1"]


def write_config(folder: Path) -> None:
    """Writes the config.json of M1, a model whose weights are made up."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": SHAPE.hidden, "num_hidden_layers": SHAPE.layers, "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads, "head_dim": SHAPE.head_dim, "intermediate_size": SHAPE.intermediate,
        "vocab_size": SHAPE.vocab, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 32_768, "attention_bias": False, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
