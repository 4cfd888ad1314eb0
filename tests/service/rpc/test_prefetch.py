"""Prompts that are computed ahead, and contexts that are given up."""

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.request import Context
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.requests.contexts import ContextStore

TEXT = "The kernel reads each block of keys once, and the page table says where it is. " * 8
OTHERS = 12


@pytest.fixture
async def service(start_service):
    return await start_service(FakeExecutor(vocab_size=258, num_blocks=200))


def start(text, max_tokens=8, **fields):
    return pb.GenerationStart(text=text, sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields)


async def complete(service, text, **fields):
    return (await service.generation.Complete(pb.CompleteRequest(start=start(text, **fields)))).finished


async def fill_cache(service):
    """Other prompts, enough to evict all that is not retained."""
    for number in range(OTHERS):
        await complete(service, f"{number} {chr(97 + number) * len(TEXT)}")


async def test_the_request_finds_its_prompt(service):
    first = await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT)))
    assert (first.prompt_tokens, first.cached_tokens) == (len(TEXT), 0)
    await fill_cache(service)
    again = await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT)))
    assert again.cached_tokens > len(TEXT) - 32
    assert (await complete(service, TEXT)).usage.cached_tokens > len(TEXT) - 32


async def test_a_chat_without_the_beginning_of_an_answer(service):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=TEXT)])
    ahead = await service.generation.Prefetch(pb.PrefetchRequest(start=pb.GenerationStart(chat=chat)))
    answer = await service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(chat=chat)))
    assert answer.finished.usage.cached_tokens > ahead.prompt_tokens - 32


async def test_without_retention_it_is_ordinary_cache(service):
    await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT, retain_ms=0)))
    await fill_cache(service)
    assert (await complete(service, TEXT)).usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("bad", "code", "says"),
    [
        (pb.GenerationStart(), grpc.StatusCode.INVALID_ARGUMENT, "prompt: is required"),
        (start("x" * 5000), grpc.StatusCode.INVALID_ARGUMENT, "must be 1 to"),
        (start("x", continue_from="nobody"), grpc.StatusCode.NOT_FOUND, "no context"),
        (start("x", open=True), grpc.StatusCode.INVALID_ARGUMENT, "start.open: only on a Generate stream"),
        (start("x", tenant="other"), grpc.StatusCode.PERMISSION_DENIED, "may not act"),
    ],
    ids=["nothing", "too long", "no context", "open", "a tenant"],
)
async def test_what_is_refused(service, bad, code, says):
    with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
        await service.generation.Prefetch(pb.PrefetchRequest(start=bad))
    assert caught.value.code() is code


async def test_it_counts_against_the_tokens_of_its_tenant(start_service):
    limits = TenantLimits(tokens_per_minute=len(TEXT) + 10)
    service = await start_service(FakeExecutor(vocab_size=258), SchedulerConfig(default_tenant=limits))
    await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT)))
    with pytest.raises(grpc.aio.AioRpcError, match="tokens of this minute"):
        await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT)))


async def release(service, *request_ids, tenant=""):
    answer = await service.generation.Release(pb.ReleaseRequest(request_ids=request_ids, tenant=tenant))
    return list(answer.unknown_request_ids)


async def test_a_context_that_is_given_up_is_evicted_and_not_continued(service):
    kept, given_up = [await complete(service, f"{n} {TEXT}", retain_ms=600_000) for n in range(2)]
    assert await release(service, given_up.request_id, "nobody") == ["nobody"]
    with pytest.raises(grpc.aio.AioRpcError, match="no context"):
        await complete(service, "and", continue_from=given_up.request_id)
    await fill_cache(service)
    assert (await complete(service, f"1 {TEXT}")).usage.cached_tokens == 0
    assert (await complete(service, "and", continue_from=kept.request_id)).usage.cached_tokens > len(TEXT) - 32


async def test_what_another_branch_shares_stays(service):
    trunk = await complete(service, TEXT, retain_ms=600_000)
    branches = [
        await complete(service, text * 60, continue_from=trunk.request_id, retain_ms=600_000) for text in ("a", "b")
    ]
    assert await release(service, trunk.request_id, branches[1].request_id) == []
    await fill_cache(service)
    usage = (await complete(service, "more", continue_from=branches[0].request_id)).usage
    assert usage.cached_tokens > usage.prompt_tokens - 48


@pytest.mark.parametrize("retain_ms", [300_000, 600_000], ids=["longer than the prefetch", "as long"])
async def test_what_was_prefetched_stays(service, retain_ms):
    context = await complete(service, TEXT, retain_ms=retain_ms)
    await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT, retain_ms=300_000)))
    assert await release(service, context.request_id) == []
    await fill_cache(service)
    assert (await complete(service, TEXT)).usage.cached_tokens > len(TEXT) - 32


def test_only_the_contexts_of_the_own_tenant():
    contexts = ContextStore(600.0, 1000)
    assert contexts.keep("R", "mine", Context(list(range(64)), [bytes([n]) * 32 for n in range(4)]), wanted=True)
    assert contexts.release("R", "other") is None
    assert contexts.release("R", "mine") == [bytes([n]) * 32 for n in range(4)]
    assert contexts.release("R", "mine") is None
    assert not contexts.num_tokens


async def test_with_recurrent_states_prompts_and_contexts_are_found_too(start_service):
    """Their states are kept as their KV is."""
    service = await start_service(FakeExecutor(vocab_size=258, num_blocks=200, num_state_slots=12))
    await service.generation.Prefetch(pb.PrefetchRequest(start=start(TEXT)))
    context = await complete(service, TEXT[::-1], retain_ms=600_000)
    await fill_cache(service)
    assert (await complete(service, TEXT)).usage.cached_tokens > len(TEXT) - 32
    usage = (await complete(service, "and", continue_from=context.request_id)).usage
    assert usage.cached_tokens > len(TEXT) - 32
