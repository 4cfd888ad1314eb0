"""Prompts that are computed ahead: who is charged for them, and that the work is not done on the event loop."""

import asyncio
import threading
import time
from collections import Counter

import grpc
import pytest
from waiting import until
from wire.frames import PIECES, TEXT, append, begin, commit

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.live import open_prompt
from penstock.service.requests.live.open_prompt import PromptPieces
from penstock.service.requests.live.warm_up import PaidPrefix, PrefixWarmer

BLOCK_SIZE = 16
HASHES = [bytes([number]) * 32 for number in range(6)]


class TestPaidPrefix:
    """A block is charged once."""

    def test_what_has_been_paid(self):
        paid = PaidPrefix(BLOCK_SIZE)
        assert paid.num_tokens(HASHES) == 0
        paid.pay(HASHES[:3])
        assert paid.num_tokens(HASHES[:2]) == 2 * BLOCK_SIZE
        assert paid.num_tokens(HASHES) == 3 * BLOCK_SIZE
        paid.pay(HASHES)
        assert paid.num_tokens(HASHES) == 6 * BLOCK_SIZE

    def test_other_blocks_are_not_paid(self):
        paid = PaidPrefix(BLOCK_SIZE)
        paid.pay(HASHES)
        changed = [*HASHES[:2], *(bytes([100 + number]) * 32 for number in range(4))]
        assert paid.num_tokens(changed) == 2 * BLOCK_SIZE
        paid.pay(changed)
        assert paid.num_tokens(changed) == 6 * BLOCK_SIZE
        assert paid.num_tokens(HASHES) == 2 * BLOCK_SIZE


async def computed(stream, *frames):
    """Sends frames, and waits until a step has computed more of the prompt."""
    before = stream.service.engine.counters.prefill_tokens
    await stream.send(*frames)
    await until(lambda: stream.service.engine.counters.prefill_tokens > before)


async def test_its_tenant_pays_when_it_is_computed_and_not_again(open_frames):
    limits = TenantLimits(tokens_per_minute=len(TEXT) + 30)
    stream = await open_frames(scheduler=SchedulerConfig(default_tenant=limits))
    await computed(stream, begin(open=True, max_tokens=1), append(text=TEXT))
    with pytest.raises(grpc.aio.AioRpcError, match="tokens of this minute"):
        await stream.whole(text=TEXT[1:])
    await stream.send(append(text="!"), commit())
    finished = await stream.finished()
    assert finished.status.code == 0
    assert finished.usage.prompt_tokens == len(TEXT) + 1


async def test_one_that_exceeds_the_tokens_is_not_computed_ahead(open_frames, monkeypatch):
    limits = TenantLimits(tokens_per_minute=len(TEXT) + 30)
    stream = await open_frames(scheduler=SchedulerConfig(default_tenant=limits))
    await stream.service.generation.Prefetch(pb.PrefetchRequest(start=pb.GenerationStart(text=TEXT)))
    refused = asyncio.Event()
    once = open_prompt.OpenPrompt._warm_up_once

    async def noting(*arguments):
        rest_s = await once(*arguments)
        refused.set()
        return rest_s

    monkeypatch.setattr(open_prompt.OpenPrompt, "_warm_up_once", noting)
    before = stream.service.engine.counters.prefill_tokens
    await stream.send(begin(open=True), append(text=TEXT[::-1]))
    async with asyncio.timeout(60):
        await refused.wait()
    assert stream.service.engine.counters.prefill_tokens == before
    await stream.send(commit())
    assert stream.reason_of((await stream.finished()).status) == "TENANT_TOKENS"


