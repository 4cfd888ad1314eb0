"""The backend for GPUs: transformers' tokens in fp32, the reference backend's samples, nothing compiled too late.
Without a GPU its kernels run in Triton's interpreter, so models and prompts are as small as can be."""

import copy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, Pooling, RowBlocks, SamplingParams, StepPlan, StepResult
from penstock.scheduler.worker_config import MAX_PREDICTED_DRAFTS

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.kernels.aot import describe, float_variants, quantized_variants, variants
from penstock.kernels.cuda.core.launch import launches
from penstock.kernels.cuda.norm import rms_norm
from penstock.kernels.cuda.quantized.weights import multiplied_out
from penstock.models.backends.cuda.linear import AT_LOAD
from penstock.models.backends.cuda.shapes import shape_of

# Of the interpreter, which computes with numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.usefixtures("captures_are_checked"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 64
SMALL = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "device": DEVICE, "num_blocks": 24}
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
VARIANTS = [
    "llama-tied-biases-head24", "qwen3-tied-bias-yarn-windows", "gemma2", "gemma3", "gemma4-inputs", "gemma4-experts",
    "olmo2", "phi3-partial-rotary", "gpt-oss", "qwen3-moe-sparse-windows", "cohere-qk-norm", "gpt-neox", "hunyuan",
    "ministral3", "glm4-moe", "qwen2-moe", "llama4", "deepseek-v2", "deepseek-v3", "glm4-moe-lite",
]  # fmt: skip
"""The cases of ``test_oracle`` that have a kernel, or a path through one, of their own."""
LONG = (
    "cohere-qk-norm", "deepseek-v2", "gemma2", "gemma3", "gemma4-experts", "gemma4-inputs", "glm4-moe", "glm4-moe-lite",
    "gpt-neox", "hunyuan", "llama-tied-biases-head24", "llama4", "ministral3", "olmo2", "phi3-partial-rotary",
    "qwen2-moe", "qwen3-moe-sparse-windows",
)  # fmt: skip
"""Those whose own part plain torch computes, or that others have parts of: each takes seconds in the interpreter."""


@pytest.fixture(autouse=True)
def nothing_compiles_late():
    before = launches.late
    yield
    assert launches.late == before, "a kernel was compiled after the warm-up"


@pytest.fixture
def load(tiny_model, worker_config):
    """A runner over a variant: ``load(variant, backend=...)``."""

    def make(variant: str, **config: Any) -> Runner:
        return Runner(load_backend(worker_config(tiny_model(variant).path, **{**SMALL, "backend": "cuda", **config})))

    return make


def added(number: int, prompt: list[int], blocks: list[int], sampling: SamplingParams, **more: Any) -> AddedRow:
    return AddedRow(number, 1, prompt, len(prompt), 0, blocks, sampling, **more)


def whole(row: AddedRow) -> Chunk:
    return Chunk(row.row, 0, len(row.token_ids))


def both(load, variant: str) -> list[Runner]:
    """Ours, and the reference."""
    return [load(variant), load(variant, backend="reference", device="cpu")]


def generate(runner: Runner, rows: list[AddedRow], num_tokens: int) -> list[list[int]]:
    """Each row's next tokens, all rows together; each step begins before the last is finished, where it may."""
    finishes = [runner.start_step(StepPlan(0, [], rows, [], [whole(row) for row in rows], []))]
    results = []
    for step in range(1, num_tokens):
        plan = StepPlan(step, [], [], [], [], [Decode(row.row, 1) for row in rows])
        if not runner.runs_ahead:
            results.append(finishes.pop()())
        finishes.append(runner.start_step(plan))
        if runner.runs_ahead:
            results.append(finishes.pop(0)())
    results.append(finishes.pop()())
    runner.run(StepPlan(num_tokens, [row.row for row in rows], [], [], [], []))
    tokens: dict[int, list[int]] = {row.row: [] for row in rows}
    for result in results:
        for of_row in result.rows:
            tokens[of_row.row] += of_row.token_ids
    return [tokens[row.row] for row in rows]


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in VARIANTS]
)
def test_tokens_are_those_of_transformers(variant, tiny_model, load):
    model, runner = tiny_model(variant), load(variant)
    prompts = [[7, 3, 150, 21, 9, 66, 8, 2, 41, 17, 90, 13], [5, 11, 120]]
    rows = [added(n, prompt, [4 * n, 4 * n + 1], GREEDY) for n, prompt in enumerate(prompts)]
    for prompt, tokens in zip(prompts, generate(runner, rows, 2), strict=True):
        expected = model.logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(-1).tolist()


