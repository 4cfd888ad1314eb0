"""Quantised checkpoints as their own tools write them: read, multiplied out, and served. What is read of AWQ's is
compared with compressed-tensors' converter too."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from safetensors.torch import load_file

from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu.backend import unsupported_reason
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.checkpoint.quantization.scheme import QuantLayout
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

NUM_TOKENS = 16


def test_codes_scales_and_zero_points_are_those_that_were_written(checkpoint):
    info = check_checkpoint(checkpoint.path)
    assert info.quantization is not None
    assert info.quantization.method == checkpoint.method
    assert info.quantized.keys() == checkpoint.linears.keys()
    for name, stored in checkpoint.linears.items():
        matrix = read_matrix(info.quantized[name])
        order = np.arange(stored.codes.shape[1]) if matrix.order is None else matrix.order
        assert matrix.scheme.is_float == checkpoint.is_fp8
        codes = matrix.codes.view(np.int8) if matrix.scheme.layout is QuantLayout.INT8 else matrix.codes
        np.testing.assert_array_equal(codes, stored.codes[:, order])
        np.testing.assert_array_equal(matrix.scales, stored.scales)
        np.testing.assert_array_equal(matrix.zeros, stored.zeros)
        # The columns stand group by group, and those of a group in their own order.
        group = matrix.scheme.group or len(order)
        np.testing.assert_array_equal(stored.groups[order], np.arange(len(order)) // group)
        np.testing.assert_array_equal(order, np.lexsort((np.arange(len(order)), stored.groups)))
        assert (matrix.order is None) == (np.diff(stored.groups) >= 0).all()
        kinds = [array.dtype for array in (matrix.codes, matrix.scales, matrix.zeros)]
        assert kinds == [np.uint8, np.float32, np.float32]
        assert all(array.flags.c_contiguous for array in (matrix.codes, matrix.scales, matrix.zeros))


def test_weights_are_what_their_library_makes_of_them(checkpoint):
    info = check_checkpoint(checkpoint.path)
    for name, stored in checkpoint.linears.items():
        dequantised = read_matrix(info.quantized[name]).dequantized()
        assert dequantised.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(dequantised), stored.weight, rtol=0, atol=0)


async def test_greedy_output_is_that_of_transformers_with_the_same_weights(
    checkpoint, in_process, start_engine, prompts
):
    engine = await start_engine(in_process(checkpoint.path, backend="reference"))
    assert engine.engine.facts.quantization == checkpoint.method
    answers = await engine.run(prompts[2::3], SamplingParams(temperature=0.0), NUM_TOKENS)
    for prompt, answer in zip(prompts[2::3], answers, strict=True):
        with torch.inference_mode():
            logits = checkpoint.module(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("gptq act-order", None),
        ("awq", None),
        ("w4a16 zero points", None),
        ("fp8 blocks, the last ones short", 64),
    ],
)
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.usefixtures("fp8_as_on_a_gpu")
async def test_the_cuda_backend_multiplies_codes(kind, group, checkpoints, in_process, start_engine, narrow_inputs):
    """Where it could not, it would have multiplied the weights out, which are larger. ``group``: of inputs that are
    narrowed; 0: all columns."""
    pytest.importorskip("triton", reason="needs Triton, which has wheels only for Linux")
    checkpoint, prompt = checkpoints(kind), [3, 9, 1, 33, 9, 70]
    module = checkpoint.module
    if group is not None:
        module = copy.deepcopy(module)
        narrow_inputs(module, checkpoint.linears, group)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"max_num_seqs": 2, "max_model_len": 32, "num_blocks": 4, "device": device}
    engine = await start_engine(in_process(checkpoint.path, backend="cuda", **small))
    reference = load_backend(in_process(checkpoint.path, backend="reference", **small)._config)
    assert engine.engine.facts.weight_bytes < reference.facts.weight_bytes
    [answer] = await engine.run([prompt], SamplingParams(temperature=0.0), 2)
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("cpu_library")
async def test_the_cpu_backend_comes_close(checkpoint, in_process, start_engine, worker_config, prompts):
    """It rounds activations to bytes, unless weights are fp8, which it multiplies out; whatever else it did wrong would
    be off by the deviation of the logits, above 2."""
    why_not = unsupported_reason(worker_config(checkpoint.path, backend="cpu"), check_checkpoint(checkpoint.path))
    if why_not is not None:  # the one kind that the next test is about
        assert why_not.startswith("its experts")
        return
    engine = await start_engine(in_process(checkpoint.path, backend="cpu"))
    assert engine.engine.facts.quantization == checkpoint.method
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
    with torch.inference_mode():
        expected = checkpoint.module(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    assert (got - chosen).abs().mean() < (1e-4 if checkpoint.is_fp8 else 0.3)


def test_the_cpu_backend_refuses_experts_whose_inputs_it_cannot_share(checkpoints, worker_config):
    with pytest.raises(ModelError, match="--backend cpu: its experts are quantised differently, or by act-order"):
        load_backend(worker_config(checkpoints("gptq experts").path, backend="cpu"))


@pytest.mark.usefixtures("cpu_library")
def test_the_cpu_backend_refuses_experts_in_orders_that_the_config_denies(checkpoints, worker_config, tmp_path):
    path = shutil.copytree(checkpoints("gptq experts").path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"input orders of their own.*give --backend reference"):
        load_backend(worker_config(path, backend="cpu"))


def test_awq_is_what_the_librarys_converter_makes_of_it(checkpoints):
    made = checkpoints("awq")
    info = check_checkpoint(made.path)
    converted = AutoAWQConverter(group_size=32).process(load_file(made.path / "model.safetensors"))
    for name, linear in info.quantized.items():
        matrix = read_matrix(linear)
        shape = torch.Size(matrix.codes.shape)
        codes = unpack_from_int32(converted[f"{name}.weight_packed"], 4, shape).numpy() + 8
        np.testing.assert_array_equal(matrix.codes, codes)
        packed = converted[f"{name}.weight_zero_point"]
        zeros = unpack_from_int32(packed, 4, torch.Size(matrix.scales.shape), packed_dim=0).numpy() + 8
        np.testing.assert_array_equal(matrix.zeros, zeros)
        np.testing.assert_array_equal(matrix.scales, converted[f"{name}.weight_scale"].float().numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits(compressed, dtype):
    """The library multiplies in the scales' type, and so rounds the product, which is exact here."""
    made = compressed(dtype)
    info = check_checkpoint(made.path)
    assert {entry.dtype for entry in info.tensors.values()} == {"BF16" if dtype is torch.bfloat16 else "F16"}
    for name, stored in made.linears.items():
        matrix = read_matrix(info.quantized[name])
        np.testing.assert_array_equal(matrix.scales, stored.scales)
        torch.testing.assert_close(torch.from_numpy(matrix.dequantized()).to(dtype), stored.weight, rtol=0, atol=0)


def test_what_the_quantiser_skipped_stays_float(checkpoints):
    for kind in ("gptq", "w8a8", "fp8 of transformers", "fp8 of AutoFP8", "fp8 channels"):
        made = checkpoints(kind)
        info = check_checkpoint(made.path)
        assert made.skipped not in info.quantized
        assert info.tensors[f"{made.skipped}.weight"].dtype == "F32"
        assert (made.skipped_silently in info.quantized) == (kind in ("w8a8", "fp8 channels"))
        named = [name for name, _ in info.spec.tensors() if name.removesuffix(".weight") not in info.quantized]
        assert list(info.tensors) == named
