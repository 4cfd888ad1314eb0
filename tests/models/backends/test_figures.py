"""The figures of reliability that the worker's side owes, each by its number."""

import asyncio
import math
from random import Random

import msgspec
import pytest

from penstock.kernels.reference.ops import attention
from penstock.models.backends.reference import attention_groups, backend as reference_backend
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.request import EngineFinishReason

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=100, seed=2**63 + 11, repetition_penalty=1.1)
NUM_TOKENS = 24


class PoisonedPages(KVPages):
    """A block that goes to a new owner is NaN in every slot until written."""

    def reset_blocks(self, block_ids):
        for pages in self._whole:
            pages[:, :, block_ids] = math.nan


def attention_of_what_is_seen(query, keys, values, mask, reach, **scores):
    """What no query of a row sees is cut off, and nothing else is: whatever a row reads that it did not write shows in
    its output."""
    if mask is not None:
        unseen = ~mask.any(1)[:, :, None]
        keys, values = keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)
    return attention(query, keys, values, mask, reach, **scores)


def poison(monkeypatch):
    """Has the backend use both."""
    monkeypatch.setattr(reference_backend, "KVPages", PoisonedPages)
    monkeypatch.setattr(attention_groups, "attention", attention_of_what_is_seen)


async def outputs(engine, prompts, sampling=GREEDY, num_tokens=NUM_TOKENS):
    return [answer.token_ids for answer in await engine.run(prompts, sampling, num_tokens)]


@pytest.fixture
def tight(in_process):
    """An executor with room for a few of the prompts only."""
    return lambda path, **config: in_process(path, num_blocks=16, max_model_len=200, **config)


async def test_reliability_figure_2_recycled_blocks_poisoned_with_nan_change_no_output(
    typical_model, in_process, tight, start_engine, prompts, monkeypatch
):
    plain = await start_engine(in_process(typical_model.path))
    expected = await outputs(plain, prompts)
    poison(monkeypatch)
    for config in ({}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 32}):
        executor = tight(typical_model.path)
        engine = await start_engine(executor, **config)
        for _ in range(2):  # the second time from the cache, where there is one
            assert await outputs(engine, prompts) == expected
        assert engine.stats.preemptions > 0
        given = [block for plan in executor.plans for added in plan.added for block in added.block_ids]
        assert len(given) > 3 * 16, "blocks were not recycled"


@pytest.mark.parametrize("stale", ["prefix", "table"])
async def test_reliability_figure_2_a_planted_stale_read_gives_nan(tiny_model, in_process, prompts, monkeypatch, stale):
    poison(monkeypatch)
    executor = in_process(tiny_model("llama").path, num_blocks=8, max_model_len=64)
    await executor.start()
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    prompt = prompts[5]
    first = AddedRow(0, 0, prompt, 40, 0, [0, 1, 2], sampling)
    results = [executor._runner.run(StepPlan(0, [], [first], [], [Chunk(0, 0, 40)], []))]
    # Another row takes block 1 and writes 4 of its slots; the rest of it holds nothing that anyone may read.
    other = AddedRow(1, 0, prompt[:4], 4, 0, [1], sampling)
    results.append(executor._runner.run(StepPlan(1, [0], [other], [], [Chunk(1, 0, 4)], [])))
    assert not any(math.isnan(value) for result in results for row in result.rows for value in row.logprobs.chosen)
    if stale == "prefix":
        # The scheduler believes that blocks 0 and 1 still hold the prompt's beginning.
        again = AddedRow(2, 0, prompt, 40, 32, [0, 1, 3], sampling)
        result = executor._runner.run(StepPlan(2, [], [again], [], [Chunk(2, 32, 40)], []))
    else:
        # Its block is given away while it runs.
        thief = AddedRow(2, 0, prompt[:1], 1, 0, [1], sampling)
        result = executor._runner.run(StepPlan(2, [], [thief], [], [Chunk(2, 0, 1)], [Decode(1, 1)]))
        result.rows = [row for row in result.rows if row.row == 1]
    assert math.isnan(result.rows[0].logprobs.chosen[0])


async def test_reliability_figure_9_same_greedy_tokens_alone_batched_preempted_chunked_and_from_cache(
    typical_model, in_process, tight, start_engine, prompts
):
    path, subject = typical_model.path, prompts[-1]
    uncached = await start_engine(in_process(path), enable_prefix_caching=False)
    [alone] = await outputs(uncached, [subject])
    batched = await outputs(uncached, prompts + [subject] * 5)
    chunked = await start_engine(in_process(path), enable_prefix_caching=False, max_num_batched_tokens=20)
    [in_chunks] = await outputs(chunked, [subject])
    cached = await start_engine(in_process(path))
    await outputs(cached, [subject])
    [from_cache] = await outputs(cached, [subject])
    assert cached.stats.cached_tokens == 64
    preempting = await start_engine(tight(path), enable_prefix_caching=False)
    preempted = await outputs(preempting, [subject] * 3)
    assert preempting.stats.preemptions > 0
    assert all(tokens == alone for tokens in [*batched[7:], in_chunks, from_cache, *preempted])


