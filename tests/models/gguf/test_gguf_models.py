"""Models in GGUF files give the tokens of transformers' model with the same weights."""

import pytest
from model_files.gguf_files import write_gguf

NAMES = (
    "arcee", "cohere", "cohere2", "deepseek-v2", "deepseek-v3", "dots1", "ernie", "exaone4", "falcon40b", "falcon7b",
    "gemma1", "gemma2", "gemma3", "gemma4-experts", "gemma4-inputs", "glm", "glm4", "glm4-moe", "gpt-neox",
    "gpt-neox-serial", "gpt-oss", "gpt2", "granite", "granite-hybrid", "granite-hybrid-experts", "granite-moe",
    "hunyuan", "hunyuan-moe", "lfm2", "lfm2-moe", "llama", "llama-rope-linear", "llama-rope-llama3-head80",
    "llama-rope-yarn", "llama-tied-biases-head24", "llama4", "llama4-two-experts", "minimax-m2", "ministral3",
    "mixtral", "nemotron", "olmo1", "olmo2", "olmo3", "olmoe", "phi", "phi3-longrope", "phi3-partial-rotary",
    "qwen2-moe", "qwen2-tied", "qwen3", "qwen3-moe", "qwen3-next", "seed-oss", "smollm3", "stablelm",
    "stablelm-parallel", "starcoder2",
)  # fmt: skip
OTHER_FAMILIES = {
    "EXAONE": "mistral-no-window", "INTERNLM2": "llama", "MISTRAL3": "llama", "QWEN2VL": "qwen2-tied",
    "QWEN3VL": "qwen3", "QWEN3VLMOE": "qwen3-moe",
}  # fmt: skip
"""Families, by the library's names, whose text model is that of another family with the same weights."""


@pytest.mark.parametrize("variant", NAMES)
async def test_greedy_output_equals_that_of_transformers(variant, model_of, check_output, tmp_path):
    model = model_of(variant)
    await check_output(model, write_gguf(tmp_path / "model.gguf", model.module))


@pytest.mark.parametrize("kind", OTHER_FAMILIES)
async def test_families_with_the_weights_of_others(kind, model_of, check_output, tmp_path):
    model = model_of(OTHER_FAMILIES[kind])
    await check_output(model, write_gguf(tmp_path / "model.gguf", model.module, kind=kind))
