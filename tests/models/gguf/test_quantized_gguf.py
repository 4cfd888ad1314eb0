"""Quantised tensors of GGUF files: as they are stored where a kernel reads them, else dequantised."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as QuantType, quants
from model_files.gguf_files import write_gguf

from penstock.kernels.cuda.quantized.weights import multiplied_out, pack_int4
from penstock.models.backends.base import load_backend
from penstock.models.backends.cuda.linear import has_products
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.files.ggml import BLOCKS, TYPES, dequantize
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

NUM_TOKENS = 12
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Each backend that runs on a CPU, in turn."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    return request.param


@pytest.fixture(scope="module")
def model(build_model, tmp_path_factory):
    """A Llama whose rows are whole blocks."""
    return build_model(tmp_path_factory.mktemp("model"), "LlamaConfig", SIZES)


def dequantized(model, build_model, path, info):
    """Returns transformers' model with the weights that the file has."""
    copy = build_model(path, "LlamaConfig", SIZES)
    files = TensorFiles(entry.file for entry in info.tensors.values())
    with torch.no_grad():
        for name, parameter in copy.module.named_parameters():
            linear = info.quantized.get(name.removesuffix(".weight"))
            values = files.array(info.tensors[name]) if linear is None else read_matrix(linear).dequantized()
            parameter.copy_(torch.from_numpy(np.array(values)).view_as(parameter))
    return copy


def test_the_sizes_of_types_are_those_of_the_library():
    assert {name: tuple(GGML_QUANT_SIZES[QuantType[name]]) for name in BLOCKS} == BLOCKS
    assert {number: QuantType(number).name for number in TYPES} == TYPES
    generator = np.random.default_rng(1)
    for name, (elements, num_bytes) in BLOCKS.items():
        stored = generator.integers(0, 60, (3, 2 * num_bytes), dtype=np.uint8)
        assert dequantize(stored, name).shape == (3, 2 * elements), name


@pytest.mark.parametrize("dtype", [QuantType.Q4_0, QuantType.Q8_0])
async def test_output_is_that_of_the_dequantised_weights(
    dtype, model, backend, build_model, in_process, start_engine, prompts, tmp_path
):
    file = write_gguf(tmp_path / "model.gguf", model.module, dtype)
    info = check_checkpoint(file)
    assert len(info.quantized) == (15 if dtype is QuantType.Q4_0 else 0)
    assert info.is_eight_bit == (dtype is QuantType.Q8_0)
    expected = dequantized(model, build_model, tmp_path / "dequantized", info)
    engine = await start_engine(in_process(file, backend=backend, max_model_len=256), enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    answers = await engine.run(prompts, sampling, NUM_TOKENS)
    # Inputs of the cpu backend's products have eight bits, and Q8_0 gets the scales of int8.
    tolerance = 1e-4 if backend == "reference" else 0.15
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = expected.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=tolerance, rtol=0)
        if backend == "reference":
            assert answer.token_ids == logits.argmax(-1).tolist()


def test_q4_0_runs_as_it_is(model, worker_config, tmp_path, cpu_library):
    file = write_gguf(tmp_path / "model.gguf", model.module, QuantType.Q4_0)
    assert load_backend(worker_config(file, backend="cpu")).facts.quantization == "gguf"
    with pytest.raises(ModelError, match="--quantization int8: the checkpoint is quantised already, by gguf"):
        load_backend(worker_config(file, backend="cpu", quantization="int8"))


def test_codes_and_scales_of_q4_0_are_those_of_the_file(model, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", model.module, QuantType.Q4_0)
    info = check_checkpoint(file)
    name = "model.layers.1.mlp.down_proj"
    weight = model.module.get_parameter(f"{name}.weight").detach().numpy()
    stored = quants.quantize(weight, QuantType.Q4_0)
    matrix = read_matrix(info.quantized[name])
    assert (matrix.scheme.bits, matrix.scheme.group) == (4, 32)
    np.testing.assert_array_equal(matrix.dequantized(), quants.dequantize(stored, QuantType.Q4_0))


def test_the_cuda_backend_packs_q4_0_as_it_is(model, tmp_path):
    info = check_checkpoint(write_gguf(tmp_path / "model.gguf", model.module, QuantType.Q4_0))
    linear = info.quantized["model.layers.0.self_attn.q_proj"]
    assert has_products(linear.scheme)
    matrix = read_matrix(linear)
    codes, scales, zeros = (torch.from_numpy(part) for part in (matrix.codes, matrix.scales, matrix.zeros))
    packed = pack_int4(codes, scales, zeros, group=matrix.scheme.group, order=None)
    np.testing.assert_array_equal(multiplied_out(packed, 0, linear.rows).numpy(), matrix.dequantized())


def test_q8_0_is_int8_on_the_cpu_backend(model, worker_config, tmp_path, cpu_library, caplog):
    """A scale for each row in place of one for 32 columns adds an error as small as that of Q8_0 itself."""
    file = write_gguf(tmp_path / "model.gguf", model.module, QuantType.Q8_0)
    with caplog.at_level("INFO"):
        backend = load_backend(worker_config(file, backend="cpu"))
    assert backend.facts.quantization == "int8"
    [line] = [record.getMessage() for record in caplog.records if "relative error" in record.getMessage()]
    assert float(line.split()[-2]) < 1.0
    assert load_backend(worker_config(file, backend="cpu", quantization="int4")).facts.quantization == "int4"


def test_other_types_are_dequantised_and_a_warning_says_so(model, worker_config, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", model.module, QuantType.Q5_0)
    info = check_checkpoint(file)
    assert info.dtype == "bfloat16"
    [warning] = info.warnings
    assert warning.startswith(f"{file}: most weights are Q5_0, which no kernel reads")
    name = "model.layers.0.self_attn.k_proj.weight"
    values = TensorFiles([file]).array(info.tensors[name])
    weight = model.module.get_parameter(name).detach().numpy()
    off = np.linalg.norm(values - weight) / np.linalg.norm(weight)
    assert 0.01 < off < 0.06
    assert load_backend(worker_config(file)).facts.quantization == "none"


def test_experts_in_different_types_are_dequantised(tiny_model, build_model, tmp_path):
    changes = {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []
    }  # fmt: skip
    module = build_model(tmp_path / "model", "Qwen3MoeConfig", changes).module
    same = check_checkpoint(write_gguf(tmp_path / "same.gguf", module, QuantType.Q4_0))
    assert sum(".experts." in name for name in same.quantized) == 3 * 4 * 3

    def dtype_of(name):
        return QuantType.Q5_0 if name == "blk.2.ffn_down_exps.weight" else None

    mixed = check_checkpoint(write_gguf(tmp_path / "mixed.gguf", module, QuantType.Q4_0, dtype_of=dtype_of))
    assert not any(".experts." in name for name in mixed.quantized)
    assert len(mixed.quantized) == 13
    entry = mixed.tensors["model.layers.2.mlp.experts.3.down_proj.weight"]
    assert (entry.dtype, entry.shape) == ("Q5_0", (64, 32))
    whole = quants.dequantize(
        quants.quantize(module.state_dict()["model.layers.2.mlp.experts.down_proj"].numpy(), QuantType.Q5_0),
        QuantType.Q5_0,
    )
    np.testing.assert_array_equal(TensorFiles([entry.file]).array(entry), whole[3])
