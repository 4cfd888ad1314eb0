"""The least time that a workload takes on a machine, whatever the software: by what must be read and computed.

A prefill computes, so it takes its operations at the arithmetic's peak; a step of decoding reads all weights and the KV
of every row, so it takes those bytes at the memory's bandwidth, or its operations where those take longer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_bench.engines import BF16, INT4, INT8
from cpu_bench.wire import Request

LAYER_BYTES = {BF16: 2.0, INT8: 1.0, INT4: 0.5 + 2 / 128}
"""Of one weight of a layer; int4 has a scale of 2 bytes for each 128."""
HEAD_BYTES = {BF16: 2.0, INT8: 1.0, INT4: 1.0}
"""Of one weight of the head, which nobody takes below 8 bits (llama.cpp: 6)."""
KV_BYTES = {BF16: 2.0, INT8: 1.0, INT4: 1.0}
"""Of one key or value of a head: where weights are quantised, KV may have eight bits."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides how much is read and computed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """In the products of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """In the product that gives the logits."""
        return self.vocab * self.hidden

    @property
    def kv_numbers(self) -> int:
        """The keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_operations(self, pairs: float) -> float:
        """Of so many pairs of a query and a key, in all layers: a product and a sum for the score, the same for the
        value."""
        return 4.0 * self.layers * self.heads * self.head_dim * pairs


SHAPES = {
    "M0": Shape(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=768, vocab=4096),
    "M1": Shape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936),
    "M2": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128_256),
}


@dataclass(frozen=True)
class Machine:
    """What it does at best, with all cores."""

    bytes_per_s: float
    bf16_operations_per_s: float
    int8_operations_per_s: float
    reading: str = ""
    """The access pattern that reads ``bytes_per_s``."""

    def operations_per_s(self, precision: str) -> float:
        """int4 weights are multiplied as int8."""
        return self.bf16_operations_per_s if precision == BF16 else self.int8_operations_per_s


def tokens_per_s(
    machine: Machine, shape: Shape, requests: Sequence[Request], precision: str, shared_prefix: int = 0
) -> float:
    """Output tokens a second that the machine allows, where the ``shared_prefix`` tokens that all prompts begin with
    are computed once. Attention's own operations are done in the type of the KV."""
    prompts = [len(prompt) for prompt, _ in requests]
    outputs = [num_output for _, num_output in requests]
    weights = shape.layer_weights + shape.head_weights
    rate = machine.operations_per_s(precision)

    computed = sum(prompts) - shared_prefix * (len(requests) - 1)
    pairs = shared_prefix**2 / 2 + sum((length**2 - shared_prefix**2) / 2 for length in prompts)
    prefill = 2 * (shape.layer_weights * computed + shape.head_weights * len(requests)) / rate
    prefill += shape.attention_operations(pairs) / rate

    contexts = sum(length + done for length, count in zip(prompts, outputs, strict=True) for done in range(1, count))
    step = shape.layer_weights * LAYER_BYTES[precision] + shape.head_weights * HEAD_BYTES[precision]
    read = (max(outputs) - 1) * step + contexts * shape.kv_numbers * KV_BYTES[precision]
    decode = max(read / machine.bytes_per_s, 2 * weights * (sum(outputs) - len(requests)) / rate)
    return sum(outputs) / (prefill + decode)


def write_config(folder: Path) -> None:
    """Writes the config.json of M1, for models whose weights are made up."""
    shape = SHAPES["M1"]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 32_768, "attention_bias": False, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
