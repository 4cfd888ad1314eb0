"""What latent attention changes besides the tokens, which test_oracle compares: memory, formats of weights, drafts and
lost workers, and what is refused."""

import json
import os
import shutil
import signal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from waiting import until

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.executor.group import new_executor
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.worker_config import MAX_PREDICTED_DRAFTS, DraftMethod, SpeculationConfig

GREEDY = SamplingParams(temperature=0.0, logprobs=1)
NUM_TOKENS = 16
BLOCK = 32
"""Rows and columns that share a scale."""


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    return request.param


def check(module, prompt, token_ids, num_tokens=NUM_TOKENS):
    """The tokens are the greedy continuation."""
    assert len(token_ids) == num_tokens
    with torch.inference_mode():
        logits = module(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    assert token_ids == logits.argmax(-1).tolist()


async def test_a_position_takes_one_vector_in_each_layer(tiny_model, in_process, start_engine, backend):
    model = tiny_model("deepseek-v3")
    engine = await start_engine(in_process(model.path, num_blocks=20, backend=backend, max_model_len=300))
    # 40 numbers, which pages of the CPU backend pad to 48; the reference has a block more.
    sizes = {"reference": 21 * 16 * 40, "cpu": 20 * 16 * 48}
    assert engine.engine.facts.kv_bytes == 3 * 4 * sizes[backend]
    assert check_checkpoint(model.path).spec.kv_bytes_per_token(4) == 3 * 4 * 40


async def test_drafts_and_a_lost_worker_change_no_token(tiny_model, worker_config, start_engine, prompts, backend):
    model = tiny_model("deepseek-v3")
    drafts = SpeculationConfig(DraftMethod.NGRAM, 3)
    worker = WorkerProcess(worker_config(model.path, backend=backend, speculation=drafts))
    engine = await start_engine(worker)
    repeated = [prompt[:7] * 5 for prompt in prompts]
    answers = [engine.submit(prompt, GREEDY, 80, max_drafts=3) for prompt in repeated]
    await until(lambda: len(answers[0].token_ids) > 5)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: engine.engine.state is EngineState.RECOVERING)
    await engine.engine.wait_idle()
    assert {answer.finished.reason for answer in answers} == {EngineFinishReason.LENGTH}
    for prompt, answer in zip(repeated, answers, strict=True):
        check(model.module, prompt, answer.token_ids, 80)


async def test_accepted_drafts_are_the_tokens(
    tiny_model, worker_config, in_process_executor, start_engine, prompts, backend
):
    """The drafts are a prediction of the output, with one wrong token."""
    model = tiny_model("deepseek-v2")
    config = worker_config(model.path, backend=backend)
    engine = await start_engine(in_process_executor(config, is_eager=True), max_num_batched_tokens=48)
    first = await engine.run(prompts, GREEDY, 40)
    predictions = [[*answer.token_ids[:20], 0, *answer.token_ids[21:]] for answer in first]
    again = [
        engine.submit(prompt, GREEDY, 40, max_drafts=MAX_PREDICTED_DRAFTS, prediction=prediction)
        for prompt, prediction in zip(prompts, predictions, strict=True)
    ]
    await engine.finish(again)
    for prompt, answer in zip(prompts, again, strict=True):
        check(model.module, prompt, answer.token_ids, 40)
        assert answer.finished.speculation.accepted_predicted > 15


@pytest.mark.usefixtures("cpu_library")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
async def test_stages_give_the_bits_of_one_process(
    tiny_model, worker_config, in_process, start_engine, prompts, quantization
):
    path = tiny_model("deepseek-v3").path
    config = {"backend": "cpu", "dtype": "bfloat16", "quantization": quantization, "num_blocks": 96}
    whole = await start_engine(in_process(path, **config))
    assert whole.engine.facts.kv_cache_dtype == "bfloat16"
    expected = await whole.run(prompts, GREEDY, NUM_TOKENS)
    staged = worker_config(path, **config, pipeline_parallel_size=2, stage_layers=(1, 2))
    engine = await start_engine(new_executor(staged))
    answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
    assert [answer.output for answer in answers] == [answer.output for answer in expected]


def quantise(weight):
    """fp8 by blocks, as DeepSeek publishes: codes, scales, and what they stand for."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    stood_for = (codes.float() * scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return codes.view(padded.shape)[:rows, :columns].contiguous(), scales, stood_for.contiguous()


async def test_a_checkpoint_in_fp8_is_dequantised(tiny_model, tmp_path, in_process, start_engine, prompts, backend):
    source = tiny_model("deepseek-v3").path
    tensors = load_file(source / "model.safetensors")
    coded, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            coded[name], coded[f"{name}_scale_inv"], plain[name] = quantise(tensor)
    assert "model.layers.0.self_attn.kv_b_proj.weight_scale_inv" in coded
    assert "model.layers.1.mlp.experts.0.down_proj.weight_scale_inv" in coded
    for folder, saved in (("fp8", coded), ("plain", plain)):
        shutil.copytree(source, tmp_path / folder)
        save_file(saved, tmp_path / folder / "model.safetensors", {"format": "pt"})
    file = tmp_path / "fp8" / "config.json"
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": scheme}))
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    engine = await start_engine(in_process(tmp_path / "fp8", backend=backend, dtype="float32"))
    for prompt, answer in zip(prompts, await engine.run(prompts, GREEDY, NUM_TOKENS), strict=True):
        check(module, prompt, answer.token_ids)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"backend": "cpu", "kv_cache_dtype": "int8"},
            "kv-cache-dtype int8: is not for latent attention: give auto or",
        ),
        ({"backend": "cuda", "kv_cache_dtype": "fp8"}, "kv-cache-dtype fp8: is not for latent attention: give auto or"),
        ({"backend": "cuda", "deterministic": True}, "--deterministic: is not for latent attention.*: leave it out"),
        ({"backend": "transformers"}, "--backend transformers: this backend does not cache latents: .*reference"),
        ({"backend": "reference", "tensor_parallel_size": 2}, "1 latent for all heads.*: leave it out"),
    ],
)
@pytest.mark.usefixtures("cpu_library")
def test_what_is_not_supported_is_refused_with_a_remedy(tiny_model, worker_config, config, says):
    with pytest.raises(ModelError, match=says):
        load_backend(worker_config(tiny_model("deepseek-v2").path, **config))