def test_chunks_blocks_and_rows_that_change(tiny_model, load):
    """A prompt in chunks beside a row that decodes, over the end of a block; then another row of that number."""
    model, runner = tiny_model("mistral-window9"), load("mistral-window9")
    one, two = [3, 9, 1, 33, 12, 5, 70, 81, 2, 14, 99, 4, 150, 8], [6, 5, 4, 3, 2, 1, 0, 7, 8, 9, 10, 11]
    first = added(0, one, [5], GREEDY)
    out = runner.run(StepPlan(0, [], [first], [], [whole(first)], [])).rows[0].token_ids
    second = added(3, two, [9], GREEDY)
    plans = [
        StepPlan(1, [], [second], [], [Chunk(3, 0, 7)], [Decode(0, 1)]),
        StepPlan(2, [], [], [RowBlocks(0, [2])], [Chunk(3, 7, 12)], [Decode(0, 1)]),
        StepPlan(3, [], [], [], [], [Decode(0, 1), Decode(3, 1)]),
    ]
    told: dict[int, list[int]] = {0: list(out), 3: []}
    for plan in plans:
        for row in runner.run(plan).rows:
            told[row.row] += row.token_ids
    assert told[0] == model.logits(one + told[0])[len(one) - 1 : -1].argmax(-1).tolist()
    assert told[3] == model.logits(two + told[3])[len(two) - 1 : -1].argmax(-1).tolist()
    # A row begins again with what it had, in other blocks, after some of a prefix that lies in its first.
    again = one + told[0]
    resumed = AddedRow(0, 2, again, len(one), 16, [5, 11], GREEDY)
    result = runner.run(StepPlan(4, [0, 3], [resumed], [], [Chunk(0, 16, len(again))], []))
    assert result.rows[0].token_ids == [int(model.logits(again)[-1].argmax())]
    assert (result.rows[0].epoch, result.rows[0].num_computed) == (2, len(again))


def test_a_block_comes_back_from_host_memory_byte_equal(load):
    runner = load("llama-tied-biases-head24", host_kv_cache_bytes=1 << 18)
    blocks = runner._backend._host_pages._blocks[0]
    prompt = [3, 9, 1, 33, 12, 5, 70, 81, 2, 14, 99, 4, 150, 8, 21, 6, 44]
    first, other = added(0, prompt, [5, 6], GREEDY), added(1, prompt[::-1], [5, 7], GREEDY)
    expected = runner.run(StepPlan(0, [], [first], [], [whole(first)], [])).rows[0].token_ids
    written = blocks[5].clone()
    runner.run(StepPlan(1, [0], [other], [], [whole(other)], [], copies_out=[(5, 2)]))
    assert not blocks[5].equal(written)
    again = AddedRow(2, 1, prompt, 17, 16, [9, 6], GREEDY)
    result = runner.run(StepPlan(2, [1], [again], [], [Chunk(2, 16, 17)], [], copies_in=[(2, 9)]))
    assert result.rows[0].token_ids == expected
    assert blocks[9].equal(written)


