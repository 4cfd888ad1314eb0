"""Logits of classification heads equal those of transformers, however texts are batched, cut and cached."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.backends.cpu import model as cpu_model
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.classification_head import ClassificationHead, head_of_tokens, read_head
from penstock.scheduler.plan import Pooling

pytestmark = pytest.mark.usefixtures("cpu_library")

BACKENDS = ["reference", "cpu"]
BATCHES = [1, 2, 7, 32]
VARIANTS = json.loads((Path(__file__).parents[1] / "variants.json").read_text())
USUAL = ["llama", "qwen2-tied", "qwen3", "gemma2", "gemma3", "qwen3-moe", "phi"]
"""Among them soft caps, windows, experts, and biases with layer norms."""
OTHERS = [
    "arcee", "exaone4", "falcon7b", "gemma1", "glm4", "gpt-neox", "gpt-oss", "gpt2", "hunyuan", "ministral3",
    "mistral-window9", "mixtral", "nemotron", "olmo2", "opt", "phi3-partial-rotary", "qwen2-moe", "seed-oss", "smollm3",
    "stablelm", "starcoder2",
]  # fmt: skip
"""More families with such a class in transformers."""
HEADS = [pytest.param(name, marks=() if name in USUAL else pytest.mark.soak) for name in USUAL + OTHERS]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, build_model: Any) -> Any:
    """The model of a variant's name with a head of three labels; each is made once."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            config = VARIANTS[name]["changes"] | {"num_labels": 3}
            made[name] = build_model(path, VARIANTS[name]["config"], config, head="SequenceClassification")
        return made[name]

    return get


@pytest.fixture
def texts(prompts: list[list[int]]) -> list[list[int]]:
    """32 prompts of 1 to 75 tokens; some begin alike."""
    return [[*prompt[:-1], (prompt[-1] + turn) % 160] for turn in range(4) for prompt in prompts]


def head_of(path: Path) -> ClassificationHead:
    info = check_checkpoint(path)
    assert info.classifier is not None
    return read_head(info.classifier, info.spec.hidden_size)


def wanted(module: Any, texts: list[list[int]]) -> np.ndarray:
    with torch.inference_mode():
        return np.stack([module(torch.tensor([text])).logits[0].numpy() for text in texts])


async def logits(engine: Any, head: ClassificationHead, texts: list[list[int]]) -> np.ndarray:
    vectors = engine.submit_pooled(texts, Pooling.LAST)
    await engine.engine.wait_idle()
    return np.stack([np.frombuffer(head.logits(vector.tobytes()), np.float32) for vector in vectors.arrays()])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HEADS)
async def test_logits_equal_transformers(
    name: str, backend: str, classifier: Any, in_process: Any, start_engine: Any, texts: Any, monkeypatch: Any
) -> None:
    """At every size of a batch, in chunks, and with the prefix cache, which changes no bit on the CPU."""
    monkeypatch.setattr(cpu_model, "SMALL_STEP", 0)
    model = classifier(name)
    head, oracle = head_of(model.path), wanted(model.module, texts)
    executor = in_process(model.path, num_blocks=160, backend=backend, num_threads=2, max_model_len=128)
    engine = await start_engine(executor, max_num_batched_tokens=48)
    found = {}
    for size in BATCHES:
        found[size] = await logits(engine, head, texts[:size])
        np.testing.assert_allclose(found[size], oracle[:size], rtol=1e-4, atol=2e-4)
    assert any(added.num_computed for plan in executor.plans for added in plan.added), "the cache was never read"
    assert any(len(plan.added) > 4 for plan in executor.plans), "never batched"
    if backend == "cpu":
        assert all((found[size] == found[32][:size]).all() for size in BATCHES)


async def test_a_model_that_also_sees_images(
    tmp_path: Path, build_model: Any, in_process: Any, start_engine: Any, prompts: Any
) -> None:
    """Its head is on the whole model, and the rest in the language model."""
    text: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 24,
    }
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9, "initializer_range": 0.2}
    eyes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes = {
        "text_config": text | {"pad_token_id": None},
        "vision_config": eyes | {"image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
        "num_labels": 3,
    }
    model = build_model(tmp_path, "Gemma3Config", changes, head="SequenceClassification")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma3ForSequenceClassification"]
    engine = await start_engine(in_process(tmp_path, backend="cpu", max_model_len=128))
    found = await logits(engine, head_of(tmp_path), prompts)
    np.testing.assert_allclose(found, wanted(model.module, prompts), rtol=1e-4, atol=2e-4)


async def test_the_backend_transformers(classifier: Any, in_process: Any, start_engine: Any, texts: Any) -> None:
    model = classifier("qwen3")
    engine = await start_engine(in_process(model.path, num_blocks=64, backend="transformers", max_model_len=128))
    found = await logits(engine, head_of(model.path), texts[:7])
    np.testing.assert_allclose(found, wanted(model.module, texts[:7]), rtol=1e-4, atol=2e-4)


async def test_padding_does_not_count_as_in_transformers(
    tmp_path: Path, build_model: Any, in_process: Any, start_engine: Any, prompts: Any
) -> None:
    """A text may end with the token that is also padding; then the last other one counts."""
    config = VARIANTS["qwen3"]["changes"] | {"pad_token_id": 9, "num_labels": 1}
    model = build_model(tmp_path, "Qwen3Config", config, head="SequenceClassification")
    texts = [[*prompt, 9, 9] for prompt in prompts[:4]] + [[9, 9, 9], [9, 5]]
    head = head_of(tmp_path)
    engine = await start_engine(in_process(tmp_path, backend="cpu", max_model_len=128))
    cut = [head.last_counted(text) for text in texts]
    assert cut == [*prompts[:4], [9], [9, 5]]
    np.testing.assert_allclose(await logits(engine, head, cut), wanted(model.module, texts), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen2-tied", "cohere", "phi"])
async def test_the_head_of_two_tokens_is_their_softmax(
    name: str, tmp_path: Path, build_model: Any, in_process: Any, start_engine: Any, prompts: Any
) -> None:
    """With and without an output head of its own, with a factor of logits, and with a bias."""
    model = build_model(tmp_path, VARIANTS[name]["config"], VARIANTS[name]["changes"])
    head = head_of_tokens(check_checkpoint(tmp_path), (11, 47), ("no", "yes"))
    assert head.labels == ("yes",)
    engine = await start_engine(in_process(tmp_path, backend="cpu", max_model_len=128))
    for found, prompt in zip(await logits(engine, head, prompts), prompts, strict=True):
        chances = model.logits(prompt)[-1][[11, 47]].softmax(-1)
        assert head.values(found.tobytes(), use_activation=True) == pytest.approx([chances[1].item()], abs=1e-4)
