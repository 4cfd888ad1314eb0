"""An MTP head drafts what its definition says, and changes no answer."""

import pytest
import torch
from heads.runners import answers, few_answers, start
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from penstock.models.backends.base import load_backend
from penstock.models.worker.runner import Runner
from penstock.models.worker.speculation import check_speculation, make_controller
from penstock.scheduler.plan import SamplingParams

pytestmark = pytest.mark.usefixtures("cpu_library")

BLOCK = 16


LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [0], "attention_bias": True,
}  # fmt: skip


SOAKED = [pytest.param(name, marks=pytest.mark.soak) for name in ("untied", "qwen3.5")]


@pytest.fixture(scope="module", params=["tied", "latent", "qwen3-next", *SOAKED])
def mtp_model(request, build_mtp_model, mtp_kinds, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    glm, qwen = mtp_kinds
    match request.param:
        case "latent":
            kind = glm._replace(config_class="DeepseekV3Config", layer_class=DeepseekV3DecoderLayer)
            return build_mtp_model(path, kind, **LATENT)
        case "qwen3-next":
            return build_mtp_model(path, qwen, **DELTA_NET, **EXPERTS)
        case "qwen3.5":
            kind = qwen._replace(config_class="Qwen3_5TextConfig", layer_class=Qwen3_5DecoderLayer)
            return build_mtp_model(path, kind, **DELTA_NET)
        case _:
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


@pytest.mark.parametrize("mtp_model", ["qwen3-next"], indirect=True)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
async def test_turns_of_conversations_with_a_hybrid(
    mtp_model, mtp_config, prompts, backend, in_process_executor, start_engine
):
    """Each turn begins with a cached state. What follows rejected drafts is transformers' greedy output."""
    engine = await start_engine(in_process_executor(mtp_config(mtp_model, backend), is_eager=True))
    histories, drafted, accepted = [list(prompt) for prompt in prompts[4:]], 0, 0
    for turn in range(3):
        answers = [engine.submit(history, SamplingParams(temperature=0.0), 24, max_drafts=3) for history in histories]
        await engine.finish(answers)
        for history, answer in zip(histories, answers, strict=True):
            logits = mtp_model.target.logits(history + answer.token_ids)[len(history) - 1 : -1]
            assert answer.token_ids == logits.argmax(-1).tolist()
            assert not turn or answer.finished.usage.cached_tokens >= len(history) - 7 - 1 - BLOCK
            drafted += answer.finished.speculation.drafted
            accepted += answer.finished.speculation.accepted
            history += answer.token_ids + prompts[-1][turn : turn + 7]
    assert drafted > accepted


def check_on_gpu(model, mtp_config, prompts):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    few = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_bytes": 1 << 20}
    runner, watched = start(mtp_config(model, "cuda", device=device, **few))
    plain, _ = start(mtp_config(model, "reference", **few), with_head=False)
    assert few_answers(runner, prompts[5], 2) == few_answers(plain, prompts[5], 0)
    assert watched.proposed
    for history, most, drafts, sampling in watched.proposed:
        assert drafts == model.drafts(history, most, sampling)


@pytest.mark.soak
@pytest.mark.parametrize(
    "changes",
    [{"first_k_dense_replace": 3}, {"n_routed_experts": 4, "num_experts_per_tok": 2}],
    ids=["dense", "experts"],
)
def test_drafts_on_gpus(build_mtp_model, mtp_config, prompts, tmp_path, changes):
    check_on_gpu(build_mtp_model(tmp_path, **changes), mtp_config, prompts)


@pytest.mark.soak
@pytest.mark.parametrize("mtp_model", ["qwen3-next"], indirect=True)
def test_drafts_for_a_hybrid_on_gpus(mtp_model, mtp_config, prompts):
    """Its head has a gate after attention."""
    check_on_gpu(mtp_model, mtp_config, prompts)
