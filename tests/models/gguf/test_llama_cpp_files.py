"""Files that llama.cpp's own converter and quantizer wrote: weights must match the dequantizer of its Python library,
and outputs must match transformers with these weights. The quantizer is built once, below ``build/``."""

import json
import re
import subprocess
import sys
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

CONVERTED = (
    "arcee", "cohere", "cohere-qk-norm", "deepseek-v2", "deepseek-v3", "dots1", "ernie", "exaone4", "exaone4-full",
    "gemma1", "gemma2", "gemma4-experts", "gemma4-inputs", "glm4", "glm4-moe", "gpt-oss", "granite", "granite-hybrid",
    "granite-hybrid-experts", "granite-moe", "lfm2", "lfm2-moe", "llama", "llama-rope-linear",
    "llama-rope-llama3-head80", "llama-rope-yarn", "llama-tied-biases-head24", "llama4", "llama4-two-experts",
    "minimax-m2", "ministral3", "mistral-no-window", "mixtral", "nemotron", "olmo1", "olmo2", "olmo3", "olmoe",
    "phi3-longrope", "qwen2-tied", "qwen3", "qwen3-next", "seed-oss", "smollm3", "stablelm", "stablelm-parallel",
    "starcoder2",
)  # fmt: skip
"""The variants that the converter accepts as transformers writes them."""
CONVERT = """
import sys
from pathlib import Path
sources, model, file = sys.argv[1:]
sys.path[:0] = [f"{sources}/gguf-py", sources]
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
kind = get_model_class(get_model_architecture(ModelBase.load_hparams(Path(model), False), ModelType.TEXT))
for each in kind.__mro__:
    if "set_vocab" in vars(each):
        each.set_vocab = lambda self: None
kind.no_mtp = True
with torch.inference_mode():
    kind(Path(model), gguf.LlamaFileType.ALL_F32, Path(file)).write()
"""
"""Converts a model without its tokenizer."""
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def installer() -> Installer:
    """Has llama.cpp's sources. Skips the tests if these or a compiler are not available."""
    installer = Installer(CACHE, [])
    try:
        find_compiler()
        installer.llama_sources()
    except (CannotBuild, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"llama.cpp's programs cannot be built: {error}")
    return installer


@pytest.fixture(scope="module")
def quantizer(installer: Installer) -> Path:
    """llama.cpp's program."""
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


@pytest.fixture
def convert(installer: Installer, tmp_path: Path) -> Callable[[Any], Path]:
    """Returns the file that the converter makes from a model."""

    def run(model: Any) -> Path:
        file = tmp_path / "model.gguf"
        _name_layers_as_published(model.path / "config.json")
        vocabulary = {f"<{token_id}>": token_id for token_id in range(model.module.config.vocab_size)}
        # The converters of some families drop tokens that the tokenizer lacks.
        (model.path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
        command = [sys.executable, "-P", "-c", CONVERT, installer.llama_sources(), model.path, file]
        subprocess.run(command, check=True, capture_output=True)
        return file

    return run


def _name_layers_as_published(file: Path) -> None:
    """Names the kinds of Granite 4's layers as its config.json does; transformers has names of its own."""
    config = json.loads(file.read_text())
    if config["model_type"] == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
        file.write_text(json.dumps(config))


@pytest.mark.parametrize("variant", CONVERTED)
async def test_a_file_of_the_converter_gives_the_output_of_transformers(variant, convert, model_of, check_output):
    model = model_of(variant)
    await check_output(model, convert(model))
