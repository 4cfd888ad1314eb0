"""Turns a checkpoint of gpt-oss into one in MXFP4, as it is published."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES

FLOAT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""What stays as it is."""


def turn_to_mxfp4(path: Path) -> None:
    """Rewrites ``model.safetensors`` and ``config.json`` of a model in floats."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        parts = [_packed(weight) for weight in tensors.pop(name)]
        for part, kind in zip(zip(*parts, strict=True), ("blocks", "scales"), strict=True):
            tensors[f"{name}_{kind}"] = torch.stack(part)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": FLOAT}
    (path / "config.json").write_text(json.dumps(config))


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An expert's matrix (in, out) to blocks (out, groups, 16) and scales (out, groups)."""
    groups = weight.T.reshape(weight.shape[1], -1, 32).float()
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1).int())
    codes = (scaled.unsqueeze(-1) - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