async def test_sampled_output_with_a_seed_is_the_same_alone_batched_and_preempted(
    distinct_model, in_process, tight, start_engine, prompts
):
    """In fp64, where the order of a sum cannot move a draw. Every row of a batch has its own seed."""
    path = distinct_model.path
    uncached = await start_engine(in_process(path, dtype="float64"), enable_prefix_caching=False)
    alone = [(await outputs(uncached, [prompt], SAMPLED))[0] for prompt in prompts]
    assert await outputs(uncached, prompts, SAMPLED) == alone
    cached = await start_engine(in_process(path, dtype="float64"), max_num_batched_tokens=32)
    assert await outputs(cached, prompts, SAMPLED) == alone
    assert await outputs(cached, prompts, SAMPLED) == alone
    preempting = await start_engine(tight(path, dtype="float64"), enable_prefix_caching=False)
    assert await outputs(preempting, prompts, SAMPLED) == alone
    assert preempting.stats.preemptions > 0
    other_seed = await outputs(uncached, prompts, msgspec.structs.replace(SAMPLED, seed=12))
    assert other_seed != alone


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 300))])
async def test_reliability_figure_9_in_random_traffic(tiny_model, in_process, start_engine, monkeypatch, seed):
    """Prompts that share prefixes, parameters of all kinds, cancels at random, blocks for a few at a time: whatever is
    answered is what the request gets alone (fp64, poisoned blocks)."""
    random = Random(seed)
    path = tiny_model(random.choice(["llama", "qwen3", "mistral-window9", "qwen2-some-windows"])).path
    stems = [[random.randrange(160) for _ in range(random.choice((16, 33, 48)))] for _ in range(3)]

    def make_request():
        prompt = random.choice(stems) + [random.randrange(160) for _ in range(random.randrange(30))]
        sampling = SamplingParams(
            temperature=random.choice((0.0, 0.8, 2.0)),
            top_k=random.choice((0, 3, 40)),
            top_p=random.choice((1.0, 0.9)),
            min_p=random.choice((0.0, 0.05)),
            repetition_penalty=random.choice((1.0, 1.2)),
            frequency_penalty=random.choice((0.0, 0.3)),
            seed=random.getrandbits(64),
            stop_token_ids=tuple(sorted(random.sample(range(160), 3))),
            min_tokens=random.choice((0, 6)),
            bad_words=random.choice(((), ((5,), (7, 8)))),
            logprobs=random.choice((None, 0, 2)),
            prompt_logprobs=random.choice((None, None, 0)),
        )
        return prompt, sampling, random.randrange(1, 40)

    requests = [make_request() for _ in range(40)]
    quiet = await start_engine(in_process(path, dtype="float64"), enable_prefix_caching=False)
    expected = [(await quiet.run([prompt], sampling, n))[0] for prompt, sampling, n in requests]

    poison(monkeypatch)
    executor = in_process(path, num_blocks=14, max_model_len=200, dtype="float64")
    busy = await start_engine(executor, max_num_batched_tokens=random.choice((24, 64)), max_num_seqs=8)
    answers = []
    for number, request in enumerate(requests):
        answers.append(busy.submit(*request))
        for _ in range(random.randrange(6)):
            await asyncio.sleep(0)
        if random.random() < 0.25:
            busy.engine.abort(str(random.randrange(number + 1)), EngineFinishReason.CANCELLED)
    await busy.engine.wait_idle()
    whole = [a.finished.reason is not EngineFinishReason.CANCELLED for a in answers]
    assert 10 < sum(whole) < 40
    assert busy.stats.preemptions > 0
    assert busy.stats.cached_tokens > 0
    for answer, alone, complete in zip(answers, expected, whole, strict=True):
        assert answer.token_ids == alone.token_ids[: None if complete else len(answer.token_ids)]
        assert answer.logprobs == pytest.approx(alone.logprobs[: len(answer.logprobs)], abs=1e-6)
        # Told once, in order, without a gap, however often the row began again.
        told = [(part.start + i, p) for part in answer.prompt_logprobs for i, p in enumerate(part.logprobs.chosen)]
        told_alone = [(part.start + i, p) for part in alone.prompt_logprobs for i, p in enumerate(part.logprobs.chosen)]
        positions = [position for position, _ in told]
        assert positions == list(range(1, len(told_alone) + 1))[: None if complete else len(told)]
        assert [p for _, p in told] == pytest.approx([p for _, p in told_alone[: len(told)]], abs=1e-6)


async def test_sampled_output_over_the_worker_process(tiny_model, worker_config, in_process, start_engine, prompts):
    path = tiny_model("qwen3").path
    here = await start_engine(in_process(path, dtype="float64"))
    expected = await outputs(here, prompts, SAMPLED)
    worker = await start_engine(WorkerProcess(worker_config(path, num_blocks=16, max_model_len=200, dtype="float64")))
    assert await outputs(worker, prompts, SAMPLED) == expected
    assert worker.stats.preemptions > 0