PROMPT = [3, 9, 1, 33, 9, 1, 3]
SAMPLING = [
    SamplingParams(temperature=0.8, seed=5, top_k=30, top_p=0.9, min_p=0.02, logprobs=3),
    SamplingParams(temperature=1.2, seed=(1 << 64) - 1, repetition_penalty=1.4, presence_penalty=0.5,
                   frequency_penalty=0.3),
    SamplingParams(temperature=0.0, allowed_token_ids=(7, 19, 159), logit_bias=((7, -50.0), (19, 2.5))),
    SamplingParams(temperature=2.0, seed=9, min_tokens=3, stop_token_ids=tuple(range(0, 160, 2)),
                   bad_words=((1,), (3, 5), (*PROMPT[1:], 77)), logit_bias=((0, 5.0), (77, 90.0))),
]  # fmt: skip


def test_samples_are_those_of_the_reference(load):
    """Every parameter that changes them; twice, so that rows leave what they used to others."""
    runners = both(load, "llama")
    for shift in (0, 1):
        rows = [added(n, PROMPT, [n], SAMPLING[(n + shift) % len(SAMPLING)]) for n in range(len(SAMPLING))]
        found, expected = (generate(runner, rows, 2) for runner in runners)
        assert found == expected
    assert all(len(set(tokens)) > 1 for tokens in (found[0], found[3])), "the parameters leave nothing to draw"


