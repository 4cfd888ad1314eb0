"""Files that llama.cpp's own quantizer wrote: weights are those of the dequantiser of its Python library, and outputs
those of transformers with these weights. The quantizer is built once, below ``build/``."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cpu_bench.install import Installer
from model_files.gguf_files import write_gguf

from penstock.kernels.cpu.build import CannotBuild, find_compiler
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.scheduler.plan import SamplingParams

pytestmark = pytest.mark.soak

CACHE = Path(__file__).parents[3] / "build/llama"
NUM_LAYERS = 4
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": NUM_LAYERS, "head_dim": 64,
    "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
MODELS = {"QWEN3": ("Qwen3Config", SIZES), "QWEN3MOE": ("Qwen3MoeConfig", SIZES | EXPERTS)}
TYPES = {
    "Q2_K": {"Q2_K", "Q3_K"},
    "Q3_K_M": {"Q3_K", "Q4_K"},
    "Q4_K_S": {"Q4_K"},
    "Q4_K_M": {"Q4_K", "Q6_K"},
    "Q5_K_M": {"Q5_K", "Q6_K"},
    "Q6_K": {"Q6_K"},
    "IQ4_XS": {"IQ4_XS"},
    "IQ4_NL": {"IQ4_NL"},
    "Q5_1": {"Q5_1"},
    "Q4_0": {"Q4_0"},
    "Q8_0": {"Q8_0"},
}
"""The types that a file of each kind has, among others."""
AS_STORED = ("Q4_0", "Q8_0")
"""Kinds that the CPU backend does not dequantise."""

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def quantizer() -> Path:
    """llama.cpp's program. Skips the tests if its sources or a compiler cannot be had."""
    installer = Installer(CACHE, [])
    try:
        find_compiler()
        installer.llama_sources()
    except (CannotBuild, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"llama.cpp's quantizer cannot be built: {error}")
    [program] = installer.llama_programs("llama-quantize")
    return program


@pytest.fixture(scope="module")
def written(
    quantizer: Path, build_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Any, Path]]:
    """Returns transformers' model of an architecture and its file of a kind."""
    folder = tmp_path_factory.mktemp("files")
    models: dict[str, Any] = {}

    def write(architecture: str, kind: str) -> tuple[Any, Path]:
        source, file = folder / f"{architecture}.gguf", folder / f"{architecture}-{kind}.gguf"
        if architecture not in models:
            models[architecture] = build_model(folder / architecture, *MODELS[architecture])
            write_gguf(source, models[architecture].module)
        if not file.exists():
            subprocess.run([quantizer, source, file, kind], check=True, capture_output=True)
        return models[architecture], file

    return write


def dequantised(file: Path) -> tuple[Arrays, set[str]]:
    """Returns the tensors of a file by their names in it, as the library dequantises them, and their types."""
    tensors = gguf.GGUFReader(file).tensors
    arrays = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    return arrays, {tensor.tensor_type.name for tensor in tensors}


def source_of(name: str, architecture: str) -> str:
    """Returns the name in the file of a tensor of transformers' model."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], NUM_LAYERS)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("architecture", MODELS)
def test_weights_are_those_of_the_library(architecture, kind, written):
    _, file = written(architecture, kind)
    expected, types = dequantised(file)
    assert types >= TYPES[kind]
    info = check_checkpoint(file)
    files = TensorFiles(entry.file for entry in info.tensors.values())
    for name, _ in info.spec.tensors():
        linear = info.quantized.get(name.removesuffix(".weight"))
        found = files.array(info.tensors[name]) if linear is None else read_matrix(linear).dequantized()
        match = re.search(r"\.experts\.(\d+)\.", name)
        array = expected[source_of(re.sub(r"(\.experts)\.\d+", r"\1", name), architecture)]
        np.testing.assert_array_equal(found, array if match is None else array[int(match[1])], err_msg=name)


@pytest.mark.usefixtures("cpu_library")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in AS_STORED])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("architecture", MODELS)
async def test_output_is_that_of_transformers_with_these_weights(
    architecture, backend, kind, written, build_model, in_process, start_engine, prompts, tmp_path
):
    _, file = written(architecture, kind)
    arrays, _ = dequantised(file)
    model = build_model(tmp_path, *MODELS[architecture])
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("gate_up_proj"):
                halves = [name.replace("gate_up_proj", f"{half}_proj.weight") for half in ("gate", "up")]
                array = np.concatenate([arrays[source_of(half, architecture)] for half in halves], axis=1)
            else:
                whole = name if name.endswith(("weight", "bias")) else f"{name}.weight"
                array = arrays[source_of(whole, architecture)]
            parameter.copy_(torch.from_numpy(np.array(array)))
    engine = await start_engine(in_process(file, backend=backend))
    for prompt, answer in zip(prompts, await engine.run(prompts, SamplingParams(temperature=0.0), 12), strict=True):
        assert answer.token_ids == model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1].argmax(-1).tolist()
