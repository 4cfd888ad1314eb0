"""Scales of keys and values in a checkpoint: used by a KV cache in fp8. Without a GPU its kernels run in Triton's
interpreter."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import load_backend
from penstock.models.backends.tensor_parallel import ALONE
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, SamplingParams, StepPlan

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

# Of the interpreter, which computes with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SMALL = {
    "backend": "cuda", "device": "cuda" if torch.cuda.is_available() else "cpu", "max_num_seqs": 4, "max_model_len": 64,
    "num_blocks": 24,
}  # fmt: skip
PROMPT = [3, 9, 1, 33, 9, 1, 3] * 2


@pytest.fixture
def with_outliers(tmp_path, build_model):
    """A model with keys and values beyond the range of fp8, as products that its other weights undo."""
    model = build_model(tmp_path, "LlamaConfig", {})
    with torch.no_grad():
        for layer in model.module.model.layers:
            attention = layer.self_attn
            channels = attention.k_proj.weight.view(2, 2, 8, -1)[:, :, 3]  # pairs that are rotated together
            channels *= 3000.0
            attention.q_proj.weight.view(4, 2, 8, -1)[:, :, 3] /= 3000.0
            attention.v_proj.weight *= 1000.0
            attention.o_proj.weight /= 1000.0
    model.module.save_pretrained(tmp_path)
    return model


def add_kv_scales(path, shape: tuple[int, ...], value: float = 0.0) -> None:
    """Adds scales, in bfloat16, with which the largest keys and values of ``with_outliers`` just fit; or ``value``."""
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        for kind, largest in (("k", 20_000.0), ("v", 8_000.0)):
            scale = torch.full(shape, value or largest / 448.0, dtype=torch.bfloat16)
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = scale
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.soak
@pytest.mark.parametrize("shape", [(), (2, 1, 1)], ids=["one", "of heads"])
@pytest.mark.usefixtures("fp8_as_on_a_gpu")
def test_scales_of_the_checkpoint_make_kv_in_fp8_more_precise(with_outliers, worker_config, shape):
    def error() -> float:
        config = {**SMALL, "kv_cache_dtype": "fp8"}
        runner = Runner(load_backend(worker_config(with_outliers.path, **config)))
        row = AddedRow(0, 1, PROMPT, len(PROMPT), 0, [1], SamplingParams(prompt_logprobs=0))
        plan = StepPlan(0, [], [row], [], [Chunk(0, 0, len(PROMPT))], [])
        [part] = runner.run(plan).prompt_logprobs
        expected = with_outliers.logits(PROMPT)[:-1].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(PROMPT)[1:, None]).squeeze(1)
        return float((torch.tensor(part.logprobs.chosen) - chosen).abs().mean())

    without = error()
    add_kv_scales(with_outliers.path, shape)
    assert 0 < error() < 0.3 * without


def test_a_scale_that_is_not_above_zero_is_named(with_outliers, worker_config):
    add_kv_scales(with_outliers.path, (), value=-1.0)
    load_backend(worker_config(with_outliers.path, **SMALL))
    with pytest.raises(ModelError, match=r"the scale model\.layers\.0\.self_attn\.k_scale is not above zero"):
        load_backend(worker_config(with_outliers.path, **{**SMALL, "kv_cache_dtype": "fp8"}))


def scales_of(model, path, values: dict[int, tuple[float, ...]]) -> tuple[ModelSpec, list[list[float]]]:
    """Returns the scales of each layer's keys, with those of some layers in the checkpoint."""
    from penstock.models.backends.cuda.pages import read_kv_scales

    tensors = load_file(model.path / "model.safetensors")
    tensors |= {f"model.layers.{layer}.self_attn.k_scale": torch.tensor(value) for layer, value in values.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text((model.path / "config.json").read_text())
    info = check_checkpoint(path)
    return info.spec, [keys.tolist() for keys, _ in read_kv_scales(info, ALONE, torch.device("cpu"))]


def test_layers_with_other_numbers_of_heads_have_as_many_scales(tiny_model, tmp_path):
    _, scales = scales_of(tiny_model("gemma4-experts"), tmp_path, {0: (2.0, 4.0), 2: (8.0,)})
    assert scales == [[2.0, 4.0], [1.0], [8.0]]


def test_layers_that_share_keys_share_their_scales(tiny_model, tmp_path):
    spec, scales = scales_of(tiny_model("gemma4-inputs"), tmp_path, {1: (2.0,), 2: (4.0,)})
    assert spec.kv_sources == (0, 1, 2, 2, 2, 1)
    assert [keys[0] for keys in scales] == [1.0, 2.0, 4.0, 4.0, 4.0, 2.0]