def test_more_words_than_there_was_room_for(load):
    """The arrays are replaced; and rows that were there before keep theirs."""
    runners = both(load, "llama")
    few = SamplingParams(temperature=1.0, seed=1, bad_words=((8, 8), (12,)))
    many = SamplingParams(temperature=1.0, seed=2, bad_words=tuple((n % 160, n // 160 % 160, 5) for n in range(5000)))
    one, two = added(0, PROMPT, [0], few), added(1, PROMPT, [1], many)
    found, expected = (
        [
            [row.token_ids for row in runner.run(plan).rows]
            for plan in (
                StepPlan(0, [], [one], [], [whole(one)], []),
                StepPlan(1, [], [two], [], [whole(two)], [Decode(0, 1)]),
                StepPlan(2, [], [], [], [], [Decode(0, 1), Decode(1, 1)]),
            )
        ]
        for runner in runners
    )
    assert found == expected


def test_logprobs_and_vectors_are_those_of_the_reference(load):
    sampling = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=2)
    results: list[Any] = []
    for runner in both(load, "qwen3"):
        rows = [added(0, PROMPT, [0], sampling), added(1, PROMPT, [1], GREEDY, pooling=Pooling.MEAN)]
        results.append(runner.run(StepPlan(0, [], rows, [], [whole(row) for row in rows], [])))
    found, expected = results
    [ours, theirs] = [result.rows[0].logprobs for result in results]
    assert ours.top_token_ids == theirs.top_token_ids
    np.testing.assert_allclose(ours.chosen + ours.top, theirs.chosen + theirs.top, atol=1e-4)
    [of_prompt], [expected_of_prompt] = found.prompt_logprobs, expected.prompt_logprobs
    np.testing.assert_allclose(of_prompt.logprobs.chosen, expected_of_prompt.logprobs.chosen, atol=1e-4)
    vectors = [np.frombuffer(result.rows[1].vector, dtype=np.float32) for result in results]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


@pytest.mark.soak
async def test_preempted_rows_go_on(tiny_model, in_process, start_engine):
    """The whole engine, which has two plans under way, over so few blocks that rows give way."""
    model = tiny_model("llama")
    prompts = [[n + 5, 40, n + 9, 2, 7, 3, 14] * 2 for n in range(3)]
    make = partial(in_process, model.path, **{**SMALL, "num_blocks": 4, "max_model_len": 48})
    engine = await start_engine(make(backend="cuda"), enable_prefix_caching=False)
    answers = await engine.run(prompts, GREEDY, 5)
    assert engine.stats.preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("variant", "quantization", "deterministic", "dtype"),
    [
        ("qwen3", "fp8", False, torch.float32),
        pytest.param("llama-tied-biases-head24", "none", False, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param("gemma2", "none", False, torch.float32, marks=pytest.mark.soak),
        pytest.param("gemma4-inputs", "none", False, torch.float32, marks=pytest.mark.soak),
        pytest.param("gemma4-inputs", "none", False, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param("gemma4-inputs", "none", True, torch.float32, marks=pytest.mark.soak),
        pytest.param("olmo2", "none", False, torch.float32, marks=pytest.mark.soak),
        pytest.param("llama4", "none", False, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param("deepseek-v3", "none", False, torch.bfloat16, marks=pytest.mark.soak),
        ("llama-tied-biases-head24", "none", True, torch.float32),
    ],
)
def test_what_is_warmed_is_what_is_compiled_ahead(variant, quantization, deterministic, dtype, tiny_model, load):
    """The list that a test compiles for Hopper is the one that a service launches, no more and no less."""
    name = str(dtype).removeprefix("torch.")
    load(variant, quantization=quantization, deterministic=deterministic, dtype=name)
    warmed = launches.warmed
    spec = check_checkpoint(tiny_model(variant).path).spec
    shape = shape_of(
        spec, dtype, dtype, spec.vocab_size, MAX_MODEL_LEN, MAX_NUM_SEQS, 2048,
        deterministic=deterministic, max_drafts=MAX_PREDICTED_DRAFTS,
    )  # fmt: skip
    products = float_variants(shape) if quantization == "none" else quantized_variants(shape, quantization)
    ahead = {describe(variant) for variant in chain(variants(shape), products)}
    assert set(map(describe, warmed)) == ahead


def said_of(number: int, results: list[StepResult]) -> tuple[list[Any], list[Any]]:
    """Of a row: its tokens with their log-probabilities, and those of its prompt."""
    rows = [row for result in results for row in result.rows if row.row == number and row.token_ids]
    parts = [part.logprobs for result in results for part in result.prompt_logprobs if part.row == number]
    of_prompt = [logprob for part in parts for logprob in part.chosen + part.top]
    return [(row.token_ids, row.logprobs) for row in rows], sorted(of_prompt)


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS)
def test_deterministic_bits_do_not_depend_on_what_else_a_step_has(variant, load, rows_alike):
    """A row alone; one that has neighbours, and its prompt in parts down to a single token; and one that begins again
    with what it decoded."""
    runner = load(variant, deterministic=True)
    prompt = [7, 3, 150, 21, 9, 66, 8, 2]
    sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2)
    row = added(0, prompt, [0], sampling)
    plans = [StepPlan(0, [], [row], [], [whole(row)], []), StepPlan(1, [], [], [], [], [Decode(0, 1)])]
    tokens, of_prompt = said_of(0, [runner.run(plan) for plan in plans])

    row, neighbour = added(1, prompt, [1], sampling), added(2, [5, 11, 120], [2], GREEDY)
    plans = [
        StepPlan(2, [0], [row, neighbour], [], [Chunk(1, 0, 3), whole(neighbour)], []),
        StepPlan(3, [], [], [], [Chunk(1, 3, 7)], [Decode(2, 1)]),
        StepPlan(4, [], [], [], [Chunk(1, 7, 8)], []),
        StepPlan(5, [], [], [], [], [Decode(1, 1), Decode(2, 1)]),
    ]
    assert said_of(1, [runner.run(plan) for plan in plans]) == (tokens, of_prompt)

    again = AddedRow(0, 2, prompt + tokens[0][0], len(prompt), 0, [3], GREEDY)
    result = runner.run(StepPlan(6, [1], [again], [], [whole(again)], [Decode(2, 1)]))
    assert said_of(0, [result])[0] == tokens[1:]


@pytest.mark.parametrize(
    "quantization", [pytest.param(name, marks=pytest.mark.soak) if name != "fp8" else name for name in AT_LOAD]
)
@pytest.mark.usefixtures("fp8_as_on_a_gpu")
def test_weights_quantised_at_load(tiny_model, load, quantization, narrow_inputs, caplog):
    """Tokens are those of transformers with the weights multiplied out again."""
    caplog.set_level("INFO")
    model, runner = tiny_model("qwen2-tied"), load("qwen2-tied", quantization=quantization)
    module = copy.deepcopy(model.module)
    linears = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    squares = torch.zeros(2, dtype=torch.float64)
    for linear in linears.values():
        weight = linear.weight.data
        linear.weight.data = multiplied_out(AT_LOAD[quantization](weight), 0, len(weight))
        squares += torch.stack([(linear.weight.data - weight).double().square().sum(), weight.double().square().sum()])
    if quantization == "fp8":
        narrow_inputs(module, linears)
    relative = (squares[0] / squares[1]).sqrt().item()
    assert f"{quantization}: the weights' relative error is {100 * relative:.2f} %" in caplog.text
    [tokens] = generate(runner, [added(0, PROMPT, [1, 2], GREEDY)], 3)
    logits = replace(model, module=module).logits(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def test_kv_in_eight_bits(tiny_model, load):
    """A prompt is nearly as likely as with the model's own, though not quite."""
    model, runner = tiny_model("llama"), load("llama", kv_cache_dtype="fp8")
    row = added(0, PROMPT * 2, [1], SamplingParams(prompt_logprobs=0))
    [part] = runner.run(StepPlan(0, [], [row], [], [whole(row)], [])).prompt_logprobs
    expected = model.logits(PROMPT * 2)[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT * 2)[1:, None]).squeeze(1)
    errors = (torch.tensor(part.logprobs.chosen) - expected).abs()
    assert 0 < errors.mean() < 0.3 * expected.std()


def test_tables_are_as_long_as_the_context_that_the_kv_cache_holds(tiny_model, worker_config):
    """The model was made for 2,048 positions."""
    num_bytes = 65 * 16 * check_checkpoint(tiny_model("llama").path).spec.kv_bytes_per_token(4)
    changes = {"max_model_len": None, "num_blocks": None, "kv_cache_bytes": num_bytes}
    backend: Any = load_backend(worker_config(tiny_model("llama").path, **{**SMALL, "backend": "cuda", **changes}))
    assert backend.facts.max_model_len == 65 * 16
    assert backend._memory.rows.rows.tables.shape[1] == 65
    assert {len(table) for tables in backend._model._cos_sin_tables.values() for table in tables} == {65 * 16}


class TestRefusals:
    """What it cannot do, and what to do then."""

    def refusal(self, load, **config) -> str:
        with pytest.raises(ModelError) as error:
            load("llama", **config)
        return str(error.value)

    def test_types(self, load):
        assert "float64" in self.refusal(load, dtype="float64")
        assert "--kv-cache-dtype int8" in self.refusal(load, kv_cache_dtype="int8")
        assert "float16: the activations are in float32" in self.refusal(load, kv_cache_dtype="float16")

    @pytest.mark.skipif(DEVICE == "cuda", reason="is about machines without CUDA")
    def test_no_gpu(self, load, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "--device is cpu" in self.refusal(load)

    def test_what_plain_torch_does_not_do(self, load, caplog):
        load("llama", backend="reference", device="cpu", deterministic=True)
        assert "--deterministic does nothing in plain torch" in caplog.text

    def test_a_context_beyond_the_models(self, load):
        assert "--max-model-len 4096" in self.refusal(load, max_model_len=4096)


class TestLaunches:
    """Whatever is compiled after the warm-up is told."""

    @pytest.fixture(autouse=True)
    def nothing_compiles_late(self):
        """Here something does."""

    def test_a_kernel_that_was_not_warmed(self, load, caplog):
        load("llama")
        before = launches.late
        width = 48 + before  # no other test norms rows of that width
        x = torch.ones(1, width, device=DEVICE)
        rms_norm(x, x[0], 1e-5, x)
        assert launches.late > before
        assert "compiled while requests waited" in caplog.text
