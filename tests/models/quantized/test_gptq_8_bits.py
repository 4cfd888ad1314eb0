"""GPTQ's checkpoints of eight bits, which are dequantised as they are read. compressed-tensors packs the words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from safetensors.torch import load_file, save_file

from penstock.models.backends.base import load_backend
from penstock.models.backends.cuda.linear import has_products
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

FORMS: dict[str, dict[str, Any]] = {
    "as published with Qwen2.5": {"group_size": 32, "sym": True, "desc_act": False},
    "zero points, act-order": {"group_size": 32, "sym": False, "desc_act": True},
    "v2, whole rows": {"group_size": -1, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
}


def quantized(weight: torch.Tensor, form: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors, and its weight multiplied out."""
    rows, columns = weight.shape
    size = form["group_size"] if form["group_size"] > 0 else columns
    groups = torch.arange(columns) // size
    if form["desc_act"]:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    scales = torch.empty(rows, columns // size)
    zeros = torch.full(scales.shape, 128.0)
    for group in range(columns // size):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, group] = (torch.maximum(-low, high) / 127 if form["sym"] else (high - low) / 255).half().float()
        if not form["sym"]:
            # Stored minus one, zero would take one from the next; AutoGPTQ never has it.
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, 255)
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, 255)
    stored = zeros if form.get("checkpoint_format") == "gptq_v2" else zeros - 1
    tensors = {
        "qweight": packed(codes).T.contiguous(),
        "qzeros": packed(stored.T),
        "scales": scales.T.half().contiguous(),
        "g_idx": groups.int(),
    }
    return tensors, (codes - zeros[:, groups]) * scales[:, groups]


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Four codes a word, along the last dimension."""
    words: torch.Tensor = pack_to_int32((codes - 128).to(torch.int8).contiguous(), 8)
    return words


@pytest.fixture(scope="module", params=list(FORMS))
def checkpoint(request, tmp_path_factory, tiny_model):
    """The path of a checkpoint, and transformers' model with its weights multiplied out."""
    path, form = tmp_path_factory.mktemp("gptq8"), FORMS[request.param]
    tiny_model("qwen2-tied").module.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    dequantised = dict(tensors)
    for name, weight in dequantised.items():
        if weight.ndim == 2 and "layers" in name:
            parts, dequantised[name] = quantized(tensors.pop(name), form)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    save_file(dequantised, path / "model.safetensors", {"format": "pt"})
    module = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 8, **form}
    (path / "config.json").write_text(json.dumps(config))
    return path, module


def test_weights_are_those_that_were_written(checkpoint):
    path, module = checkpoint
    info = check_checkpoint(path)
    assert len(info.quantized) == 7 * info.spec.num_layers
    for name, linear in info.quantized.items():
        assert not has_products(linear.scheme)
        expected = module.get_submodule(name).weight.detach().numpy()
        np.testing.assert_array_equal(read_matrix(linear).dequantized(), expected)


@pytest.mark.usefixtures("cpu_library")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
async def test_logits_are_those_of_transformers(checkpoint, backend, in_process, start_engine, prompts):
    path, module = checkpoint
    engine = await start_engine(in_process(path, backend=backend))
    assert engine.engine.facts.quantization == "gptq"
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
    with torch.inference_mode():
        expected = module(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got, chosen, rtol=0, atol=1e-4)


def test_words_of_four_bits_do_not_fit(checkpoint, worker_config, tmp_path):
    path, _ = checkpoint
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["bits"] = 4
    copy: Path = tmp_path / "model"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").symlink_to(path / "model.safetensors")
    with pytest.raises(ModelError, match="qweight has the shape"):
        load_backend(worker_config(copy))
