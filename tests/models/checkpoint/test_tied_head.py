"""An output head beside tie_word_embeddings: it is used where it differs from the embedding, as in transformers."""

import shutil
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.models.backends.base import load_backend
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.checkpoint import checkpoint
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def with_tensors(tiny_model, tmp_path, edit_config):
    """A copy of a tied model whose tensors ``edit`` changed."""

    def make(edit, variant="qwen2-tied", **changes):
        path = shutil.copytree(tiny_model(variant).path, tmp_path / "edited")
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        edit_config(path, tie_word_embeddings=True, **changes)
        return path

    return make


def other_head(tensors):
    tensors[HEAD] = tensors[EMBEDDING].flip(0).clone()


def differs_at_the_end(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 0.5


def same_head(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()


def head_alone(tensors):
    tensors[HEAD] = tensors.pop(EMBEDDING)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("edit", "variant", "is_tied"),
    [
        (other_head, "qwen2-tied", False),
        (other_head, "gemma3", False),
        (differs_at_the_end, "qwen2-tied", False),
        (same_head, "qwen2-tied", True),
        (head_alone, "qwen2-tied", True),
        (lambda tensors: None, "qwen2-tied", True),
    ],
)
async def test_the_head_is_that_of_transformers(
    with_tensors, in_process, start_engine, prompts, request, monkeypatch, backend, edit, variant, is_tied
):
    if backend == "cpu":
        request.getfixturevalue("cpu_library")
    monkeypatch.setattr(checkpoint, "_COMPARED_BYTES", 1000)  # the tensors have more
    path = with_tensors(edit, variant)
    info = check_checkpoint(path)
    assert info.spec.tied_embeddings == is_tied
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    assert (oracle.lm_head.weight is oracle.get_input_embeddings().weight) == is_tied
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([prompts[4]])).logits[0].log_softmax(-1)
    engine = await start_engine(in_process(path, backend=backend))
    [answer] = await engine.run([prompts[4]], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = [value for part in answer.prompt_logprobs for value in part.logprobs.chosen]
    chosen = expected[:-1].gather(1, torch.tensor(prompts[4][1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(got), chosen, atol=1e-4, rtol=0)


def test_a_head_that_contradicts_the_flag_is_logged(with_tensors, worker_config, caplog):
    path = with_tensors(other_head)
    load_backend(worker_config(path))
    [record] = [record for record in caplog.records if "tie_word_embeddings" in record.message]
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"{path / 'config.json'}: tie_word_embeddings is true, but {HEAD} differs")
    load_backend(worker_config(path, load_format="dummy"))
    assert len([record for record in caplog.records if "tie_word_embeddings" in record.message]) == 1


def test_a_head_that_equals_the_embedding_is_neither_logged_nor_loaded_twice(with_tensors):
    info = check_checkpoint(with_tensors(same_head))
    assert info.warnings == ()
    assert HEAD not in info.tensors


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_has_its_part_of_the_head(with_tensors, ranks, size):
    path = with_tensors(other_head)
    info = check_checkpoint(path)
    parts: list[Any] = [
        load_weights(info, torch.float32, torch.device("cpu"), "auto", 160, rank).head for rank in ranks(size)
    ]
    assert torch.equal(torch.cat([part.weight for part in parts]), load_file(path / "model.safetensors")[HEAD][:160])


@pytest.fixture
def ranks():
    class Rank:
        def __init__(self, rank, size):
            self.rank, self.size = rank, size

    return lambda size: [Rank(rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.update({HEAD: t[EMBEDDING][:-1].clone()}), rf"{HEAD} has the shape"),
        (lambda t: t.update({HEAD: t[EMBEDDING].clone(), "lm_head.bias": torch.zeros(3)}), r"lm_head\.bias has no pla"),
        (lambda t: t.update({HEAD: t[EMBEDDING].to(torch.int32)}), rf"{HEAD} has dtype I32"),
        (lambda t: t.pop(EMBEDDING), rf"{EMBEDDING} is missing"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(with_tensors, edit, says):
    with pytest.raises(ModelError, match=says):
        check_checkpoint(with_tensors(edit))


def test_a_quantised_head_is_used(with_tensors):
    """Quantised as its own matrix, it cannot be the embedding."""
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["model"]}

    def quantise(tensors):
        rows, columns = tensors[EMBEDDING].shape
        tensors["lm_head.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors["lm_head.qzeros"] = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
        tensors["lm_head.scales"] = torch.ones(columns // 32, rows)

    info = check_checkpoint(with_tensors(quantise, quantization_config=method))
    assert not info.spec.tied_embeddings
    assert "lm_head" in info.quantized
