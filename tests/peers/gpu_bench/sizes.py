"""What is measured: the models' shapes, and the sizes of every part. TINY has all of it so small that Triton's
interpreter runs it in seconds."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cpu_bench import floors

from penstock.kernels.cuda.example_shapes import SHAPES
from penstock.kernels.cuda.model_shapes import Mixture, ModelShape
from penstock.kernels.cuda.recurrent.shapes import RecurrentShape


@dataclass(frozen=True)
class Model:
    """A shape that gets random weights."""

    name: str
    shape: ModelShape
    layers: int
    ties_embeddings: bool

    @property
    def intermediate_size(self) -> int:
        """Of the MLP."""
        assert self.shape.intermediate_size is not None
        return self.shape.intermediate_size

    @property
    def work(self) -> floors.Shape:
        """What of it decides how much is read and computed."""
        shape = self.shape
        return floors.Shape(
            layers=self.layers,
            hidden=shape.hidden_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=self.intermediate_size,
            vocab=shape.vocab_size,
        )

    @property
    def weight_bytes(self) -> int:
        """That a step reads."""
        return (self.work.layer_weights + self.work.head_weights) * self.shape.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self.work.kv_numbers * self.shape.kv_dtype.itemsize

    def with_fp8_kv(self) -> "Model":
        """The same with a KV cache of fewer bytes."""
        return replace(self, shape=replace(self.shape, kv_dtype=torch.float8_e4m3fn))

    def config(self) -> dict[str, object]:
        """In Hugging Face's terms."""
        shape = self.shape
        kind = "Qwen3" if shape.norms_heads else "Llama"
        return {
            "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": shape.activation,
            "torch_dtype": str(shape.dtype).removeprefix("torch."), "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers, "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": shape.norm_eps,
            "rope_theta": 1e6 if shape.norms_heads else 5e5, "max_position_embeddings": shape.max_positions,
            "tie_word_embeddings": self.ties_embeddings, "attention_bias": False, "mlp_bias": False,
            "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
        }  # fmt: skip

    def write_config(self, folder: Path) -> None:
        """All that a worker needs to make the weights up where it runs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))


@dataclass(frozen=True)
class Workload:
    """Requests of the service, all of the same size."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int

    @property
    def max_model_len(self) -> int:
        """Tokens of a request, and a little room."""
        return self.prompt_tokens + self.output_tokens + 16


@dataclass(frozen=True)
class KernelSizes:
    """Inputs of kernels. Attention is checked on fewer tokens than it is timed on: its reference is slow."""

    tokens: int
    """Of norms, gates, rotations."""
    lines: int
    """Of logits."""
    batch: int
    """Rows that decode..."""
    context: int
    """... at that context."""
    verified: int
    """Queries of a row whose drafts are verified."""
    prompt: int
    checked: int
    """Tokens of a row, where attention is checked."""


@dataclass(frozen=True)
class Sizes:
    """One run."""

    device: str
    models: tuple[Model, ...]
    mixtures: tuple[Model, ...]
    """Whose experts' kernels are measured, and nothing else."""
    hybrids: tuple[Model, ...]
    """Whose scans are measured, and nothing else."""
    kernels: KernelSizes
    copied_bytes: int
    product_side: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    turns: tuple[int, ...]
    """New tokens of a chat's next turn, on each context."""
    evicted: int
    """Tokens of a prompt whose KV goes to host memory, in whole blocks."""
    steps: int
    """Of decoding, for each batch and context."""
    profiled: tuple[int, ...]
    """Batches whose steps are measured by kernel, at the first context."""
    chunk: int
    """Tokens of a step at most."""
    compared: tuple[int, int]
    """Batch and context, with and without --deterministic."""
    workload: Workload
    kv_cache_bytes: int | None
    """None: what the device has."""
    starts: int
    """Of the service."""
    is_warmed: bool
    """Whatever is timed was run before."""


FULL = Sizes(
    device="cuda",
    models=(
        Model("Qwen3-0.6B", SHAPES["Qwen3-0.6B"], 28, ties_embeddings=True),
        Model("Llama-3.1-8B", SHAPES["Llama-3.1-8B"], 32, ties_embeddings=False),
    ),
    mixtures=(
        Model("gpt-oss-20b", SHAPES["gpt-oss-20b"], 1, ties_embeddings=False),
        Model("Qwen3-30B-A3B", SHAPES["Qwen3-30B-A3B"], 1, ties_embeddings=False),
    ),
    hybrids=(
        Model("Qwen3-Next-80B-A3B", SHAPES["Qwen3-Next-80B-A3B"], 1, ties_embeddings=False),
        Model("Granite-4.0-H-Tiny", SHAPES["Granite-4.0-H-Tiny"], 1, ties_embeddings=False),
    ),
    kernels=KernelSizes(tokens=8192, lines=256, batch=32, context=8192, verified=16, prompt=8192, checked=1500),
    copied_bytes=4 << 30,
    product_side=8192,
    batches=(1, 8, 32, 128, 256),
    contexts=(1024, 8192, 32768),
    prompts=(2048, 8192, 32768),
    turns=(32, 128, 256),
    evicted=8192,
    steps=32,
    profiled=(1, 32, 256),
    chunk=8192,
    compared=(32, 1024),
    workload=Workload(requests=512, concurrency=256, prompt_tokens=512, output_tokens=128),
    kv_cache_bytes=None,
    starts=2,
    is_warmed=True,
)

_TINY_MODEL = Model(
    "tiny",
    ModelShape(
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rotary_dim=32,
        vocab_size=300,
        norm_eps=1e-6,
        norms_heads=True,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        max_positions=128,
        max_sequences=2,
    ),
    layers=1,
    ties_embeddings=True,
)


def _tiny_delta_net() -> RecurrentShape:
    """A kind of layer with two heads."""
    [kind] = SHAPES["Qwen3-Next-80B-A3B"].recurrent
    assert kind.scan is not None
    sizes = {"heads": 2, "key_heads": 1, "key_size": 16, "value_size": 16, "stride": 512, "columns": 36, "channels": 64}
    places = {"query": 0, "key": 16, "value": 32, "beta": 32, "decay": 34}
    return replace(kind, scan=replace(kind.scan, dtype=torch.float32, **sizes, **places))


TINY = Sizes(
    device="cpu",
    models=(_TINY_MODEL,),
    mixtures=(
        replace(
            _TINY_MODEL,
            shape=replace(
                _TINY_MODEL.shape,
                intermediate_size=None,
                experts=Mixture(num_experts=2, per_token=1, normalise=True),
                expert_size=32,
            ),
        ),
    ),
    hybrids=(replace(_TINY_MODEL, shape=replace(_TINY_MODEL.shape, recurrent=(_tiny_delta_net(),))),),
    kernels=KernelSizes(tokens=3, lines=2, batch=2, context=24, verified=2, prompt=24, checked=16),
    copied_bytes=1 << 20,
    product_side=64,
    batches=(2,),
    contexts=(16, 96),
    prompts=(24,),
    turns=(20,),
    evicted=16,
    steps=2,
    profiled=(2,),
    chunk=20,
    compared=(2, 16),
    workload=Workload(requests=2, concurrency=2, prompt_tokens=8, output_tokens=3),
    # So that some rows do not fit.
    kv_cache_bytes=10 * 16 * 2 * 32 * 4,
    starts=1,
    is_warmed=False,
)
