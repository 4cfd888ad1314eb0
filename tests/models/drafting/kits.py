"""What each method of drafting needs to be right now and then about a tiny random model."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from penstock.models.architecture.registry import spec_from_config
from penstock.models.checkpoint.eagle import LAYER_IDS, _published, _spec
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig


def save_twin(path: Path, module: Any, noise: float) -> Path:
    """The same model with weights that are a little off, as a draft model."""
    twin, generator = copy.deepcopy(module), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter += noise * parameter.std(correction=0) * drawn
    twin.save_pretrained(path)
    return path


def save_head(path: Path, target: Path, token_ids: tuple[int, ...]) -> Path:
    """A random EAGLE-3 head for a model of three layers or more, which knows these tokens alone."""
    model = json.loads((target / "config.json").read_text())
    read = transformers.AutoConfig.from_pretrained(target)  # it has other names for some families' fields
    sizes = {name: getattr(read, name) for name in ("hidden_size", "vocab_size", "max_position_embeddings")}
    config = {
        **sizes, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 40,
        "rms_norm_eps": 1e-5, "draft_vocab_size": len(token_ids), LAYER_IDS: [0, 1, 2],
    }  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for name, shape in _spec(config, spec_from_config(model), has_embedding=False).tensors():
        drawn = torch.randn(shape, generator=generator)
        tensors[_published(name)] = drawn / 4 if len(shape) == 2 else 1 + drawn / 3
    tensors["d2t"] = torch.tensor(token_ids) - torch.arange(len(token_ids))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def speculation_of(
    method: DraftMethod, directory: Path, target: Any, token_ids: tuple[int, ...], noise: float = 0.1
) -> SpeculationConfig:
    """A method's config for a ``TinyModel``, up to 8 drafts; what it needs is made in the directory."""
    model = None
    if method is DraftMethod.DRAFT_MODEL:
        model = str(save_twin(directory / "twin", target.module, noise))
    elif method is DraftMethod.EAGLE3:
        model = str(save_head(directory / "head", target.path, token_ids))
    return SpeculationConfig(method, 8, model, suffix_decoding_max_spec_factor=8.0)
