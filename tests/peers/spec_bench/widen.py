"""The demo model at a real model's cost: the same function, in about 1.2 GB of weights that every step reads."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model

SEED = 0
NAMES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True)
class Sizes:
    """Of the wide model. The demo model's layers come first; those behind them add nothing to what they are given."""

    num_hidden_layers: int = 28
    intermediate_size: int = 27_648


def widen(folder: Path, sizes: Sizes | None = None) -> int:
    """Writes the wide model, the weights last; returns the bytes of its weights."""
    sizes, demo = sizes or Sizes(), resolve_model(DEMO)
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        shutil.copy(demo / name, folder / name)
    config: dict[str, Any] = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **asdict(sizes)}, indent=1))
    weights = load_file(demo / "model.safetensors")
    random = torch.Generator().manual_seed(SEED)
    wide = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.")}
    for layer in range(sizes.num_hidden_layers):
        source = min(layer, config["num_hidden_layers"] - 1)
        is_new = layer != source
        for name in [name for name in weights if name.startswith(f"model.layers.{source}.")]:
            part = name.removeprefix(f"model.layers.{source}.")
            wide[f"model.layers.{layer}.{part}"] = widened(part, weights[name], is_new, sizes, random)
    num_bytes = sum(tensor.nbytes for tensor in wide.values())
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    return num_bytes


def widened(part: str, tensor: torch.Tensor, is_new: bool, sizes: Sizes, random: torch.Generator) -> torch.Tensor:
    """A tensor of a layer: what a new layer projects out is zero, and so is what an old one's new columns do."""
    if is_new and part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensor = torch.zeros_like(tensor)
    more = sizes.intermediate_size
    if part == "mlp.down_proj.weight":
        return torch.cat((tensor, tensor.new_zeros(len(tensor), more - tensor.shape[1])), dim=1)
    if part in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
        added = 0.05 * torch.randn(more - len(tensor), tensor.shape[1], generator=random)
        return torch.cat((tensor, added.to(tensor.dtype)))
    return tensor.clone()
