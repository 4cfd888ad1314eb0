"""Recurrent layers in torch: their weights, and the states of rows in slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.reference.ops import rms_norm
from penstock.kernels.reference.recurrent import causal_convolution, gated_delta_rule, state_space_scan
from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.recurrent import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.torch_common.weights import LayerState, Linear, RecurrentLayer
from penstock.models.batch.batch import Batch
from penstock.models.batch.row_states import Save, StateCommit, StateStep
from penstock.scheduler.plan import NO_SLOT

L2_EPS = 1e-6
"""Added to the squared length of queries and keys of the gated delta rule."""


@dataclass(frozen=True)
class ConvolutionLayer:
    """A ``ShortConvolution``."""

    inputs: Linear
    output: Linear
    weight: Tensor
    """(channels, taps), in at least fp32, as the bias."""
    bias: Tensor | None

    def advance(self, x: Tensor, state: LayerState) -> Tensor:
        before, after, value = x.chunk(3, dim=-1)
        mixed = causal_convolution(upcast(before * value), state.inputs, self.weight, self.bias)
        return after * mixed.to(x.dtype)


@dataclass(frozen=True)
class DeltaNetLayer:
    """A ``GatedDeltaNet``. All tensors are in at least fp32."""

    inputs: Linear
    output: Linear
    mixer: GatedDeltaNet
    weight: Tensor
    """(channels, taps)."""
    dt_bias: Tensor
    """(value heads,)."""
    rates: Tensor
    """(value heads,): -exp(A_log)."""
    norm: Tensor
    """(value size,)."""

    def advance(self, x: Tensor, state: LayerState) -> Tensor:
        mixer, heads = self.mixer, self.mixer.num_value_heads
        qkv, z, beta, alpha = torch.split(upcast(x), [mixer.channels, mixer.values, heads, heads], dim=-1)
        qkv = functional.silu(causal_convolution(qkv, state.inputs, self.weight, None))
        query, key, value = torch.split(qkv, [mixer.keys, mixer.keys, mixer.values], dim=-1)
        query, key = (_for_heads(_unit(_heads(part, mixer.num_key_heads)), heads) for part in (query, key))
        decay = torch.exp(self.rates * functional.softplus(alpha + self.dt_bias))
        query = query * mixer.key_size**-0.5
        mixed = gated_delta_rule(query, key, _heads(value, heads), decay, torch.sigmoid(beta), state.matrices)
        gated = rms_norm(mixed, self.norm, mixer.eps) * functional.silu(_heads(z, heads))
        return gated.flatten(2).to(x.dtype)


@dataclass(frozen=True)
class Mamba2Layer:
    """A ``Mamba2``. All tensors are in at least fp32."""

    inputs: Linear
    output: Linear
    mixer: Mamba2
    weight: Tensor
    """(channels, taps)."""
    bias: Tensor | None
    """(channels,)."""
    dt_bias: Tensor
    """(heads,)."""
    rates: Tensor
    """(heads,): -exp(A_log)."""
    skips: Tensor
    """(heads,): D."""
    norm: Tensor | None
    """(groups, head size times the heads of a group)."""

    def advance(self, x: Tensor, state: LayerState) -> Tensor:
        mixer, heads = self.mixer, self.mixer.num_heads
        z, mixed, dt = torch.split(upcast(x), [mixer.values, mixer.channels, heads], dim=-1)
        mixed = functional.silu(causal_convolution(mixed, state.inputs, self.weight, self.bias))
        value, key, query = torch.split(mixed, [mixer.values, mixer.keys, mixer.keys], dim=-1)
        query, key = (_for_heads(_heads(part, mixer.num_groups), heads) for part in (query, key))
        step = functional.softplus(dt + self.dt_bias).clamp(*mixer.step_limits)
        value = _heads(value, heads)
        mixed = state_space_scan(value, step, torch.exp(self.rates * step), key, query, state.matrices)
        mixed = (mixed + value * self.skips.unsqueeze(-1)).flatten(2) * functional.silu(z)
        if self.norm is not None:
            mixed = rms_norm(_heads(mixed, mixer.num_groups), self.norm, mixer.eps).flatten(2)
        return mixed.to(x.dtype)


def _heads(x: Tensor, count: int) -> Tensor:
    """Divides the last dimension into heads."""
    return torch.unflatten(x, -1, (count, -1))


def _for_heads(x: Tensor, count: int) -> Tensor:
    """Repeats heads, (B, T, heads, D), for as many successive ones of ``count``."""
    return x.repeat_interleave(count // x.shape[2], dim=2)


def _unit(x: Tensor) -> Tensor:
    """Scales vectors to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class Filler(Protocol):
    """Reads a model's tensors."""

    @property
    def spec(self) -> ModelSpec:
        """The model's sizes."""

    def by_outputs(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool) -> Linear:
        """Returns linears, stacked."""

    def by_inputs(self, name: str, rows: int, columns: int, biased: bool) -> Linear:
        """Returns a linear."""

    def norm_part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor in at least fp32."""


def load_recurrent(fill: Filler, mixer: RecurrentMixer, prefix: str) -> RecurrentLayer:
    """Loads the recurrent mixer of the layer whose names begin with ``prefix``."""
    hidden = fill.spec.hidden_size
    names = tuple(prefix + name for name in mixer.inputs)
    inputs = fill.by_outputs(names, tuple(mixer.inputs.values()), hidden, mixer.biased)
    output = fill.by_inputs(prefix + mixer.output, hidden, mixer.output_columns, mixer.biased)
    convolution = prefix + mixer.convolution
    weight = fill.norm_part(f"{convolution}.weight", (mixer.channels, 1, mixer.taps)).squeeze(1)
    bias = fill.norm_part(f"{convolution}.bias", (mixer.channels,)) if mixer.convolution_biased else None
    vectors = [fill.norm_part(prefix + name, shape) for name, shape in mixer.vectors.items()]
    match mixer:
        case ShortConvolution():
            return ConvolutionLayer(inputs, output, weight, bias)
        case GatedDeltaNet():
            dt_bias, rates, norm = vectors
            rates = rates if mixer.has_rates else -rates.exp()
            return DeltaNetLayer(inputs, output, mixer, weight, dt_bias, rates, norm)
        case Mamba2():
            dt_bias, rates, skips, *norms = vectors
            rates = rates if mixer.has_rates else -rates.exp()
            of_groups = norms[0].view(mixer.num_groups, -1) if norms else None
            return Mamba2Layer(inputs, output, mixer, weight, bias, dt_bias, rates, skips, of_groups)


class StateSlots:
    """The recurrent states of all layers, in slots. See ``RecurrentStates``."""

    def __init__(self, spec: ModelSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` is that of the activations; states are in at least fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        self._mixers = {layer: mixer for layer, mixer in enumerate(spec.recurrent) if mixer is not None}
        self._layers = {
            layer: LayerState(
                torch.zeros((num_slots, mixer.channels, mixer.taps - 1), dtype=wide, device=device),
                torch.zeros((num_slots, *mixer.matrices), dtype=wide, device=device),
            )
            for layer, mixer in self._mixers.items()
        }
        self._read: list[tuple[RecurrentLayer, LayerState, Tensor]] = []
        """What the layers of the last step read, if some of its tokens may still be committed."""

    @torch.inference_mode()
    def begin(self, slot: int, source: int) -> None:
        for state in self._layers.values():
            for part in state:
                part[slot] = 0 if source == NO_SLOT else part[source]

    def forget_step(self) -> None:
        """Forgets the last step, none of whose tokens will be committed any more."""
        self._read.clear()

    def mix(self, index: int, layer: RecurrentLayer, x: Tensor, batch: Batch) -> Tensor:
        """Computes a layer's mixer, (T, hidden) -> (T, hidden), and advances its states by the tokens that are
        certain."""
        state, read = self._layers[index], layer.inputs(x)
        mixed = read.new_empty((len(read), self._mixers[index].output_columns))
        starts = batch.token_starts.tolist()
        rows = list(zip(batch.states, starts[:-1], starts[1:], strict=True))
        if any(step.certain < end - start for step, start, end in rows):
            self._read.append((layer, state, read))
        singles = [(step, start) for step, start, end in rows if step.certain == end - start == 1]
        if singles:
            self._mix_singles(layer, state, read, singles, mixed)
        for step, start, end in rows:
            certain = start + step.certain
            if step.certain == end - start == 1:
                continue
            if step.certain:
                mixed[start:certain] = _advance(layer, state, read[start:certain], step.slot, step.saves)
            if certain < end:
                copied = LayerState(*(part[step.slot].unsqueeze(0).clone() for part in state))
                mixed[certain:end] = layer.advance(read[certain:end].unsqueeze(0), copied)[0]
        return layer.output(mixed)

    def _mix_singles(
        self, layer: RecurrentLayer, state: LayerState, read: Tensor, rows: Sequence[tuple[StateStep, int]], out: Tensor
    ) -> None:
        """Computes the rows with one token, whose index in the batch is given, together."""
        slots = torch.tensor([step.slot for step, _ in rows], device=read.device)
        tokens = torch.tensor([token for _, token in rows], device=read.device)
        some = LayerState(*(part[slots] for part in state))
        out[tokens] = layer.advance(read[tokens].unsqueeze(1), some)[:, 0]
        for part, new in zip(state, some, strict=True):
            part[slots] = new
        for step, _ in rows:
            for save in step.saves:
                _copy(state, step.slot, save.slot)

    @torch.inference_mode()
    def commit(self, batch: Batch, commits: list[StateCommit]) -> None:
        for layer, state, read in self._read:
            for row, num_tokens, saves in commits:
                step = batch.states[row]
                first = int(batch.token_starts[row]) + step.certain
                _advance(layer, state, read[first : first + num_tokens], step.slot, saves)


def _advance(layer: RecurrentLayer, state: LayerState, read: Tensor, slot: int, saves: Sequence[Save]) -> Tensor:
    """Advances the state in a slot by tokens, and saves it on the way. Returns what ``layer.output`` reads."""
    row = LayerState(*(part[slot].unsqueeze(0) for part in state))
    parts, begin = [], 0
    for end, to in (*saves, Save(len(read), NO_SLOT)):
        if end > begin:
            parts.append(layer.advance(read[begin:end].unsqueeze(0), row)[0])
            begin = end
        if to != NO_SLOT:
            _copy(state, slot, to)
    return torch.cat(parts)


def _copy(state: LayerState, source: int, slot: int) -> None:
    for part in state:
        part[slot] = part[source]
