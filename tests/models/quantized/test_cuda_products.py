"""The CUDA backend's products with checkpoints as their own tools write them. In a process of their own, as Triton
must be told before it is imported that it is to interpret."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from penstock.models.checkpoint.checkpoint import check_checkpoint

pytest.importorskip("triton")

KINDS = [
    "gptq zero points",
    "gptq act-order",
    "gptq act-order, last group short",
    "gptq one group",
    "awq",
    "w4a16 zero points",
    "w4a16 act-order",
    "w8a8",
]
NUM_TOKENS = 3

# Of every linear named in wanted.json, the products with the inputs of its width.
MULTIPLY = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from penstock.kernels.cuda.quantized.gemm import GemmWorkspace, gemm
from penstock.kernels.cuda.quantized.weights import pack_bytes, pack_int4
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.reader import read_matrix

folder, device = Path(sys.argv[1]), torch.device(sys.argv[2])
inputs = load_file(folder / "inputs.safetensors", device=str(device))
outputs, ordered = {}, set()
for kind, path, name in json.loads((folder / "wanted.json").read_text()):
    matrix = read_matrix(check_checkpoint(Path(path)).quantized[name])
    codes, scales, zeros = (torch.from_numpy(part).to(device) for part in (matrix.codes, matrix.scales, matrix.zeros))
    if matrix.scheme.bits == 8:
        weight = pack_bytes(codes.view(torch.int8), scales, narrows_inputs=True)
    else:
        order = None if matrix.order is None else torch.from_numpy(matrix.order).to(device)
        weight = pack_int4(codes, scales, zeros, group=matrix.scheme.group, order=order)
    if weight.layout.is_ordered:
        ordered.add(kind)
    x = inputs[str(weight.layout.columns)].clone()  # where a kernel may read it
    room = GemmWorkspace.allocate([weight.layout], x.dtype, len(x), device, deterministic=False)
    out = torch.full((len(x), weight.layout.rows), torch.nan, device=device)
    gemm(x, weight, out, room)
    outputs[f"{kind}: {name}"] = out
assert len(ordered) == 3, ordered
assert all("act-order" in kind for kind in ordered), ordered
save_file(outputs, folder / "outputs.safetensors")
"""


@pytest.fixture(scope="module")
def multiplied(checkpoints, tmp_path_factory):
    """Inputs by their width, and the outputs of each kind: one linear of each shape."""
    folder = tmp_path_factory.mktemp("products")
    wanted: list[tuple[str, str, str]] = []
    inputs: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        made = checkpoints(kind)
        linears = check_checkpoint(made.path).quantized
        by_shape = {(linears[name].rows, linears[name].columns): name for name in made.linears}
        for (_, columns), name in by_shape.items():
            wanted.append((kind, str(made.path), name))
            inputs.setdefault(str(columns), torch.randn(NUM_TOKENS, columns))
    (folder / "wanted.json").write_text(json.dumps(wanted))
    save_file(inputs, folder / "inputs.safetensors")
    has_gpu = torch.cuda.is_available()
    subprocess.run(
        [sys.executable, "-P", "-c", MULTIPLY, str(folder), "cuda" if has_gpu else "cpu"],
        env=dict(os.environ) if has_gpu else {**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
    )
    return inputs, load_file(folder / "outputs.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_with_what_the_tool_wrote(kind, multiplied, checkpoints):
    inputs, outputs = multiplied
    names = [name.removeprefix(f"{kind}: ") for name in outputs if name.startswith(f"{kind}: ")]
    assert names
    for name in names:
        weight = checkpoints(kind).linears[name].weight
        expected = inputs[str(weight.shape[1])] @ weight.T
        # Inputs that become bytes are off by half of one in 127.
        slack = 0.02 if kind == "w8a8" else 1e-5
        assert_close(outputs[f"{kind}: {name}"], expected, rtol=slack, atol=slack * expected.abs().max().item())
