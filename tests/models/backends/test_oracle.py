"""Greedy output equals transformers', token for token in fp32, however a request is batched, cut or interrupted.

Expected tokens are not generated: given equal tokens so far, the next must be the argmax of transformers' logits, so
one forward pass over prompt and output proves them all, and gives the log-probabilities as well.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 24
# About twice the difference between transformers' results in float32 and float64: 1.1e-4 (gemma4-inputs, AVX2).
TOLERANCE = 2e-4


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Each that runs on a CPU, in turn."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    return request.param


most_on_cpu = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("reference", marks=pytest.mark.soak)], indirect=True
)
"""For tests of what the scheduler and the runner do for both."""


@pytest.fixture
def on_cpu(backend, in_process):
    """An executor in this process, over each backend in turn."""
    return partial(in_process, backend=backend)


def check(model, prompt, answer, num_tokens=NUM_TOKENS, tolerance=TOLERANCE):
    """The answer is the greedy continuation, with its log-probabilities."""
    assert len(answer.token_ids) == num_tokens
    logits = model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=tolerance, rtol=0)
    top = expected.topk(2, dim=-1)
    assert [ids for ids, _ in answer.tops] == top.indices.tolist()
    torch.testing.assert_close(torch.tensor([values for _, values in answer.tops]), top.values, atol=tolerance, rtol=0)


async def test_alone(any_model, on_cpu, start_engine, prompts):
    engine = await start_engine(on_cpu(any_model.path), enable_prefix_caching=False)
    for prompt in prompts[::2]:
        [answer] = await engine.run([prompt], GREEDY, NUM_TOKENS)
        check(any_model, prompt, answer)


@most_on_cpu
async def test_batch_of_32(any_model, on_cpu, start_engine, prompts):
    executor = on_cpu(any_model.path)
    engine = await start_engine(executor, enable_prefix_caching=False)
    many = prompts * 4
    answers = await engine.run(many, GREEDY, NUM_TOKENS)
    assert max(len(plan.decodes) for plan in executor.plans) == 32
    for prompt, answer in zip(many[:8], answers[:8], strict=True):
        check(any_model, prompt, answer)
    for i, answer in enumerate(answers):
        assert answer.token_ids == answers[i % 8].token_ids


async def test_chunks_of_32(any_model, on_cpu, start_engine, prompts):
    executor = on_cpu(any_model.path)
    engine = await start_engine(executor, enable_prefix_caching=False, max_num_batched_tokens=32)
    answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
    assert max(sum(c.end - c.start for c in plan.chunks) + len(plan.decodes) for plan in executor.plans) <= 32
    assert any(chunk.start > 0 for plan in executor.plans for chunk in plan.chunks)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(any_model, prompt, answer)


async def test_prefix_hit(any_model, on_cpu, start_engine, prompts):
    engine = await start_engine(on_cpu(any_model.path))
    [first] = await engine.run([prompts[-1]], GREEDY, NUM_TOKENS)
    longer = prompts[-1] + first.token_ids + prompts[1]
    [again, continued] = await engine.run([prompts[-1], longer], GREEDY, NUM_TOKENS)
    # 75 prompt tokens hold 4 full blocks; with the 23 computed of its output, 6.
    assert again.finished.usage.cached_tokens == 64
    assert continued.finished.usage.cached_tokens == 96
    check(any_model, prompts[-1], again)
    check(any_model, longer, continued)


@most_on_cpu
async def test_forced_preemption(any_model, on_cpu, start_engine, prompts):
    # The five longest need 32 blocks at the end, and one request of the longest kind must fit.
    engine = await start_engine(on_cpu(any_model.path, num_blocks=16, max_model_len=200), enable_prefix_caching=False)
    answers = await engine.run(prompts[3:], GREEDY, NUM_TOKENS)
    assert engine.stats.preemptions > 0
    for prompt, answer in zip(prompts[3:], answers, strict=True):
        check(any_model, prompt, answer)


async def test_generate_of_transformers_itself(tiny_model, on_cpu, start_engine, prompts):
    """The same by transformers' own loop with its cache, which says that checking by one pass is right."""
    model = tiny_model("mistral-window9")
    engine = await start_engine(on_cpu(model.path))
    answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
    for prompt, answer in zip(prompts[4:], answers[4:], strict=True):
        expected = model.module.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        assert answer.token_ids == expected[0, len(prompt) :].tolist()


