"""An adapter's files are a stranger's: whatever is wrong with them is refused by name."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.lora.adapter import AdaptedLinear, adapted_linears, read_adapter
from penstock.models.errors import ModelError

MAX_RANK = 8


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def spec(model):
    return check_checkpoint(model.path).spec


@pytest.fixture
def adapter(model, write_adapter, tmp_path):
    return write_adapter(tmp_path / "adapter", model.module)


def edit(path, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path, change):
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(path, spec):
    with pytest.raises(ModelError) as error:
        for _ in read_adapter(path, spec, MAX_RANK).matrices():
            pass
    return str(error.value)


def test_a_good_one(adapter, spec):
    found = read_adapter(adapter, spec, MAX_RANK)
    assert found.rank == 4
    assert set(found.pairs) == set(adapted_linears(spec))
    tensors = load_file(adapter / "adapter_model.safetensors")
    matrices = dict(found.matrices())
    a, b = matrices[AdaptedLinear(1, "down_proj")]
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    np.testing.assert_array_equal(a, tensors[f"{name}A.weight"].numpy())
    np.testing.assert_allclose(b, 2 * tensors[f"{name}B.weight"].numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, model, write_adapter, tmp_path, spec):
    path = write_adapter(tmp_path / "typed", model.module, dtype=dtype, alpha=4)
    tensors = load_file(path / "adapter_model.safetensors")
    for linear, (a, _) in read_adapter(path, spec, MAX_RANK).matrices():
        part = "mlp" if linear.module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        name = f"base_model.model.model.layers.{linear.layer}.{part}.{linear.module}.lora_A.weight"
        np.testing.assert_array_equal(a, tensors[name].float().numpy())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"eva_config": {"rho": 2}}, "eva_config is"),
        ({"a_new_config": {"x": 1}}, "a_new_config is"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"r": 0}, "r is 0"),
        ({"r": "4"}, "r is '4'"),
        ({"r": 9}, "r is 9: it must be at most --max-lora-rank, 8"),
        ({"r": 5}, "is 4, and r in adapter_config.json is 5"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e+300"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"rank_pattern": 3}, "rank_pattern is 3"),
    ],
)
def test_configs_that_are_refused(changes, problem, adapter, spec):
    edit(adapter, **changes)
    message = refused(adapter, spec)
    assert problem in message
    assert message.startswith(str(adapter))
    assert "\n" not in message


def test_ranks_may_differ_where_the_config_says_so(adapter, spec):
    edit(adapter, r=7, rank_pattern={"q_proj": 4})
    assert read_adapter(adapter, spec, MAX_RANK).rank == 4


LAYER = "base_model.model.model.layers.0."
QUERY = f"{LAYER}self_attn.q_proj.lora_"


def without(tensors, name):
    del tensors[name]


def with_nan(tensors, name):
    tensors[name][1, 2] = torch.nan


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 4)}), "is not supported"),
        (lambda t: t.update({f"{LAYER}mlp.experts.0.up_proj.lora_A.weight": torch.ones(4, 4)}), "is not supported"),
        (lambda t: t.update({f"{LAYER}self_attn.q_proj.lora_magnitude_vector": torch.ones(4)}), "is not supported"),
        (lambda t: t.update({f"{LAYER}self_attn.gate_proj.lora_A.weight": torch.ones(4, 4)}), "is not supported"),
        (lambda t: t.update({f"{QUERY}A.weight": torch.ones(4, 4, dtype=torch.int32)}), "has the dtype I32"),
        (lambda t: t.update({f"{QUERY}A.weight": torch.ones(4, 63)}), "another base model"),
        (lambda t: t.update({f"{QUERY}B.weight": torch.ones(64, 3)}), "another base model"),
        (lambda t: t.update({f"{QUERY}B.weight": torch.ones(64)}), "another base model"),
        (lambda t: without(t, f"{QUERY}B.weight"), "only one matrix of model.layers.0.self_attn.q_proj"),
        (lambda t: with_nan(t, f"{QUERY}A.weight"), "a number that is not finite"),
        (lambda t: with_nan(t, f"{QUERY}B.weight"), "a number that is not finite"),
        (lambda t: t.update({QUERY.replace("0", "9") + "A.weight": torch.ones(4, 64)}), "does not have"),
        (lambda t: t.update({f"{QUERY.replace('model.model.', 'model.')}A.weight": torch.ones(4, 64)}), "two"),
        (lambda t: t.clear(), "has no tensors"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(change, problem, adapter, spec):
    edit_tensors(adapter, change)
    assert problem in refused(adapter, spec)


def test_a_number_that_float16_cannot_hold(adapter, spec):
    """A slot in float16 would hold infinity."""
    edit_tensors(adapter, lambda tensors: tensors[f"{QUERY}B.weight"].fill_(4e4))  # times 8 / 4
    assert "above 65,504" in refused(adapter, spec)
    edit(adapter, lora_alpha=4)
    assert dict(read_adapter(adapter, spec, MAX_RANK).matrices())


def written_again(file):
    content = file.read_bytes()
    file.write_bytes(content[:-4] + bytes(4))


def replaced(file):
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def truncated(file):
    os.truncate(file, 1000)


@pytest.mark.parametrize("change", [written_again, replaced, truncated])
@pytest.mark.parametrize("num_read", [0, 1, 13])
def test_files_that_change_while_they_are_read(change, num_read, adapter, spec):
    """The digest, which names the cached blocks, would not be that of the numbers."""
    read = read_adapter(adapter, spec, MAX_RANK)
    found = read.matrices()
    for _ in range(num_read):
        next(found)
    change(adapter / "adapter_model.safetensors")
    if change is replaced and num_read:
        assert len(list(found)) == len(read.pairs) - num_read, "the old file is still open"
        return
    with pytest.raises(ModelError, match=r"changed while it was read|became shorter"):
        list(found)


def test_a_rank_above_the_limit(model, write_adapter, tmp_path, spec):
    path = write_adapter(tmp_path / "wide", model.module, rank=9)
    edit(path, r=8)
    assert "is 9: it must be at most 8" in refused(path, spec)


def test_an_adapter_of_another_model(tiny_model, write_adapter, tmp_path, spec):
    path = write_adapter(tmp_path / "other", tiny_model("llama-tied-biases-head24").module, modules=("q_proj",))
    assert "another base model" in refused(path, spec)


def test_files_that_are_not_there_or_no_files(adapter, spec, tmp_path):
    assert "no such directory" in refused(tmp_path / "nowhere", spec)
    (tmp_path / "empty").mkdir()
    assert "adapter_config.json: cannot be read" in refused(tmp_path / "empty", spec)
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert "is truncated" in refused(adapter, spec)
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"")
    assert "pickled weights are never loaded" in refused(adapter, spec)
    (adapter / "adapter_config.json").write_text("[1]")
    assert "is not a JSON object" in refused(adapter, spec)
    (adapter / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refused(adapter, spec)
    (adapter / "adapter_config.json").unlink()
    (adapter / "adapter_config.json").mkdir()
    assert "it is a directory" in refused(adapter, spec)


def test_the_digest_is_that_of_both_files(adapter, model, write_adapter, tmp_path, spec):
    digest = read_adapter(adapter, spec, MAX_RANK).digest
    same = write_adapter(tmp_path / "same", model.module)
    assert read_adapter(same, spec, MAX_RANK).digest == digest
    edit(same, lora_alpha=9)
    assert read_adapter(same, spec, MAX_RANK).digest != digest
    other = write_adapter(tmp_path / "other", model.module, seed=1)
    assert read_adapter(other, spec, MAX_RANK).digest != digest
