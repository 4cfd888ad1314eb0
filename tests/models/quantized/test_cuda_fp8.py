"""fp8 as the CUDA backend holds it: linears of checkpoints as their own tools write them, and what they take."""

from importlib.util import find_spec

import pytest
import torch
from torch.testing import assert_close

from penstock.kernels.reference import fused as reference_cuda
from penstock.models.backends.torch_common.weights import DenseLinear
from penstock.models.checkpoint.checkpoint import check_checkpoint

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.models.backends.cuda.linear import CudaLinears
from penstock.models.backends.cuda.loading import weight_bytes
from penstock.models.backends.torch_common.loader import load_weights
from penstock.scheduler.worker_config import WorkerConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QKV = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
GROUPS = {
    "fp8 channels": 0,
    "fp8 tensors, static inputs": 0,
    "fp8 blocks, the last ones short": 64,
    "fp8 blocks of weights alone": None,
    "fp8 weights alone": None,
    "fp8 of transformers": 32,
    "fp8 of transformers, tensors": 0,
    "fp8 of AutoFP8": 0,
}
"""Of each kind, the columns of inputs that share a scale; 0: all; None: inputs stay as they are."""


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.usefixtures("fp8_as_on_a_gpu")
def test_products_of_several_matrices_as_one(kind, checkpoints):
    made, group = checkpoints(kind), GROUPS[kind]
    linears = CudaLinears(check_checkpoint(made.path), None, DEVICE, deterministic=False)
    whole = torch.cat([made.linears[name].weight for name in QKV]).to(DEVICE)
    linear = linears.make(QKV, lambda: whole, None, may_quantize=True)
    linears.take_room(torch.float32, 3)
    x = torch.randn(3, whole.shape[1], device=DEVICE)
    inputs = x
    if group is not None:
        codes, scales = reference_cuda.narrow_inputs(x, torch.float8_e4m3fn, group)
        inputs = reference_cuda.dequantize(codes, scales, None, group, None)
    expected = inputs @ whole.T
    assert_close(linear(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    # The last has no kernel.
    assert isinstance(linear, DenseLinear) == (kind == "fp8 blocks of weights alone")


def test_a_ranks_part_is_multiplied_out(checkpoints):
    info = check_checkpoint(checkpoints("fp8 channels").path)
    linears = CudaLinears(info, None, DEVICE, deterministic=False)
    part = torch.randn(8, 64)
    linear = linears.make((), lambda: part, None, may_quantize=True)
    assert isinstance(linear, DenseLinear)
    assert linear.weight is part


@pytest.mark.parametrize("kind", ["fp8 channels", *(kind for kind in GROUPS if "blocks" in kind), "w4a16", "w8a8"])
def test_what_weights_take_is_known_before_they_are_read(kind, checkpoints):
    check_bytes(checkpoints(kind).path, "none", is_float=kind.endswith("blocks of weights alone"))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_what_weights_quantised_at_load_take_is_known(quantization, tiny_model):
    check_bytes(tiny_model("llama-tied-biases-head24").path, quantization, is_float=quantization == "none")


def check_bytes(path, quantization, *, is_float):
    """But for vectors, which may be held in other types."""
    info, dtype = check_checkpoint(path), torch.bfloat16
    linears = CudaLinears(info, info.at_load(quantization), DEVICE, deterministic=False)
    weights = load_weights(info, dtype, DEVICE, "auto", info.spec.vocab_size, make_linear=linears.make)
    assert isinstance(weights.layers[0].qkv, DenseLinear) == is_float
    config = WorkerConfig(model=str(path), quantization=quantization)
    found = weight_bytes(config, info, info.spec.vocab_size, dtype)
    assert found == pytest.approx(weights.num_bytes, rel=0.03)
