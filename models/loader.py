"""Fills ``Weights`` from safetensors files, or with random numbers; fuses and casts on the way, a tensor at a time.

The files were checked before (``checkpoint``). Knows nothing of KV pages and steps.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.reference import clamped_gate, gated_activation
from penstock.kernels.wide import widened
from penstock.models.checkpoint import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.models.quantized_matrix import read_matrix
from penstock.models.spec import Activation, ModelSpec, QkNorm
from penstock.models.tensor_files import TensorFiles
from penstock.models.weights import (
    DenseLinear,
    ExpertMlp,
    HeadNorm,
    Layer,
    LayerWeights,
    Mlp,
    RmsNorm,
    Weights,
    WholeNorm,
    num_bytes,
    unchanged,
)

DUMMY_SEED = 0
DUMMY_STD = 0.02

ACTIVATION_NAMES = {Activation.SILU: "silu", Activation.GELU: "gelu", Activation.GELU_TANH: "gelu_tanh"}


class TensorSource(Protocol):
    """Where tensors come from."""

    def fill(self, name: str, out: Tensor) -> None:
        """Copies the named tensor into ``out``, which has its shape, casting as needed."""
        ...


class FileSource:
    """The tensors of a checked checkpoint."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._entries = info.tensors
        self._quantized = info.quantized
        self._files = TensorFiles(entry.file for entry in info.tensors.values())

    def fill(self, name: str, out: Tensor) -> None:
        """Copies the named tensor into ``out``, casting as needed; a quantised weight is multiplied out."""
        linear = self._quantized.get(name.removesuffix(".weight"))
        if linear is not None:
            out.copy_(torch.from_numpy(read_matrix(linear).dequantized()))
            return
        entry = self._entries[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
            values = torch.from_numpy(self._files.array(entry))
        out.copy_(values.view(torch.bfloat16) if entry.dtype == "BF16" else values)


class DummySource:
    """Random weights for benchmarks: normal with a small deviation, norms one, what else is no matrix zero; the same
    every time."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(DUMMY_SEED)

    def fill(self, name: str, out: Tensor) -> None:
        """Writes random numbers for a matrix, ones for a norm, zeros for a bias."""
        if out.ndim == 2:
            out.normal_(std=DUMMY_STD, generator=self._generator)
        else:
            out.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def open_source(info: CheckpointInfo, load_format: str, device: torch.device) -> TensorSource:
    """The source that a load format names: auto or dummy."""
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"--load-format {load_format}: must be auto or dummy")
    return DummySource(device) if load_format == "dummy" else FileSource(info)


@dataclass(frozen=True)
class _Filler:
    """Makes parts of a model on the device from a source."""

    source: TensorSource
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.source.fill(name, out)
        return out

    def fused(self, names: Iterable[str], rows: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Tensors of (rows[i], *shape), one above the other."""
        out = torch.empty((sum(rows), *shape), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(out, list(rows)), strict=True):
            self.source.fill(name, part)
        return out

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool) -> DenseLinear:
        weight = self.fused((f"{name}.weight" for name in names), rows, (columns,))
        bias = self.fused((f"{name}.bias" for name in names), rows, ()) if biased else None
        return DenseLinear(weight, bias)

    def norm(self, name: str, size: int) -> RmsNorm:
        """Its weight is wide, since a checkpoint's weight of 16 bits may lose what the offset adds."""
        weight = widened(torch.empty(size, dtype=self.dtype, device=self.device))
        self.source.fill(f"{name}.weight", weight)
        return RmsNorm(weight.add_(self.spec.norm_offset), self.spec.norm_eps)


def load_weights(
    info: CheckpointInfo, dtype: torch.dtype, device: torch.device, load_format: str, num_logits: int
) -> Weights:
    """Loads a checked checkpoint. ``num_logits`` is how many rows of the head are used, from the first on."""
    spec = info.spec
    fill = _Filler(open_source(info, load_format, device), spec, dtype, device)
    embedding = fill.tensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    layers = tuple(_load_layer(fill, layer) for layer in range(spec.num_layers))
    norm = fill.norm("model.norm", spec.hidden_size)
    untied = None
    if not spec.tied_embeddings:
        untied = fill.tensor("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    head = DenseLinear((embedding if untied is None else untied)[:num_logits])
    return Weights(embedding, layers, norm, head, num_bytes((embedding, layers, norm, untied)))


def _load_layer(fill: _Filler, layer: int) -> LayerWeights:
    spec = fill.spec
    hidden = spec.hidden_size
    prefix = f"model.layers.{layer}."
    attention = f"{prefix}self_attn."
    qkv_names = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    before_attention, after_attention, before_mlp, after_mlp = (
        unchanged if name is None else fill.norm(prefix + name, hidden) for name in spec.layer_norms
    )
    return LayerWeights(
        before_attention=before_attention,
        qkv=fill.linear(qkv_names, (spec.query_size, spec.kv_size, spec.kv_size), hidden, spec.qkv_bias),
        qk_norm=_load_qk_norm(fill, attention),
        sinks=fill.tensor(f"{attention}sinks", (spec.num_heads,)) if spec.sinks else None,
        output=fill.linear((f"{attention}o_proj",), (hidden,), spec.query_size, spec.output_bias),
        after_attention=after_attention,
        before_mlp=before_mlp,
        mlp=_load_experts(fill, f"{prefix}mlp.") if spec.has_experts(layer) else _load_mlp(fill, f"{prefix}mlp."),
        after_mlp=after_mlp,
    )


def _load_qk_norm(fill: _Filler, prefix: str) -> Layer:
    spec = fill.spec
    match spec.qk_norm:
        case QkNorm.NONE:
            return unchanged
        case QkNorm.HEAD:
            query, key = (fill.norm(f"{prefix}{name}", spec.head_dim).weight for name in ("q_norm", "k_norm"))
            # Both as one, a line for each head, so that queries and keys are normed together.
            weight = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
            return HeadNorm(weight, spec.norm_eps)
        case QkNorm.ALL:
            return WholeNorm(fill.norm(f"{prefix}q_norm", spec.query_size), fill.norm(f"{prefix}k_norm", spec.kv_size))


def _load_mlp(fill: _Filler, prefix: str) -> Mlp:
    spec = fill.spec
    activation = partial(gated_activation, activation=ACTIVATION_NAMES[spec.activation])
    return _gated(fill, prefix, spec.intermediate_size, spec.mlp_bias, activation)


def _load_experts(fill: _Filler, prefix: str) -> ExpertMlp:
    spec, experts = fill.spec, fill.spec.experts
    assert experts is not None
    activation: Layer = partial(gated_activation, activation=ACTIVATION_NAMES[spec.activation])
    if experts.gate is not None:
        activation = partial(clamped_gate, alpha=experts.gate.alpha, limit=experts.gate.limit)
    return ExpertMlp(
        router=fill.linear((f"{prefix}gate",), (experts.num_experts,), spec.hidden_size, experts.biased),
        experts=tuple(
            _gated(fill, f"{prefix}experts.{expert}.", experts.intermediate_size, experts.biased, activation)
            for expert in range(experts.num_experts)
        ),
        per_token=experts.per_token,
        normalise=experts.normalise,
    )


def _gated(fill: _Filler, prefix: str, inner: int, biased: bool, activation: Layer) -> Mlp:
    hidden = fill.spec.hidden_size
    return Mlp(
        gate_up=fill.linear((f"{prefix}gate_proj", f"{prefix}up_proj"), (inner, inner), hidden, biased),
        down=fill.linear((f"{prefix}down_proj",), (hidden,), inner, biased),
        activation=activation,
    )
