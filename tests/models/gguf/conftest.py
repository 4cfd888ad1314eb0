"""Models that can be written as GGUF files, and a check of a file's output."""

import json
from pathlib import Path

import pytest
import torch

from penstock.scheduler.plan import SamplingParams

VARIANTS = json.loads((Path(__file__).parents[1] / "variants.json").read_text())
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 12
TOLERANCE = 1e-4


WITHOUT = {
    "dots1": {"sliding_window": None, "layer_types": None},
    "glm": {"head_dim": 16},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24},
    "gpt-oss": {"swiglu_limit": 7.0},
    "llama4": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0],
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    "llama4-two-experts": {
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "use_qk_norm": True,
    },
    "mixtral": {"sliding_window": None},
    "qwen2-moe": {"mlp_only_layers": []},
    "qwen2-tied": {"sliding_window": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "starcoder2": {"sliding_window": None},
}
"""The fields of a variant that the format cannot express."""


@pytest.fixture(params=["reference", pytest.param("cpu", marks=pytest.mark.soak)])
def backend(request):
    """Each backend that runs on a CPU, in turn. They share the code that reads files, so only the long tests use the
    second."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    return request.param


@pytest.fixture(scope="module")
def model_of(build_model, tmp_path_factory):
    """Returns a model of a variant, without the fields that the format cannot express."""
    made = {}

    def get(variant):
        if variant not in made:
            config, changes = VARIANTS[variant]["config"], VARIANTS[variant]["changes"]
            made[variant] = build_model(tmp_path_factory.mktemp(variant), config, changes | WITHOUT.get(variant, {}))
        return made[variant]

    return get


@pytest.fixture
def check_output(backend, in_process, start_engine, prompts):
    """Checks that the greedy output of a file is that of transformers' model."""

    async def check(model, file):
        engine = await start_engine(in_process(file, backend=backend), enable_prefix_caching=False)
        answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
            assert answer.token_ids == logits.argmax(-1).tolist()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=TOLERANCE, rtol=0)

    return check
