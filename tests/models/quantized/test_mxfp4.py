"""gpt-oss as it is published, with experts in MXFP4: read, multiplied out and served. transformers' own functions say
what the weights are."""

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_files.mxfp4_files import turn_to_mxfp4
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.models.backends.base import load_backend
from penstock.models.backends.tensor_parallel import ALONE
from penstock.models.backends.torch_common.fp4_experts import Fp4Experts, has_fp4_experts
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

NUM_TOKENS = 16
EXPERTS = "model.layers.0.mlp.experts."


@dataclass
class Published:
    """A checkpoint in MXFP4, and transformers' model with the weights multiplied out."""

    path: Path
    module: Any


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny_model):
    """Columns are no multiple of what kernels read at a time."""
    path = tmp_path_factory.mktemp("mxfp4")
    tiny_model("gpt-oss").module.save_pretrained(path)
    turn_to_mxfp4(path)
    module = copy.deepcopy(tiny_model("gpt-oss").module)
    tensors = load_file(path / "model.safetensors")
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            values = convert_moe_packed_tensors(blocks, tensors[f"{weight}_scales"], dtype=torch.float32)
            module.get_parameter(weight).data = values
    return Published(path, module)


def stored_experts(module: Any) -> dict[str, torch.Tensor]:
    """The experts' matrices, (out, in), by the names that they have here."""
    found = {}
    for index, layer in enumerate(module.model.layers):
        both, down = layer.mlp.experts.gate_up_proj.detach(), layer.mlp.experts.down_proj.detach()
        for expert in range(len(both)):
            name = f"model.layers.{index}.mlp.experts.{expert}."
            found[f"{name}gate_proj"], found[f"{name}up_proj"] = both[expert].T[0::2], both[expert].T[1::2]
            found[f"{name}down_proj"] = down[expert].T
    return found


def test_weights_are_what_transformers_makes_of_them(published):
    info = check_checkpoint(published.path)
    assert info.choose_quantization("none") == info.choose_quantization("mxfp4") == "mxfp4"
    expected = stored_experts(published.module)
    assert info.quantized.keys() == expected.keys()
    for name, weight in expected.items():
        matrix = read_matrix(info.quantized[name])
        assert (matrix.scheme.bits, matrix.scheme.is_float, matrix.scheme.group) == (4, True, 32)
        torch.testing.assert_close(torch.from_numpy(matrix.dequantized()), weight, rtol=0, atol=0)


def test_every_byte_and_scale_is_transformers(copied):
    """All codes, and scales from the smallest to the largest."""
    scales = torch.arange(5 * 192 * 2).remainder(250).to(torch.uint8).view(5, 192, 2)
    blocks = torch.arange(5 * 192 * 2 * 16).to(torch.uint8).view(5, 192, 2, 16)
    damaged(copied, gate_up_proj_blocks=lambda _: blocks, gate_up_proj_scales=lambda _: scales)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    info = check_checkpoint(copied)
    for expert in range(5):
        for half, name in enumerate(("gate_proj", "up_proj")):
            made = read_matrix(info.quantized[f"{EXPERTS}{expert}.{name}"]).dequantized()
            np.testing.assert_array_equal(made, expected[expert].T[half::2])


