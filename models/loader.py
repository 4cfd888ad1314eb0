"""Fills ``Weights`` from safetensors files, or with random numbers; fuses and casts on the way, a tensor at a time.

The files were checked before (``checkpoint``). Knows nothing of KV pages and steps.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.models.checkpoint import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.models.spec import ModelSpec
from penstock.models.weights import DenseLinear, LayerWeights, Weights

DUMMY_SEED = 0
DUMMY_STD = 0.02


class TensorSource(Protocol):
    """Where tensors come from."""

    def fill(self, name: str, out: Tensor) -> None:
        """Copies the named tensor into ``out``, which has its shape, casting as needed."""
        ...


class FileSource:
    """The tensors of a checked checkpoint."""

    def __init__(self, info: CheckpointInfo, stack: contextlib.ExitStack) -> None:
        self._entries = info.tensors
        files = {entry.file for entry in info.tensors.values()}
        try:
            self._open = {file: stack.enter_context(safe_open(file, framework="pt")) for file in sorted(files)}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{info.path}: a weight file cannot be read ({error}): download it again") from error

    def fill(self, name: str, out: Tensor) -> None:
        """Copies the named tensor into ``out``, casting as needed."""
        out.copy_(self._open[self._entries[name].file].get_tensor(name))


class DummySource:
    """Random weights for benchmarks: normal with a small deviation, norms one, biases zero; the same every time."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(DUMMY_SEED)

    def fill(self, name: str, out: Tensor) -> None:
        """Writes random numbers for a matrix, ones for a norm, zeros for a bias."""
        if out.ndim == 2:
            out.normal_(std=DUMMY_STD, generator=self._generator)
        else:
            out.fill_(0.0 if name.endswith(".bias") else 1.0)


@contextlib.contextmanager
def open_source(info: CheckpointInfo, load_format: str, device: torch.device) -> Iterator[TensorSource]:
    """The source that a load format names: auto or dummy."""
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"--load-format {load_format}: must be auto or dummy")
    with contextlib.ExitStack() as stack:
        yield DummySource(device) if load_format == "dummy" else FileSource(info, stack)


@dataclass(frozen=True)
class _Filler:
    """Makes tensors on the device from a source."""

    source: TensorSource
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.source.fill(name, out)
        return out

    def fused(self, names: tuple[str, ...], rows: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Tensors of (rows[i], *shape), one above the other."""
        out = torch.empty((sum(rows), *shape), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(out, list(rows)), strict=True):
            self.source.fill(name, part)
        return out

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool) -> DenseLinear:
        weight = self.fused(tuple(f"{name}.weight" for name in names), rows, (columns,))
        bias = self.fused(tuple(f"{name}.bias" for name in names), rows, ()) if biased else None
        return DenseLinear(weight, bias)


def load_weights(
    info: CheckpointInfo, dtype: torch.dtype, device: torch.device, load_format: str, num_logits: int
) -> Weights:
    """Loads a checked checkpoint. ``num_logits`` is how many rows of the head are used, from the first on."""
    spec = info.spec
    with open_source(info, load_format, device) as source:
        fill = _Filler(source, dtype, device)
        embedding = fill.tensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        layers = tuple(_load_layer(fill, spec, f"model.layers.{layer}.") for layer in range(spec.num_layers))
        norm = fill.tensor("model.norm.weight", (spec.hidden_size,))
        untied = None
        if not spec.tied_embeddings:
            untied = fill.tensor("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    num_bytes = embedding.nbytes + norm.nbytes + sum(layer.num_bytes for layer in layers)
    num_bytes += untied.nbytes if untied is not None else 0
    head = DenseLinear((embedding if untied is None else untied)[:num_logits])
    return Weights(embedding, layers, norm, head, num_bytes)


def _load_layer(fill: _Filler, spec: ModelSpec, prefix: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv_names = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    return LayerWeights(
        attention_norm=fill.tensor(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=fill.linear(qkv_names, (spec.query_size, spec.kv_size, spec.kv_size), hidden, spec.qkv_bias),
        qk_norm=_load_qk_norm(fill, spec, attention) if spec.qk_norm else None,
        output=fill.linear((f"{attention}o_proj",), (hidden,), spec.query_size, spec.output_bias),
        mlp_norm=fill.tensor(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=fill.linear((f"{mlp}gate_proj", f"{mlp}up_proj"), (inner, inner), hidden, spec.mlp_bias),
        down=fill.linear((f"{mlp}down_proj",), (hidden,), inner, spec.mlp_bias),
    )


def _load_qk_norm(fill: _Filler, spec: ModelSpec, prefix: str) -> Tensor:
    """Both norms as one, a line for each head, so that queries and keys are normed together."""
    query = fill.tensor(f"{prefix}q_norm.weight", (spec.head_dim,)).expand(spec.num_heads, -1)
    key = fill.tensor(f"{prefix}k_norm.weight", (spec.head_dim,)).expand(spec.num_kv_heads, -1)
    return torch.cat((query, key))