async def test_prompt_logprobs(any_model, on_cpu, start_engine, prompts):
    engine = await start_engine(on_cpu(any_model.path), max_num_batched_tokens=32)
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=1), 2)
    expected = any_model.logits(prompts[-1]).log_softmax(-1)[:-1]
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    parts = answer.prompt_logprobs
    lengths = [len(part.logprobs.chosen) for part in parts]
    assert [part.start for part in parts] == [1 + sum(lengths[:i]) for i in range(len(parts))]
    got = torch.tensor([value for part in parts for value in part.logprobs.chosen])
    torch.testing.assert_close(got, chosen, atol=TOLERANCE, rtol=0)
    assert [i for part in parts for i in part.logprobs.top_token_ids] == expected.argmax(-1).tolist()


async def test_an_expert_whose_sigmoid_is_zero(tmp_path, build_model, on_cpu, start_engine, prompts):
    """The chosen sigmoids are divided by their sum, which is zero here."""
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24}
    changes = {**sizes, "head_dim": 16, "first_k_dense_replace": 0, "num_hidden_layers": 1, "num_mtp_layers": 0}
    model = build_model(tmp_path, "Glm4MoeConfig", changes)
    layer = model.module.model.layers[0]
    with torch.no_grad():  # what the router reads is positive
        model.module.model.embed_tokens.weight.abs_()
        layer.self_attn.o_proj.weight.zero_()
        layer.post_attention_layernorm.weight.abs_()
        layer.mlp.gate.weight.fill_(-10.0)
    model.module.save_pretrained(tmp_path)
    engine = await start_engine(on_cpu(tmp_path))
    [answer] = await engine.run(prompts[-1:], GREEDY, NUM_TOKENS)
    check(model, prompts[-1], answer)


async def test_identical_prompts_sent_together_compute_the_prefix_once(tiny_model, on_cpu, start_engine):
    model = tiny_model("llama")
    prompt = torch.randint(0, 160, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    executor = on_cpu(model.path)
    engine = await start_engine(executor)
    answers = await engine.run([prompt] * 16, GREEDY, 4)
    computed = sum(chunk.end - chunk.start for plan in executor.plans for chunk in plan.chunks)
    # One computes 1,000 tokens; each of the others what is past its last full block, 62 x 16 tokens.
    assert computed <= 1000 + 15 * 16
    assert all(answer.token_ids == answers[0].token_ids for answer in answers)
    check(model, prompt, answers[0], 4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", "float64"), ("reference", "float32"), ("cuda", "float32")]
)
async def test_on_cuda(any_model, in_process, start_engine, prompts, backend, dtype):
    executor = in_process(any_model.path, backend=backend, device="cuda", dtype=dtype)
    engine = await start_engine(executor, max_num_batched_tokens=32)
    for _ in range(2):  # the second time with a prefix from the cache
        answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True):
            # transformers computes in fp32 on the CPU, in another order.
            check(any_model, prompt, answer, tolerance=5 * TOLERANCE)
    sampled = SamplingParams(seed=3, temperature=1.2, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.2)
    alone = [(await engine.run([prompt], sampled, NUM_TOKENS))[0].token_ids for prompt in prompts]
    if dtype == "float64":
        assert [answer.token_ids for answer in await engine.run(prompts, sampled, NUM_TOKENS)] == alone


class TestDemoModel:
    """The built-in model, over the worker process, with prompts of real text."""

    TEXTS = (
        "The quick brown fox jumps over the lazy dog.",
        "A process is a running program. Each has an id, a parent and",
        "usage: tar [OPTION...] [FILE]...\nGNU 'tar' saves many files together into a single tape or disk archive, and",
        "1",
    )

    @pytest.fixture
    def demo(self):
        path = resolve_model(DEMO)
        module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in self.TEXTS]
        return SimpleNamespace(path=path, module=module.eval(), texts=texts, logits=lambda ids: logits_of(module, ids))

    async def test_alone_batched_chunked_cached_and_preempted(self, demo, worker_config, start_engine, backend):
        # 36 blocks hold two and a half of these requests.
        config = worker_config(demo.path, num_blocks=36, max_model_len=512, backend=backend)
        engine = await start_engine(WorkerProcess(config), max_num_batched_tokens=32)
        [alone] = await engine.run([demo.texts[0]], GREEDY, NUM_TOKENS)
        check(demo, demo.texts[0], alone)
        longer = [text * 4 for text in demo.texts]
        for prompts in (demo.texts * 8, longer, longer):
            answers = await engine.run(prompts, GREEDY, NUM_TOKENS)
            for prompt, answer in zip(prompts[:4], answers[:4], strict=True):
                check(demo, prompt, answer)
            for i, answer in enumerate(answers):
                assert answer.token_ids == answers[i % 4].token_ids
        assert answers[2].finished.usage.cached_tokens > 0
        assert engine.stats.preemptions > 0


def logits_of(module, token_ids):
    with torch.inference_mode():
        return module(torch.tensor([token_ids])).logits[0]
