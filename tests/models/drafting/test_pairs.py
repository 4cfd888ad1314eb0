"""Drafts together with all else that a request may ask for and an engine may do to it, in pairs, and grammars with all
of these. On the demo model, with the drafters that are trained for it."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.executor.process import WorkerProcess
from penstock.models.structured_output.compiler import to_grammar
from penstock.scheduler.engine_stats import EngineStats
from penstock.scheduler.plan import SamplingParams, StepPlan
from penstock.scheduler.worker_config import MAX_FORCED_DRAFTS, DraftMethod, SpeculationConfig

pytestmark = pytest.mark.usefixtures("cpu_library")

DEMO = resolve_model("demo")
TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
EOS = (4093, 4095)
MAX_TOKENS, MAX_DRAFTS = 32, 5
METHODS = {
    DraftMethod.NGRAM: None,
    DraftMethod.SUFFIX: None,
    DraftMethod.DRAFT_MODEL: str(resolve_model("demo_draft")),
    DraftMethod.EAGLE3: str(resolve_model("demo_eagle3")),
}
TEXT = (
    "usage: tar [OPTION...] [FILE]...\nGNU 'tar' saves many files together into a single tape or disk archive, and can "
    "restore individual files from the archive.\nusage: tar [OPTION...] [FILE]...\nGNU 'tar' saves many files"
)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


LETTERS = to_grammar("regex", r"[a-z0-9 ,.'\n-]{20,200}")
"""Forces no token, so that drafts are the drafter's."""
JSON = to_grammar(
    "json_schema",
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "number": {"type": "integer",'
    ' "minimum": 0, "maximum": 999}}, "required": ["name", "number"], "additionalProperties": false}',
)
ASPECTS: dict[str, dict[str, Any]] = {
    "choices": {"n": 2},
    "penalties": {
        "repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": -0.2,
        "bad_words": tuple(tuple(encode(words)) for words in (" the file", " the archive", " --tool", ", and")),
        "min_tokens": 20, "stop_token_ids": tuple(sorted({*range(0, 4096, 5), *EOS})),
    },
    "log-probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "letters": {"grammar": LETTERS},
    "JSON": {"grammar": JSON},
}  # fmt: skip
"""What a request may ask for besides."""


@dataclass(frozen=True)
class Asked:
    """A request, with the names of what it asks for."""

    aspects: tuple[str, ...]
    prompt: list[int]
    sampling: SamplingParams
    more: dict[str, Any]


def asked() -> list[Asked]:
    """Each of the aspects alone and with each other one, all of them, and none; every other request is greedy."""
    names = [name for name in ASPECTS if name != "JSON"]
    together = [(), *((name,) for name in ASPECTS), *combinations(ASPECTS, 2), tuple(names), (*names[:-1], "JSON")]
    requests = []
    for number, aspects in enumerate(one for one in together if not {"letters", "JSON"} <= set(one)):
        temperature = 0.0 if number % 2 else 0.8
        fields: dict[str, Any] = {"temperature": temperature, "seed": number, "stop_token_ids": EOS}
        for name in aspects:
            fields |= ASPECTS[name]
        more: dict[str, Any] = {key: fields.pop(key) for key in ("n", "grammar") if key in fields}
        sampling = SamplingParams(**fields)
        requests.append(Asked(aspects, encode(TEXT)[number:], sampling, more))
    return requests


REQUESTS = asked()


@dataclass(frozen=True)
class Condition:
    """What an engine does to requests."""

    scheduler: dict[str, Any] = field(default_factory=dict)
    num_blocks: int | None = None
    deaths: tuple[int, ...] = ()
    is_eager: bool = True
    """It drafts all that it may, and else as it finds worth the while."""
    rounds: int = 1
    shows: Callable[[list[StepPlan], EngineStats], bool] = lambda plans, stats: True
    """Whether it was so."""


def num_pieces(plans: list[StepPlan]) -> float:
    """Of a row's history."""
    return sum(len(plan.chunks) for plan in plans) / sum(len(plan.added) for plan in plans)


CONDITIONS = {
    "at once": Condition(),
    "worth the while": Condition(is_eager=False),
    "chunked prefill": Condition({"max_num_batched_tokens": 48}, shows=lambda plans, _: num_pieces(plans) > 2),
    "prefix cache": Condition(
        {"enable_prefix_caching": True}, rounds=2, shows=lambda _, stats: stats.cached_tokens > 1000
    ),
    "preemption": Condition(num_blocks=48, shows=lambda _, stats: stats.preemptions > 2),
    "deaths": Condition({"enable_prefix_caching": True}, deaths=(5, 12), shows=lambda _, stats: stats.restarts == 2),
}


@pytest.fixture(scope="module")
def make_config(worker_config):
    """Of a worker on the demo model, which matches grammars."""

    def make(method=None, num_blocks=None):
        speculation = None if method is None else SpeculationConfig(method, MAX_DRAFTS, METHODS[method])
        config = worker_config(
            DEMO, backend="cpu", dtype="bfloat16", max_model_len=512, speculation=speculation, tokenizer=str(DEMO),
            tokenizer_vocab_size=4096, eos_token_ids=EOS,
        )  # fmt: skip
        return replace(config, num_blocks=num_blocks)

    return make


@pytest.fixture(scope="module")
def known():
    """What is computed once."""
    return {}


@pytest.fixture
async def plain(known, make_config, in_process_executor, start_engine):
    """Of each request all that its caller is told without drafts."""
    if not known:
        engine = await start_engine(in_process_executor(make_config()), enable_prefix_caching=False)
        answers = submit(engine, with_drafts=False)
        await engine.finish(answers)
        assert not engine.stats.speculation.steps
        known["plain"] = [answer.output for answer in answers]
    return known["plain"]


def submit(engine, with_drafts=True):
    answers = []
    for one in REQUESTS:
        most = MAX_FORCED_DRAFTS if "grammar" in one.more else MAX_DRAFTS
        more = {**one.more, "max_drafts": most if with_drafts else 0}
        answers.append(engine.submit(one.prompt, one.sampling, MAX_TOKENS, **more))
    return answers


def check_drafts(answers):
    """Of those who ask for each thing drafts are right, and drafts are wrong."""
    for aspect in ASPECTS:
        drafted = accepted = 0
        for one, answer in zip(REQUESTS, answers, strict=True):
            told = answer.finished.speculation
            if aspect in one.aspects and told is not None:
                drafted += told.drafted
                accepted += told.accepted
        assert 0 < accepted < drafted, aspect


@pytest.fixture
def check(plain, make_config, in_process_executor, start_engine):
    """That a method's drafts change nothing under a condition."""

    async def check(method, way):
        executor = in_process_executor(make_config(method, way.num_blocks), way.is_eager, way.deaths)
        engine = await start_engine(executor, **{"enable_prefix_caching": False, **way.scheduler})
        for _ in range(way.rounds):
            answers = submit(engine)
            await engine.finish(answers)
            for one, answer, expected in zip(REQUESTS, answers, plain, strict=True):
                assert answer.output == expected, one
            if way.is_eager:
                check_drafts(answers)
        assert engine.stats.speculation.accepted > 0
        assert way.shows(executor.plans, engine.stats), engine.stats

    return check


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("method", METHODS)
async def test_drafts_change_nothing(check, method, condition):
    await check(method, CONDITIONS[condition])


@pytest.mark.soak
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("method", METHODS)
async def test_drafts_that_are_worth_the_while_change_nothing(check, method, condition):
    for _ in range(5):
        await check(method, dataclasses.replace(CONDITIONS[condition], is_eager=False))


@pytest.mark.parametrize(
    "method",
    [
        DraftMethod.DRAFT_MODEL,
        DraftMethod.EAGLE3,
        pytest.param(DraftMethod.NGRAM, marks=pytest.mark.soak),
        pytest.param(DraftMethod.SUFFIX, marks=pytest.mark.soak),
    ],
)
async def test_a_killed_worker_changes_nothing(plain, make_config, start_engine, method):
    """Sampled or greedy, with grammars, drafts and all."""
    worker = WorkerProcess(make_config(method))
    engine = await start_engine(worker)
    answers = submit(engine)
    async with asyncio.timeout(120):
        while min(len(answer.token_ids) for answer in answers[:4]) < 5:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
    assert not all(answer.finished for answer in answers)
    os.kill(worker.pid, signal.SIGKILL)
    await engine.finish(answers)
    assert engine.stats.restarts == 1
    assert [answer.output for answer in answers] == plain
    assert engine.stats.speculation.accepted > 0
