"""Adapters for models with latent attention or recurrent layers: their ordinary linears have adapters, and those for
others are refused by name."""

from typing import Any

import pytest
import torch

from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.lora.adapter import AdaptedLinear, adapted_linears, read_adapter
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 12
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
HYBRIDS = {
    "qwen3.5": ("Qwen3_5TextConfig", DELTA_NET),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "falcon-h1": (
        "FalconH1Config",
        {
            "mamba_n_heads": 4,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "mlp_multipliers": [1.5, 0.7],
        },
    ),
}
MLP = ("gate_proj", "up_proj", "down_proj")
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "deepseek-v2": ({"modules": ("o_proj",)}, {"modules": ("o_proj", *MLP), "layers": (0,), "rank": 3}),
    "qwen3.5": ({"modules": ("k_proj", "v_proj", "o_proj", *MLP)}, {"modules": ("v_proj", "up_proj"), "rank": 3}),
    "lfm2": ({"modules": ("q_proj", "k_proj", "v_proj")}, {"modules": ("q_proj",), "rank": 3}),
    "falcon-h1": ({}, {"modules": ("v_proj", "down_proj"), "rank": 3}),
}
"""Two adapters for each model."""


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.soak)])
def backend(request):
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    if request.param == "cuda":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture(scope="module")
def model_of(tiny_model, build_model, tmp_path_factory):
    """The model with a name; each is made once."""
    made = {}

    def model_of(name):
        if name not in HYBRIDS:
            return tiny_model(name)
        if name not in made:
            made[name] = build_model(tmp_path_factory.mktemp(name), *HYBRIDS[name])
        return made[name]

    return model_of


@pytest.mark.parametrize("name", KINDS)
async def test_rows_with_adapters_and_of_the_base_equal_merged_weights(
    name, backend, model_of, write_adapter, merged, in_process, start_engine, prompts, tmp_path
):
    """The second round begins with cached blocks, and with states that were saved for the same adapter."""
    if backend == "cuda" and name not in HYBRIDS:
        pytest.skip("the backend has no latent attention")
    model = model_of(name)
    paths = [write_adapter(tmp_path / f"{n}", model.module, seed=n, **kind) for n, kind in enumerate(KINDS[name])]
    engine = await start_engine(in_process(model.path, backend=backend, max_loras=2, max_lora_rank=4))
    adapters = [await engine.engine.adapters.load(path.name, str(path)) for path in paths]
    models = [model, *(merged(model, path) for path in paths)]
    for _ in range(2):
        answers = [
            [engine.submit(prompt, GREEDY, NUM_TOKENS, adapter=adapter) for adapter in (None, *adapters)]
            for prompt in (prompts[1], prompts[-1])
        ]
        await engine.finish([answer for of_prompt in answers for answer in of_prompt])
        for prompt, of_prompt in zip((prompts[1], prompts[-1]), answers, strict=True):
            for each, answer in zip(models, of_prompt, strict=True):
                logits = each.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
                assert answer.token_ids == logits.argmax(-1).tolist()
            assert len({tuple(answer.token_ids) for answer in of_prompt}) == 3, "adapters change the output"
    assert all(answer.finished.usage.cached_tokens >= 64 for answer in answers[1])


@pytest.mark.parametrize(
    ("name", "attention"),
    [("deepseek-v2", "latent attention"), ("qwen3.5", "gated attention")],
)
def test_queries_that_are_no_ordinary_linear_are_refused(name, attention, model_of, write_adapter, tmp_path):
    model = model_of(name)
    path = write_adapter(tmp_path / "queries", model.module, modules=("q_proj",))
    with pytest.raises(ModelError, match=rf"q_proj, and adapters for q_proj of {attention} are not supported"):
        read_adapter(path, check_checkpoint(model.path).spec, 8)


@pytest.mark.parametrize(
    ("name", "module"),
    [("deepseek-v2", "kv_a_proj_with_mqa"), ("deepseek-v3", "q_b_proj"), ("qwen3.5", "out_proj"), ("lfm2", "in_proj")],
)
def test_linears_of_no_ordinary_layer_are_refused(name, module, model_of, write_adapter, tmp_path):
    model = model_of(name)
    path = write_adapter(tmp_path / "other", model.module, modules=(module,))
    with pytest.raises(ModelError, match=rf"{module}\.lora_A\.weight is not supported: adapters may change q_proj, "):
        read_adapter(path, check_checkpoint(model.path).spec, 8)


def test_the_linears_that_may_be_adapted(model_of):
    """Layers with a recurrent mixer or with experts have fewer."""
    hybrid = adapted_linears(check_checkpoint(model_of("qwen3.5").path).spec)
    assert {linear.module for linear in hybrid if linear.layer == 0} == set(MLP)
    assert {linear.module for linear in hybrid if linear.layer == 1} == {"k_proj", "v_proj", "o_proj", *MLP}
    latent = adapted_linears(check_checkpoint(model_of("deepseek-v2").path).spec)
    assert {linear.module for linear in latent if linear.layer == 0} == {"o_proj", *MLP}
    assert latent[AdaptedLinear(1, "o_proj")] == (64, 4 * 20)
    assert torch.Size(latent[AdaptedLinear(0, "down_proj")]) == (64, 96)