async def test_one_that_is_refused_is_tokenized_once(open_frames, monkeypatch):
    """And again only if the prompt has changed."""
    prompts, refusals, prepare = [], [], PrefixWarmer.prepare

    async def noting(warmer, whole, *arguments):
        prompts.append(whole().text)
        return await prepare(warmer, whole, *arguments)

    async def refusing(*arguments):
        refusals.append(arguments)
        raise ServiceError(Reason.TENANT_TOKENS, retry_after_ms=10)

    monkeypatch.setattr(PrefixWarmer, "prepare", noting)
    monkeypatch.setattr(PrefixWarmer, "run", refusing)
    stream = await open_frames()
    await stream.send(begin(open=True), append(text="a" * 100))
    await until(lambda: len(refusals) > 3)
    assert prompts == ["a" * 100]
    await stream.send(append(text="b"))
    await until(lambda: len(prompts) == 2)
    monkeypatch.undo()
    await computed(stream)
    assert prompts == ["a" * 100, "a" * 100 + "b"]


async def test_it_counts_as_no_request(open_frames):
    stream = await open_frames()
    await computed(stream, begin(open=True), append(text=TEXT))
    await stream.service.generation.Prefetch(pb.PrefetchRequest(start=pb.GenerationStart(text="p" + TEXT)))
    stats = stream.service.engine.stats()
    assert (stats.requests, stats.finished, stats.output_tokens) == (0, 0, 0)
    await stream.send(commit())
    await stream.finished()
    assert stream.service.engine.stats().finished == 1


async def test_it_leaves_the_places_of_its_tenant_to_requests(open_frames):
    config = SchedulerConfig(default_tenant=TenantLimits(max_live_requests=1), max_num_seqs=1)
    executor = FakeExecutor(vocab_size=258, seconds_per_step=0.2)
    stream = await open_frames(executor, scheduler=config)
    await computed(stream, begin(open=True), append(text=TEXT))
    answer = await stream.whole(text="other", max_tokens=2)
    assert answer.finished.usage.output_tokens == 2


async def test_threads_join_and_check_one_prompt_at_a_time(open_frames, monkeypatch):
    """The loop does not, however many prompts are open."""
    threads: set[int] = set()
    at_once, most_at_once = 0, 0
    make_whole, check = PromptPieces.whole, RequestBuilder.check
    lock = threading.Lock()

    def joining(pieces):
        nonlocal at_once, most_at_once
        threads.add(threading.get_ident())
        with lock:
            at_once += 1
            most_at_once = max(most_at_once, at_once)
        time.sleep(0.002)  # gives others time to begin
        whole = make_whole(pieces)
        with lock:
            at_once -= 1
        return whole

    checked: Counter[bool] = Counter()

    def checking(builder, start):
        checked[threading.get_ident() == threading.main_thread().ident] += not start.open
        check(builder, start)

    monkeypatch.setattr(PromptPieces, "whole", joining)
    monkeypatch.setattr(RequestBuilder, "check", checking)
    stream = await open_frames()
    refs = range(1, 31)
    await stream.send(*(begin(ref=ref, open=True) for ref in refs))
    await stream.send(*(append(ref=ref, text=f"{ref} {piece}") for piece in PIECES[:3] for ref in refs))
    await until(lambda: checked.total() >= 3 * len(refs) // 2)
    assert threading.main_thread().ident not in threads
    assert not checked[True]
    assert most_at_once == 1


async def test_threads_join_long_prompts_that_are_committed(open_frames, monkeypatch):
    threads: set[int] = set()
    make_whole = PromptPieces.whole

    def joining(pieces):
        threads.add(threading.get_ident())
        return make_whole(pieces)

    monkeypatch.setattr(PromptPieces, "whole", joining)
    stream = await open_frames()
    await stream.send(begin(open=True), *(append(text="x") for _ in range(1000)), commit())
    assert (await stream.finished()).usage.prompt_tokens == 1000
    assert threading.main_thread().ident not in threads


async def test_requests_do_not_wait_for_it(open_frames, monkeypatch):
    begun, gate, make_whole = threading.Event(), threading.Event(), PromptPieces.whole

    def joining(pieces):
        begun.set()
        gate.wait()
        return make_whole(pieces)

    monkeypatch.setattr(PromptPieces, "whole", joining)
    stream = await open_frames()
    await stream.send(begin(open=True), append(text=TEXT))
    try:
        await until(begun.is_set)
        async with asyncio.timeout(60):
            answer = await stream.whole(text="other")
    finally:
        gate.set()
    assert answer.finished.status.code == 0