async def test_greedy_output_is_that_of_transformers(published, in_process, start_engine, prompts):
    engine = await start_engine(in_process(published.path, backend="reference"))
    assert engine.engine.facts.quantization == "mxfp4"
    answers = await engine.run(prompts[2::3], SamplingParams(temperature=0.0), NUM_TOKENS)
    for prompt, answer in zip(prompts[2::3], answers, strict=True):
        assert answer.token_ids == greedy(published, prompt, answer)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What is left of inputs in bytes, with a scale for 32 columns of a token."""
    groups = x.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    result: torch.Tensor = ((groups * (127 / most)).round() * (most / 127)).flatten(-2)
    return result


@pytest.fixture
def rounding(published):
    """transformers' model with inputs of the experts' products rounded as the CPU library rounds them."""
    module = copy.deepcopy(published.module)
    for layer in module.model.layers:
        experts = layer.mlp.experts
        experts.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
        experts._apply_gate = lambda gate_up, gate=experts._apply_gate: rounded(gate(gate_up))
    return module


@pytest.mark.usefixtures("cpu_library")
async def test_the_cpu_backend_multiplies_codes(published, rounding, in_process, start_engine, prompts):
    """Its experts take as much memory as in the file, except the lines that pad panels. A number halfway between two
    bytes may go either way, which few logits show."""
    engine = await start_engine(in_process(published.path, backend="cpu"))
    facts = engine.engine.facts
    assert facts.quantization == "mxfp4"
    tensors = load_file(published.path / "model.safetensors")
    experts = sum(value.nbytes for name, value in tensors.items() if name.endswith(("_blocks", "_scales")))
    others = sum(value.nbytes for name, value in tensors.items()) - experts
    assert facts.weight_bytes < others + 1.1 * experts
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
    with torch.inference_mode():
        expected = rounding(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    assert (got - chosen).abs().median() < 1e-4


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
async def test_the_cuda_backend_multiplies_codes(published, in_process, start_engine):
    """Where it could not, it would have multiplied the weights out, which are larger."""
    pytest.importorskip("triton", reason="needs Triton, which has wheels only for Linux")
    prompt = [3, 9, 1, 33, 9, 70]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"max_num_seqs": 1, "max_model_len": 32, "num_blocks": 4, "max_num_batched_tokens": 8, "device": device}
    engine = await start_engine(in_process(published.path, backend="cuda", **small))
    facts = engine.engine.facts
    experts = sum(weight.nbytes for weight in stored_experts(published.module).values())
    reference = load_backend(in_process(published.path, backend="reference", **small)._config)
    assert reference.facts.weight_bytes - facts.weight_bytes == experts - experts // 4 * 17 // 32
    [answer] = await engine.run([prompt], SamplingParams(temperature=0.0), 1)
    assert answer.token_ids == greedy(published, prompt, answer)


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, False)])
def test_ranks_keep_codes_if_they_share_whole_groups(published, ranks, fits):
    """96 columns are three groups."""
    assert has_fp4_experts(check_checkpoint(published.path), ranks) is fits


def test_floats_are_no_codes(tiny_model):
    assert not has_fp4_experts(check_checkpoint(tiny_model("gpt-oss").path), 1)
    assert not has_fp4_experts(check_checkpoint(tiny_model("llama").path), 1)


def test_ranks_read_their_parts(published):
    info = check_checkpoint(published.path)
    prefix = EXPERTS.removesuffix("experts.")
    whole = Fp4Experts(info, info.spec, torch.device("cpu"), ALONE)
    assert info.spec.experts is not None
    third = replace(info.spec, experts=replace(info.spec.experts, intermediate_size=32))
    parts = [Fp4Experts(info, third, torch.device("cpu"), SimpleNamespace(rank=rank, size=3)) for rank in range(3)]
    for all_rows, *some in zip(whole.gate_up(prefix), *(part.gate_up(prefix) for part in parts), strict=True):
        halves = [torch.cat([part.unflatten(1, (2, -1))[:, half] for part in some], dim=1) for half in range(2)]
        assert torch.equal(torch.cat(halves, dim=1), all_rows)
    for all_columns, *some in zip(whole.down(prefix), *(part.down(prefix) for part in parts), strict=True):
        assert torch.equal(torch.cat(some, dim=2), all_columns)


def greedy(published: Published, prompt: list[int], answer: Any) -> list[int]:
    """Transformers' choices after the prompt and each of the answer's tokens."""
    with torch.inference_mode():
        logits = published.module(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    found: list[int] = logits.argmax(-1).tolist()
    return found


# ------------------------------------------------------------------------------------------------------------- damages


@pytest.fixture
def copied(published, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(published.path, tmp_path / "model")


def damaged(path: Path, **changes: Callable[[torch.Tensor], torch.Tensor] | None) -> Path:
    """Replaces tensors of the first layer's experts; None removes one."""
    tensors = load_file(path / "model.safetensors")
    for name, change in changes.items():
        if change is None:
            del tensors[EXPERTS + name]
        else:
            tensors[EXPERTS + name] = change(tensors[EXPERTS + name]).contiguous()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up_proj_scales": None}, "tensor {}gate_up_proj_scales is missing, and quantization_config"),
        ({"down_proj_blocks": None}, "tensor {}down_proj_blocks is missing, and quantization_config"),
        ({"down_proj_scales": lambda scales: scales[:, :-1]}, "tensor {}down_proj_scales has the shape [5, 63, 3]"),
        ({"gate_up_proj_blocks": lambda blocks: blocks.flatten(2)}, "tensor {}gate_up_proj_blocks has the shape"),
        ({"down_proj_blocks": lambda blocks: blocks.view(torch.int8)}, "tensor {}down_proj_blocks has dtype I8"),
        ({"down_proj_bias": None}, "down_proj.bias is missing"),
    ],
)
def test_damaged_tensors_are_named(copied, changes, message):
    with pytest.raises(ModelError, match=re.escape(message.format(EXPERTS))) as raised:
        check_checkpoint(damaged(copied, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_scale_that_is_no_number_is_refused(copied, worker_config, backend, cpu_library):
    damaged(copied, down_proj_scales=lambda scales: scales.fill_(255))
    with pytest.raises(ModelError, match=r"a scale of model\.layers\.0\.mlp\.experts\.0\.down_proj is not a number"):
        load_backend(worker_config(copied, backend=backend))


def test_a_copy_in_floats_may_keep_the_config(published, tiny_model, tmp_path):
    tiny_model("gpt-oss").module.save_pretrained(tmp_path)
    shutil.copy(published.path / "config.json", tmp_path)
    info = check_checkpoint(tmp_path)
    assert not info.quantized
    assert info.tensors[f"{EXPERTS}0.gate_proj.weight"].dtype == "F32"
