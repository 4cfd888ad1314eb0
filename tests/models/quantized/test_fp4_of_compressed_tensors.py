"""NVFP4 and MXFP4 as compressed-tensors' own compressors write them. The library says what the weights are."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4, QuantizationScheme
from safetensors.torch import load_file, save_file

from penstock.models.backends.cuda.linear import has_products
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.config import quantization_from_config
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nvfp4-pack-quantized": (NVFP4PackedCompressor, NVFP4),
    "mxfp4-pack-quantized": (MXFP4PackedCompressor, MXFP4A16),
}


def compressed(weight: torch.Tensor, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors, and its weight as the library multiplies it out."""
    compressor, preset = FORMS[form]
    scheme = QuantizationScheme(targets=["Linear"], **preset)
    largest = weight.unflatten(1, (-1, scheme.weights.group_size)).abs().amax(-1) / 6
    state = {"weight": weight}
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
        state["weight_scale"] = (largest * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        state["weight_scale"] = 2 ** largest.log2().ceil()
    made = compressor.compress(state, scheme)
    codes = unpack_fp4_from_uint8(made["weight_packed"], *weight.shape, dtype=torch.float32)
    # Not ``decompress``, which rounds products to bfloat16.
    scale = compressor._decompress_scale(made["weight_scale"], torch.float32)
    expanded = dequantize(codes, scale, args=scheme.weights, global_scale=made.get("weight_global_scale"))
    return {name: value.contiguous() for name, value in made.items()}, expanded


@pytest.fixture(scope="module", params=list(FORMS))
def checkpoint(request, tmp_path_factory, tiny_model):
    """The form and the path of a checkpoint, and transformers' model with its weights multiplied out."""
    path, form = tmp_path_factory.mktemp("fp4"), request.param
    tiny_model("qwen3").module.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    dequantised = dict(tensors)
    for name, weight in dequantised.items():
        if weight.ndim == 2 and "layers" in name:
            made, dequantised[name] = compressed(tensors.pop(name), form)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in made.items()}
    save_file(dequantised, path / "model.safetensors", {"format": "pt"})
    module = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    group = json.loads(QuantizationScheme(targets=["Linear"], **FORMS[form][1]).model_dump_json())
    described = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    config["quantization_config"] = {**described, "ignore": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return form, path, module


def test_weights_are_those_of_the_library(checkpoint):
    _, path, module = checkpoint
    info = check_checkpoint(path)
    assert len(info.quantized) == 7 * info.spec.num_layers
    for name, linear in info.quantized.items():
        assert not has_products(linear.scheme)
        expected = module.get_submodule(name).weight.detach().numpy()
        np.testing.assert_allclose(read_matrix(linear).dequantized(), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("cpu_library")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
async def test_logits_are_close_to_those_of_transformers(checkpoint, backend, in_process, start_engine, prompts):
    """The CPU backend keeps MXFP4, whose inputs it rounds to bytes."""
    form, path, module = checkpoint
    engine = await start_engine(in_process(path, backend=backend))
    facts = engine.engine.facts
    assert facts.quantization == "compressed-tensors"
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
    with torch.inference_mode():
        expected = module(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    rounds = backend == "cpu" and form.startswith("mxfp4")
    assert (got - chosen).abs().mean() < (0.1 if rounds else 1e-4)
    assert (facts.weight_bytes < sum(value.nbytes for value in module.state_dict().values()) / 2) == rounds


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("nvfp4-pack-quantized", {"group_size": 32}),
        ("nvfp4-pack-quantized", {"strategy": "group"}),
        ("mxfp4-pack-quantized", {"group_size": 16}),
        ("mxfp4-pack-quantized", {"num_bits": 8}),
    ],
)
def test_other_groups_are_refused(form, changes):
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    if form.startswith("nvfp4"):
        weights |= {"strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    assert quantization_from_config({"quantization_config": config})
    group["weights"] = {**weights, **changes}
    with pytest.raises(ModelError, match=r"config_groups\.group_0\.weights\.(strategy|num_bits) is"):
        quantization_from_config({"quantization_config": config})
