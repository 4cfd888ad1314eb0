"""Models with recurrent layers give transformers' greedy output, token for token in fp32, however a request is batched,
cut, preempted or drafted."""

import pytest
import torch

from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 24
TOLERANCE = 1e-3
"""transformers computes delta nets in chunks of 64 tokens, with a system of equations for each, in fp32."""


def check(model, prompt, answer, num_tokens=NUM_TOKENS):
    """The answer is the greedy continuation, with its log-probabilities."""
    assert len(answer.token_ids) == num_tokens
    logits = model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=TOLERANCE, rtol=0)


async def test_alone(any_hybrid, backend, with_slots, start_engine, prompts):
    engine = await start_engine(with_slots(any_hybrid.path, backend=backend), enable_prefix_caching=False)
    for prompt in prompts[::2]:
        [answer] = await engine.run([prompt], GREEDY, NUM_TOKENS)
        check(any_hybrid, prompt, answer)


async def test_batch_of_32_in_chunks_of_48(typical_hybrid, backend, with_slots, start_engine, prompts):
    executor = with_slots(typical_hybrid.path, backend=backend)
    engine = await start_engine(executor, enable_prefix_caching=False, max_num_batched_tokens=48)
    many = prompts * 4
    answers = await engine.run(many, GREEDY, NUM_TOKENS)
    assert max(len(plan.decodes) for plan in executor.plans) >= 24
    assert any(chunk.start > 0 for plan in executor.plans for chunk in plan.chunks)
    for prompt, answer in zip(many, answers, strict=True):
        check(typical_hybrid, prompt, answer)


async def test_forced_preemption(typical_hybrid, backend, with_slots, start_engine, prompts):
    executor = with_slots(typical_hybrid.path, backend=backend, num_blocks=16, max_model_len=200)
    engine = await start_engine(executor, enable_prefix_caching=False)
    answers = await engine.run(prompts[3:], GREEDY, NUM_TOKENS)
    assert engine.stats.preemptions > 0
    for prompt, answer in zip(prompts[3:], answers, strict=True):
        check(typical_hybrid, prompt, answer)


async def test_drafts(typical_hybrid, backend, with_slots, start_engine, prompts):
    engine = await start_engine(with_slots(typical_hybrid.path, backend=backend), enable_prefix_caching=False)
    plain = await engine.run(prompts, GREEDY, 40)
    known = {tuple(prompt): answer.token_ids for prompt, answer in zip(prompts, plain, strict=True)}
    engine = await start_engine(with_slots(typical_hybrid.path, known, backend=backend), enable_prefix_caching=False)
    answers = [engine.submit(prompt, GREEDY, 40, max_drafts=6) for prompt in prompts]
    await engine.finish(answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(typical_hybrid, prompt, answer, 40)
        told = answer.finished.speculation
        assert 0 < told.accepted < told.drafted


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
async def test_prompt_logprobs_and_vectors(hybrid, name, backend, with_slots, start_engine, prompts):
    model = hybrid(name)
    executor = with_slots(model.path, backend=backend)
    engine = await start_engine(executor, enable_prefix_caching=False, max_num_batched_tokens=32)
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=1), 2)
    expected = model.logits(prompts[-1]).log_softmax(-1)[:-1]
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
    torch.testing.assert_close(got, chosen, atol=TOLERANCE, rtol=0)
