"""The threads that prepare prompts: bounded, and the event loop turns while they work."""

import asyncio
import os
import threading
import weakref
from functools import partial

import pytest
from waiting import until

from penstock.kv.block_hash import hash_blocks
from penstock.models.executor.priority import BACKGROUND_NICE
from penstock.service.auth.identity import Principal, current_principal
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.tokenizer import TokenizerPool
from penstock.service.thread_pool import FairThreadPool


@pytest.fixture
def pool(byte_tokenizer):
    pool = TokenizerPool(byte_tokenizer, block_size=4, max_prompt_tokens=50, max_waiting_bytes=100_000)
    yield pool
    pool.close()


def test_prompts_come_with_their_block_hashes(pool):
    token_ids = pool.tokenizer.encode("What is a penstock?")
    prompt = pool.prompt(token_ids, b"salt", pool.limit("text"))
    assert prompt.token_ids == token_ids
    assert prompt.block_hashes == hash_blocks(token_ids, 4, b"salt")
    assert len(prompt.block_hashes) == len(token_ids) // 4 > 0
    assert not set(prompt.block_hashes) & set(pool.prompt(token_ids, b"pepper", pool.limit("text")).block_hashes)


@pytest.mark.parametrize(
    ("token_ids", "problem"), [([], "1 to 50 tokens"), ([1] * 51, "it has 51"), ([10**6], "vocabulary size")]
)
def test_prompts_out_of_bounds_are_refused(pool, token_ids, problem):
    with pytest.raises(ServiceError, match=problem):
        pool.prompt(token_ids, b"", pool.limit("token_ids"))


async def test_a_text_far_too_long_is_refused_before_it_is_tokenized(pool):
    assert pool.tokenizer.longest_token_bytes == 1
    pool.check_text("x" * 50)
    with pytest.raises(ServiceError, match="text: must be 1 to 50 tokens; it has 51 at least"):
        pool.check_text("x" * 51)


async def test_more_than_the_pool_holds_is_refused_and_it_recovers(pool):
    gate = threading.Event()
    blocked = [asyncio.ensure_future(pool.run(gate.wait, 15_000)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as caught:
        await pool.run(lambda: None, 15_000)
    assert caught.value.reason is Reason.PREPARATION_FULL
    gate.set()
    await asyncio.gather(*blocked)
    blocked = [asyncio.ensure_future(pool.run(lambda: "room again", 15_000)) for _ in range(3)]
    assert await asyncio.gather(*blocked) == ["room again"] * 3


async def test_a_tenant_leaves_room_for_others(pool):
    """However much it sends, half of it is theirs."""
    gate = threading.Event()
    blocked = [asyncio.ensure_future(pool.run(gate.wait, 5_000, "greedy")) for _ in range(30)]
    await asyncio.sleep(0)
    refused = [task for task in blocked if task.done()]
    blocked += [asyncio.ensure_future(pool.run(gate.wait, 20_000, "modest"))]
    await asyncio.sleep(0)
    assert not blocked[-1].done()
    gate.set()
    outcomes = await asyncio.gather(*blocked, return_exceptions=True)
    assert len(refused) > 15
    assert {error.reason for error in outcomes if isinstance(error, ServiceError)} == {Reason.PREPARATION_FULL}
    assert outcomes.count(True) == len(blocked) - len(refused)


async def test_tenants_take_turns_and_each_has_a_thread_at_a_time():
    """Here for one thread: see the next test for what more of them do."""
    lane = FairThreadPool("test", 1, 100_000)
    gate = threading.Event()
    order: list[str] = []
    tenants = ["greedy"] * 4 + ["modest", "other"] * 2
    blocked: list[asyncio.Future[object]] = [asyncio.ensure_future(lane.run(gate.wait, 100, "greedy"))]
    await until(lambda: lane._jobs["greedy"] == 1)
    blocked += [asyncio.ensure_future(lane.run(partial(order.append, name), 100, name)) for name in tenants]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*blocked)
    lane.close()
    assert order == ["greedy", "modest", "other"] * 2 + ["greedy"] * 2


@pytest.mark.parametrize("num_bytes", [100, 100_000], ids=["short", "long"])
async def test_nobody_waits_for_a_job_of_another_tenant(byte_tokenizer, num_bytes):
    """A job cannot be interrupted, and one text may take seconds."""
    pool = TokenizerPool(byte_tokenizer, block_size=4, max_prompt_tokens=50)
    gate = threading.Event()
    running: list[str] = []

    def work(name: str) -> None:
        running.append(name)
        gate.wait()

    greedy = [asyncio.ensure_future(pool.run(partial(work, "greedy"), num_bytes, "greedy")) for _ in range(8)]
    try:
        async with asyncio.timeout(120):
            await until(lambda: bool(running))
            await pool.run(lambda: None, num_bytes, "modest")
            assert running == ["greedy"]
    finally:
        gate.set()
        await asyncio.gather(*greedy)
        pool.close()
    assert running == ["greedy"] * 8


async def test_a_lone_tenant_uses_all_its_threads(byte_tokenizer):
    lane = FairThreadPool("test", 4, 100_000, threads_per_tenant=2)
    both = threading.Barrier(2)
    async with asyncio.timeout(120):
        await asyncio.gather(*[lane.run(both.wait, 1, "a") for _ in range(6)])
    lane.close()


async def test_work_without_a_tenant_is_the_callers(pool):
    gate = threading.Event()
    blocked = []
    for tenant in ("a", "a", "b"):
        current_principal.set(Principal(tenant))
        blocked.append(asyncio.create_task(pool.run(gate.wait, 100)))
    await asyncio.sleep(0)
    assert set(pool._short._waiting_bytes) == {"a", "b"}
    gate.set()
    await asyncio.gather(*blocked)


class Input:
    """What work holds."""


async def test_work_that_is_dropped_holds_nothing(pool):
    """Who sends much and cancels it at once would fill the memory with what waits for its turn."""
    gate = threading.Event()
    held = Input()
    blocked = asyncio.ensure_future(pool.run(gate.wait, 100))
    dropped = asyncio.ensure_future(pool.run(partial(id, held), 100))
    await asyncio.sleep(0)
    dropped.cancel()
    await asyncio.gather(dropped, return_exceptions=True)
    watch = weakref.ref(held)
    del held, dropped
    await asyncio.sleep(0)
    assert watch() is None
    assert not blocked.done()
    gate.set()
    await blocked


async def test_what_waits_ends_with_the_pool(pool):
    gate = threading.Event()
    tasks = [asyncio.ensure_future(pool.run(gate.wait, 100)) for _ in range(3)]
    await asyncio.sleep(0)
    pool.close()
    gate.set()
    async with asyncio.timeout(120):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[2], asyncio.CancelledError)


