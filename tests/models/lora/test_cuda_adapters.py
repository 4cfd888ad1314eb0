"""Adapters on the CUDA backend; without a GPU its kernels run in Triton's interpreter, so the case is small."""

from importlib.util import find_spec

import pytest
import torch

from penstock.scheduler.plan import SamplingParams

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.kernels.cuda.core.launch import launches

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("captures_are_checked"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"backend": "cuda", "device": DEVICE, "max_num_seqs": 4, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 3


@pytest.mark.soak
async def test_adapters_and_the_base_in_one_batch(
    tiny_model, write_adapter, merged, in_process, start_engine, prompts, tmp_path
):
    model, before = tiny_model("llama"), launches.late
    paths = [
        write_adapter(tmp_path / "all", model.module, seed=1, alpha=4),
        write_adapter(tmp_path / "some", model.module, seed=2, rank=2, modules=("v_proj", "up_proj", "o_proj")),
    ]
    executor = in_process(model.path, num_blocks=24, max_loras=2, max_lora_rank=4, **SMALL)
    engine = await start_engine(executor, max_num_seqs=4)
    adapters = [await engine.engine.adapters.load(path.name, str(path)) for path in paths]
    models = [model, *(merged(model, path) for path in paths)]
    answers = [
        engine.submit(prompts[index], GREEDY, NUM_TOKENS, adapter=adapter)
        for index, adapter in enumerate([None, *adapters], start=1)
    ]
    await engine.finish(answers)
    assert {row.adapter for plan in executor.plans for row in plan.added} == {0, 1, 2}
    for index, answer in enumerate(answers):
        prompt = prompts[index + 1]
        logits = models[index].logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-3, rtol=0)
    [base] = await engine.run([prompts[1]], GREEDY, NUM_TOKENS)
    assert base.token_ids == answers[0].token_ids
    assert launches.late == before, "a kernel was compiled after the warm-up"
