"""An MTP head drafts what its definition says, and changes no answer."""

import pytest
import torch
from heads.runners import answers, few_answers, start
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from penstock.models.backends.base import load_backend
from penstock.models.worker.runner import Runner
from penstock.models.worker.speculation import check_speculation, make_controller

pytestmark = pytest.mark.usefixtures("cpu_library")

BLOCK = 16


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["tied", "untied", "latent"])
def mtp_model(request, build_mtp_model, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "latent":
        return build_mtp_model(path, ("DeepseekV3Config", DeepseekV3DecoderLayer), **LATENT)
    return build_mtp_model(path, tie_word_embeddings=request.param == "tied")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drafts_are_those_of_the_definition_and_change_no_answer(mtp_model, mtp_config, prompts, backend):
    some = [prompts[4], prompts[1], prompts[5]]
    config = mtp_config(mtp_model, backend)
    runner, watched = start(config)
    told = answers(runner, some, 3)
    plain, _ = start(config, with_head=False)
    assert told == answers(plain, some, 0)
    loaded = load_backend(check_speculation(config))
    assert told == answers(Runner(loaded, make_controller(config, loaded)), some, 3), "as many as are worth their time"
    assert any(len(history) % BLOCK == 1 for history, *_ in watched.proposed)
    assert len(watched.proposed) > 40, "every step of every row"
    for history, most, drafts, sampling in watched.proposed[::5]:
        assert drafts == mtp_model.drafts(history, most, sampling)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_head_drafts_for_a_model_that_is_quantised_at_load(mtp_model, mtp_config, prompts, quantization):
    """Its own weights stay floats; it uses the model's quantised output head."""
    config = mtp_config(mtp_model, "cpu", quantization=quantization)
    runner, watched = start(config)
    plain, _ = start(config, with_head=False)
    assert answers(runner, prompts[4:6], 3, 20) == answers(plain, prompts[4:6], 0, 20)
    assert watched.proposed


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"first_k_dense_replace": 3}, id="dense"),
        # Experts take the interpreter minutes.
        pytest.param({"n_routed_experts": 4, "num_experts_per_tok": 2}, id="experts", marks=pytest.mark.soak),
    ],
)
def test_drafts_on_gpus(build_mtp_model, mtp_config, prompts, tmp_path, changes):
    pytest.importorskip("triton")
    model = build_mtp_model(tmp_path, **changes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    few = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_bytes": 1 << 20}
    runner, watched = start(mtp_config(model, "cuda", device=device, **few))
    plain, _ = start(mtp_config(model, "reference", **few), with_head=False)
    assert few_answers(runner, prompts[5], 2) == few_answers(plain, prompts[5], 0)
    assert watched.proposed
    for history, most, drafts, sampling in watched.proposed:
        assert drafts == model.drafts(history, most, sampling)
