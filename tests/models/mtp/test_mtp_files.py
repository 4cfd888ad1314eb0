"""Which MTP heads can be loaded, and what is said of the others."""

import json

import pytest
from safetensors.torch import load_file, save_file

from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.mtp import check_mtp_head
from penstock.models.errors import ModelError
from penstock.models.worker.speculation import check_speculation

PREFIX = "model.layers.3."


@pytest.fixture
def model(build_mtp_model, tmp_path):
    return build_mtp_model(tmp_path / "model")


def change_tensors(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def head_of(model):
    return check_mtp_head(check_checkpoint(model.path, weights=False))


def test_a_head_is_a_layer_like_the_last_one(model):
    head = head_of(model)
    target = check_checkpoint(model.path).spec
    assert (head.spec.num_layers, head.feature_layers) == (1, (3,))
    assert head.spec.has_experts(0)
    assert len(head.target_ids) == target.vocab_size
    assert set(head.info.tensors) == {name for name, _ in head.spec.tensors()}


def test_a_head_of_qwen3_next_is_a_layer_with_attention(build_mtp_model, mtp_kinds, tmp_path):
    """The layers after the last one with attention have recurrent states. Published configs have no number of heads."""
    types = ["full_attention", "linear_attention", "linear_attention"]
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1, 2]}
    model = build_mtp_model(tmp_path / "model", mtp_kinds[1], layer_types=types, **changes)
    head = head_of(model)
    assert "num_nextn_predict_layers" not in head.info.config
    assert not head.spec.has_state
    assert head.spec.has_experts(0)
    assert set(head.info.tensors) == {name for name, _ in head.spec.tensors()}
    change_config(model.path, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ModelError, match="mtp_use_dedicated_embeddings is True: it must be false"):
        head_of(model)
    change_tensors(model.path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "mtp." in name])
    change_config(model.path, mtp_use_dedicated_embeddings=False)
    with pytest.raises(ModelError, match=r"there is no tensor mtp\.\*: this copy .* came without its head"):
        head_of(model)


def test_the_model_is_the_same_without_its_head(model):
    with_head = check_checkpoint(model.path)
    change_tensors(model.path, lambda tensors: [tensors.pop(name) for name in list(tensors) if PREFIX in name])
    assert check_checkpoint(model.path).spec == with_head.spec


def test_a_copy_without_its_head_is_named(model):
    change_tensors(model.path, lambda tensors: [tensors.pop(name) for name in list(tensors) if PREFIX in name])
    with pytest.raises(ModelError, match=r"there is no tensor model.layers.3.\*.*came without its head"):
        head_of(model)


def test_a_model_without_a_head_is_named(model):
    change_config(model.path, num_nextn_predict_layers=0)
    with pytest.raises(
        ModelError, match=r"num_nextn_predict_layers is 0: it must be at least 1 for .*choose another method"
    ):
        head_of(model)


def test_a_family_without_heads_is_named(tiny_model):
    with pytest.raises(ModelError, match="mtp: LlamaForCausalLM has no head that can be loaded"):
        head_of(tiny_model("llama"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("eh_proj.weight", "tensor fc.weight is missing"), ("self_attn.q_proj.weight", "q_proj.weight is missing")],
)
def test_a_missing_tensor_is_named(model, name, problem):
    change_tensors(model.path, lambda tensors: tensors.pop(PREFIX + name))
    with pytest.raises(ModelError, match=problem):
        head_of(model)


def test_an_unknown_tensor_is_named(model):
    change_tensors(
        model.path, lambda tensors: tensors.update({f"{PREFIX}extra.weight": tensors["model.norm.weight"].clone()})
    )
    with pytest.raises(ModelError, match=r"extra.weight has no place"):
        head_of(model)


def test_a_head_has_room_for_its_keys_and_values(model, mtp_config):
    config = check_speculation(mtp_config(model, "cpu"))
    spec = head_of(model).spec
    assert config.block_bytes_beside == spec.kv_bytes_per_token(4) * config.block_size
    assert config.feature_layers == (3,)


def test_stages_and_heads_are_refused_together(model, mtp_config):
    with pytest.raises(ModelError, match="a head reads hidden states that other stages compute"):
        check_speculation(mtp_config(model, "cpu", pipeline_parallel_size=2))