async def test_what_is_short_never_waits_for_what_is_long(byte_tokenizer):
    pool = TokenizerPool(byte_tokenizer, block_size=4, max_prompt_tokens=50, max_waiting_bytes=700_000)
    gate = threading.Event()
    long = [asyncio.ensure_future(pool.run(gate.wait, 100_000)) for _ in range(3)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as caught:
            await pool.run(lambda: None, 100_000)
        assert caught.value.reason is Reason.PREPARATION_FULL
        async with asyncio.timeout(120):
            assert await pool.run(lambda: "at once", 50_000) == "at once"
        assert not any(task.done() for task in long)
    finally:
        gate.set()
        await asyncio.gather(*long)
        pool.close()


async def test_a_cancelled_caller_gives_its_room_back(pool):
    gate = threading.Event()
    blocked = [asyncio.ensure_future(pool.run(gate.wait, 20_000)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in blocked:
        task.cancel()
    gate.set()
    await asyncio.gather(*blocked, return_exceptions=True)
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if not pool._short._waiting_bytes:
            break
    assert not pool._short._waiting_bytes


async def test_a_library_panic_fails_only_its_request(pool):
    class Panic(BaseException):
        """As Rust's are."""

    def work():
        raise Panic("index out of bounds")

    with pytest.raises(RuntimeError, match="panicked: index out of bounds"):
        await pool.run(work, 1)
    assert await pool.run(lambda: 1, 1) == 1


async def test_work_larger_than_the_whole_limit_runs_alone(pool):
    assert await pool.run(lambda: 1, 10**9) == 1


async def test_the_loop_turns_while_a_long_text_is_encoded(byte_tokenizer):
    """The library's call for a single text would hold Python's lock throughout: then the loop could not turn at all."""
    text = "What is a penstock? It is a gated pipe. " * 20_000
    pool = TokenizerPool(byte_tokenizer, block_size=16, max_prompt_tokens=10**7)
    encoding = asyncio.ensure_future(pool.run(lambda: byte_tokenizer.encode(text), len(text)))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    pool.close()
    assert turns > 10


async def test_only_huge_texts_have_a_low_priority(byte_tokenizer):
    pool = TokenizerPool(byte_tokenizer, block_size=4, max_prompt_tokens=50)

    def nice():
        return os.getpriority(os.PRIO_PROCESS, 0)  # the calling thread's, on Linux

    short, long, huge = [await pool.run(nice, num_bytes) for num_bytes in (10, 100_000, 2 << 20)]
    pool.close()
    assert (short, long) == (nice(), nice())
    assert huge == max(nice(), BACKGROUND_NICE)
