"""The files of an EAGLE-3 head are checked before anything is loaded."""

from dataclasses import replace

import msgspec
import pytest
import torch

from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.eagle import check_eagle_head
from penstock.models.errors import ModelError
from penstock.models.speculative.heads import drafter as heads
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig


def change(name, value):
    def apply(tensors, config):
        tensors[name] = value(tensors[name])

    return apply


def without(name):
    return lambda tensors, config: tensors.pop(name)


def configured(**changes):
    return lambda tensors, config: config.update(changes)


VOCAB, HIDDEN, KV_HEADS, HEAD_DIM, BLOCK = 160, 64, 1, 24, 16

WRONG = {
    "tensor fc.weight is missing": without("fc.weight"),
    "tensor midlayer.hidden_norm.weight is missing": without("midlayer.hidden_norm.weight"),
    "tensor d2t is missing": without("d2t"),
    "tensor midlayer.self_attn.k_norm.weight has no place": lambda tensors, _: tensors.update(
        {"midlayer.self_attn.k_norm.weight": torch.ones(HEAD_DIM)}
    ),
    "tensor midlayer.self_attn.q_proj.weight has the shape": change(
        "midlayer.self_attn.q_proj.weight", lambda t: t[:, :HIDDEN].clone()
    ),
    "tensor lm_head.weight has dtype I64": change("lm_head.weight", lambda t: t.long()),
    "tensor t2d has dtype U8": change("t2d", lambda t: t.to(torch.uint8)),
    "tensor d2t does not map": change("d2t", lambda t: t + VOCAB),
    "hidden_size is 48: it must be the model's, 64": configured(hidden_size=48),
    "vocab_size is 161: it must be the model's, 160": configured(vocab_size=161),
    "norm_before_residual is True: it must be false": configured(norm_before_residual=True),
    "num_hidden_layers is 2: it must be 1": configured(num_hidden_layers=2),
    "architectures is .*: it must name LlamaForCausalLMEagle3": configured(architectures=["LlamaForCausalLM"]),
    "eagle_aux_hidden_state_layer_ids is .*: it must name 3 of": configured(eagle_aux_hidden_state_layer_ids=[1, 1, 2]),
    "eagle_aux_hidden_state_layer_ids is .*: it must be a list of integers from 0 to 4": configured(
        eagle_aux_hidden_state_layer_ids=[1, 2, 5]
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_files_that_are_no_head_of_the_model_are_refused(what, tiny_model, tmp_path, random_tensors, save_head):
    spec = check_checkpoint(tiny_model("qwen3").path).spec
    tensors: dict[str, torch.Tensor] = random_tensors()
    config: dict[str, object] = {}
    WRONG[what](tensors, config)
    save_head(tmp_path, tensors, None, **config)
    with pytest.raises(ModelError, match=what) as caught:
        check_eagle_head(tmp_path, with_layers(spec, 5))
    assert str(tmp_path) in str(caught.value)


def with_layers(spec, num_layers):
    return replace(spec, num_layers=num_layers)


def test_layers_that_a_config_does_not_name_are_those_that_all_heads_take(
    tiny_model, tmp_path, random_tensors, save_head
):
    spec = check_checkpoint(tiny_model("qwen3").path).spec
    save_head(tmp_path, random_tensors(), None, eagle_config=None)
    assert check_eagle_head(tmp_path, with_layers(spec, 32)).feature_layers == (2, 16, 29)
    with pytest.raises(ModelError, match="must name 3 of the model's layers, 0 to 4"):
        check_eagle_head(tmp_path, with_layers(spec, 5))


def test_a_head_that_is_not_there_is_refused(target_and_head, eagle_config):
    target, head = target_and_head
    config = eagle_config(target, head, "auto")
    nowhere = SpeculationConfig(DraftMethod.EAGLE3, 3, model="/nowhere")
    with pytest.raises(ModelError, match="--speculative-config: /nowhere: no such directory"):
        heads.with_room(msgspec.structs.replace(config, speculation=nowhere))


def test_the_heads_pages_are_counted(target_and_head, eagle_config):
    target, head = target_and_head
    config = eagle_config(target, head, "cpu")
    with_room = heads.with_room(config)
    assert with_room.block_bytes_beside == 2 * KV_HEADS * HEAD_DIM * 4 * BLOCK
    assert with_room.feature_layers == (0, 2, 4)
