"""Random adapters in peft's layout, and what merging them into a model's weights gives."""

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(
    path: Path,
    module: Any,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    modules: Iterable[str] = MODULES,
    layers: Iterable[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes an adapter for transformers' ``module``. ``config`` has further fields of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in linears(module, modules, layers):
        rows, columns = linear.weight.shape
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none",
        "target_modules": list(modules), "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "base_model_name_or_path": "somewhere", "lora_dropout": 0.1, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return path


def linears(module: Any, modules: Iterable[str], layers: Iterable[int] | None = None) -> list[tuple[str, Any]]:
    """The linears of the layers with these names, or of all layers."""
    found = []
    for name, linear in module.named_modules():
        parts = name.split(".")
        if parts[-1] in modules and (layers is None or int(parts[parts.index("layers") + 1]) in set(layers)):
            found.append((name, linear))
    return found


def merge(model: Any, path: Path) -> Any:
    """The model with the adapter merged into its weights by the published formula, W + alpha / r B A, or with rslora
    W + alpha / sqrt(r) B A. That is what peft's ``merge_and_unload`` computes; peft itself needs accelerate, which is
    too much for one sum."""
    from safetensors.torch import load_file

    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    merged = copy.deepcopy(model.module)
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    with torch.no_grad():
        for name, linear in linears(merged, MODULES):
            prefix = f"base_model.model.{name}.lora_"
            if f"{prefix}A.weight" in tensors:
                a, b = (tensors[f"{prefix}{half}.weight"].float() for half in "AB")
                linear.weight += scale * b @ a
    return type(model)(model.path, merged)


@pytest.fixture(scope="session")
def write_adapter() -> Callable[..., Path]:
    """``write`` for test modules."""
    return write


@pytest.fixture(scope="session")
def merged() -> Callable[..., Any]:
    """``merge`` for test modules."""
    return merge
