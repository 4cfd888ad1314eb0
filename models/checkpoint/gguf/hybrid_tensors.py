"""The names and layouts that GGUF files have for the tensors of recurrent layers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.recurrent import (
    GatedDeltaNet,
    Mamba2,
    RecurrentMixer,
    ShortConvolution,
    mixer_tensors,
)
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.ggml import BLOCKS
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.gguf.header import GgufHeader

_CONVOLUTION = {f"shortconv.{name}.weight": f"conv.{name}.weight" for name in ("conv", "in_proj", "out_proj")}
_DELTA_NET = {
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_MAMBA2 = {
    "ssm_a": "mamba.A_log",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_in.bias": "mamba.in_proj.bias",
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.bias": "mamba.out_proj.bias",
    "ssm_out.weight": "mamba.out_proj.weight",
}


def as_in_file(spec: ModelSpec, header: GgufHeader) -> ModelSpec:
    """Returns the model as its GGUF file has it: with the ones added to the weights of norms, the rates of decay in
    place of their logarithms, and latent attention's keys and values apart, except in old files."""
    latent = spec.latent
    if latent is not None:
        latent = replace(latent, splits_kv="blk.0.attn_k_b.weight" in header.tensors)
    mixers = (
        replace(mixer, has_rates=True) if isinstance(mixer, GatedDeltaNet | Mamba2) else mixer
        for mixer in spec.recurrent
    )
    return replace(spec, norm_offset=0.0, recurrent=tuple(mixers), latent=latent)


def mixer_parts(
    name: str, entry: TensorEntry, mixer: RecurrentMixer, hidden_size: int
) -> Iterator[tuple[str, TensorEntry]]:
    """Yields the tensors of a recurrent mixer, by their names in a layer, that a tensor of the file consists of; none
    if it belongs to something else."""
    if name == "ssm_ba.weight" and isinstance(mixer, GatedDeltaNet):
        heads = np.arange(2 * mixer.num_value_heads).reshape(mixer.num_key_heads, 2, -1)
        for part, rows in {"b": heads[:, 0], "a": heads[:, 1]}.items():
            yield f"linear_attn.in_proj_{part}.weight", taken(entry, rows)
        return
    names: Mapping[str, str]
    match mixer:
        case ShortConvolution():
            names = _CONVOLUTION
        case GatedDeltaNet():
            names = _DELTA_NET
        case Mamba2():
            names = _MAMBA2
    if (found := names.get(name)) is None:
        return
    shape = dict(mixer_tensors(mixer, hidden_size)).get(found)
    # Dimensions of size one are in other places, and groups of a norm are rows.
    if shape is not None and entry.dtype not in BLOCKS and np.prod(shape) == np.prod(entry.shape):
        entry = replace(entry, shape=shape)
    yield found, entry


def taken(entry: TensorEntry, rows: NDArray[np.int64]) -> TensorEntry:
    """Returns the tensor of these rows of another."""
    return replace(entry, shape=(rows.size, *entry.shape[1:]), rows=rows.reshape(-1))
