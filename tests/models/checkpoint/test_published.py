"""Configs of published models, with the fields that matter: each family's number of parameters is that of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.models.architecture.lines import LATENT, PLAIN_ON_CUDA
from penstock.models.architecture.registry import FAMILIES, spec_from_config
from penstock.models.architecture.spec_parts import NormKind, Scoring
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    name: (published["parameters"], published["config"])
    for name, published in json.loads(Path(__file__).with_name("published.json").read_text()).items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    num_parameters, config = PUBLISHED[name]
    assert spec_from_config(config).num_parameters == num_parameters


SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "ffn_dim", "n_embd", "n_layer", "n_head",
}  # fmt: skip
"""Fields that every config has. The last four are other names of them."""
REQUIRED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba"] * 31 + ["attention"]},
}
"""Fields of a family without a default that a model could have."""


@pytest.mark.parametrize("architecture", sorted(FAMILIES.keys() & set(dir(transformers))))
def test_absent_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    required = REQUIRED.get(architecture, {})
    config = getattr(transformers, architecture).config_class(**required)
    whole = {**config.to_dict(), "architectures": [architecture]}
    bare = {name: value for name, value in whole.items() if name in {"architectures", *SIZES, *required}}
    assert spec_from_config(bare) == spec_from_config(whole)


def test_the_matrix_names_what_has_parts_without_kernels_on_cuda(variant_configs: Any) -> None:
    specs = [spec_from_config(config) for config in variant_configs.values()]
    plain = {
        spec.architecture
        for spec in specs
        if spec.latent is not None
        or spec.norm_kind is NormKind.LAYER
        or spec.is_parallel
        or spec.qk_norm_is_last
        or not spec.gated_mlp
        or (spec.experts is not None and spec.experts.scoring is Scoring.SIGMOID)
    }
    named = PLAIN_ON_CUDA & {spec.architecture for spec in specs}
    assert plain == named, "correct PLAIN_ON_CUDA in models/architecture/lines.py"
    latent = {spec.architecture for spec in specs if spec.latent is not None}
    assert latent == LATENT, "correct LATENT in models/architecture/lines.py"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 9}, (None, None)),  # max_window_layers is as published
        ({"sliding_window": 9, "max_window_layers": 1}, (None, 9)),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}, (9, None)),
    ],
)
def test_layers_of_dots1_that_have_a_window(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = PUBLISHED["dots.llm1"][1] | {"num_hidden_layers": 2}
    assert spec_from_config(config | changes).windows == windows


@pytest.mark.parametrize("name", ["n_routed_experts", "n_shared_experts", "num_experts_per_tok"])
def test_numbers_of_experts_that_dots1_has_no_default_for(name: str) -> None:
    config = PUBLISHED["dots.llm1"][1]
    with pytest.raises(ModelError, match=f"{name} is missing"):
        spec_from_config({field: value for field, value in config.items() if field != name})


def test_every_layer_of_solar_open_has_experts() -> None:
    """As in transformers, whose class has neither of these fields."""
    config = PUBLISHED["Solar-Open-100B"][1]
    changed = config | {"first_k_dense_replace": 2, "intermediate_size": 10240}
    assert spec_from_config(changed) == spec_from_config(config)


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [({}, 64), ({"rotary_dim": None}, 128), ({"rope_parameters": {"partial_rotary_factor": 0.25}}, 32)],
)
def test_the_part_of_a_head_that_minimax_m2_rotates(changes: dict[str, Any], rotary_dim: int) -> None:
    assert spec_from_config(PUBLISHED["MiniMax-M2"][1] | changes).rotary_dim == rotary_dim


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe", "minimax-m2"])
def test_layers_that_only_propose_drafts_are_not_loaded(tiny_model: Any, tmp_path: Path, variant: str) -> None:
    """Models may be published with such layers, after those of the decoder."""
    path = tiny_model(variant).path
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(24, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    assert check_checkpoint(tmp_path).tensors.keys() == check_checkpoint(path).tensors.keys()
