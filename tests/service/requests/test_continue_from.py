"""Requests that go on from others: the same tokens as with the whole context, for the same tenant, for a while."""

import asyncio
import hashlib

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor

BOTH = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
ENDLESS = 4000


def told(history, sampling):
    """A letter that depends on all that was said lately, and on how long that was."""
    return ord("a") + hash((len(history), *history[-20:])) % 26


def output(prompt, num_tokens):
    """What the model makes of a prompt."""
    history = list(prompt.encode())
    for _ in range(num_tokens):
        history.append(told(history, None))
    return bytes(history[len(prompt) :]).decode()


def worker(**options):
    return FakeExecutor(vocab_size=258, next_token=told, **options)


def start(text=None, max_tokens=20, continue_from="", chat=None, ids=None, stop=(), n=None, ref=1, **fields):
    sampling = pb.SamplingParams(max_tokens=max_tokens, stop=stop, n=n)
    prompt = {"text": text, "chat": chat, "token_ids": None if ids is None else pb.TokenIds(ids=ids)}
    given = {name: value for name, value in prompt.items() if value is not None}
    return pb.GenerationStart(ref=ref, sampling=sampling, output=BOTH, continue_from=continue_from, **given, **fields)


def said(*turns):
    roles = ("user", "assistant")
    return pb.Chat(messages=[pb.ChatMessage(role=roles[i % 2], content=text) for i, text in enumerate(turns)])


async def complete(service, *arguments, metadata=None, **fields):
    request = pb.CompleteRequest(start=start(*arguments, **fields))
    return await service.generation.Complete(request, metadata=metadata)


async def refusal(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await awaitable
    return error.value


def text_of(response):
    return response.choices[0].text


@pytest.fixture
async def service(start_service):
    return await start_service(worker())


class TestTokens:
    """What a request that goes on from another is answered."""

    async def test_text_is_added_to_the_context(self, service):
        first = await complete(service, "once upon a time there was")
        assert first.finished.may_continue
        more = await complete(service, " and then", continue_from=first.request_id)
        whole = await complete(service, f"once upon a time there was{text_of(first)} and then")
        assert text_of(more) == text_of(whole)
        assert more.finished.usage.prompt_tokens == whole.finished.usage.prompt_tokens == 26 + 20 + 9
        assert more.finished.usage.cached_tokens >= 32

    async def test_a_chat_has_only_the_new_messages(self, service):
        first = await complete(service, chat=said("what?"))
        second = await complete(service, chat=said("so?"), continue_from=first.request_id)
        whole = await complete(service, chat=said("what?", text_of(first), "so?"))
        assert text_of(second) == text_of(whole)
        third = await complete(service, chat=said("and?"), continue_from=second.request_id)
        whole = await complete(service, chat=said("what?", text_of(first), "so?", text_of(second), "and?"))
        assert text_of(third) == text_of(whole)
        assert third.finished.usage.prompt_tokens == whole.finished.usage.prompt_tokens

    async def test_an_output_that_reached_its_limit_goes_on_without_a_prompt(self, service):
        first = await complete(service, "hello", max_tokens=7)
        rest = await complete(service, continue_from=first.request_id, max_tokens=13)
        assert text_of(first) + text_of(rest) == text_of(await complete(service, "hello", max_tokens=20))

    async def test_any_number_may_branch(self, service):
        first = await complete(service, "hello")
        branches = await asyncio.gather(
            *(complete(service, f" {i}", continue_from=first.request_id) for i in range(8)),
            complete(service, continue_from=first.request_id, n=3),
        )
        for i, branch in enumerate(branches[:8]):
            assert text_of(branch) == text_of(await complete(service, f"hello{text_of(first)} {i}"))
        assert len(branches[8].choices) == 3

    @pytest.mark.parametrize("caching", [True, False])
    async def test_without_a_cache_all_is_computed_and_the_tokens_are_the_same(self, start_service, caching):
        service = await start_service(worker(), SchedulerConfig(enable_prefix_caching=caching))
        first = await complete(service, "x" * 100)
        more = await complete(service, "y", continue_from=first.request_id)
        assert text_of(more) == text_of(await complete(service, f"{'x' * 100}{text_of(first)}y"))
        assert (more.finished.usage.cached_tokens > 0) == caching

    async def test_on_a_stream_and_on_a_stream_of_ones_own(self, service, new_reading):
        first = await complete(service, "hello")
        begun = start(" more", continue_from=first.request_id)
        whole = text_of(await complete(service, f"hello{text_of(first)} more"))
        frames = [pb.GenerateRequest(start=begun)]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        assert reading.outcomes[1].text == whole
        assert reading.outcomes[1].finished[0].may_continue
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=begun))
        assert "".join([delta.text async for message in call for delta in message.deltas]) == whole


class TestContext:
    """What a request leaves behind: its prompt, and the output that its caller was given."""

    async def left_behind(self, service, request_id):
        response = await complete(service, continue_from=request_id, max_tokens=1)
        return response.finished.usage.prompt_tokens

    async def test_a_stopping_token_is_no_part_of_it(self, start_service):
        def ends_at_eight(history, sampling):
            return 256 if len(history) == 8 else ord("x")

        service = await start_service(FakeExecutor(vocab_size=258, next_token=ends_at_eight))
        first = await complete(service, "hello")
        assert list(first.choices[0].token_ids) == [*b"xxx", 256]
        assert await self.left_behind(service, first.request_id) == 8

    async def test_tokens_of_a_stop_string_are_no_part_of_it(self, service):
        whole = text_of(await complete(service, "hello"))
        first = await complete(service, "hello", stop=[whole[9:12]])
        assert text_of(first) == whole[: whole.index(whole[9:12])]
        assert first.finished.usage.output_tokens == len(first.choices[0].token_ids) > len(text_of(first))
        assert await self.left_behind(service, first.request_id) == 5 + len(text_of(first))

    async def test_a_cancelled_one_keeps_all_its_tokens_since_all_are_sent(self, start_service, new_reading):
        service = await start_service(worker(seconds_per_step=0.002))
        whole = output("hello", ENDLESS)
        call = service.generation.Generate()
        # Every letter may begin a stop string, so that a token is always held back until the end.
        begun = start("hello", max_tokens=ENDLESS, stop=[letter + "!" for letter in "abcdefghijklmnopqrstuvwxyz"])
        await call.write(pb.GenerateRequest(start=begun))
        reading = await new_reading().read_until(call, lambda reading: len(reading.outcomes[1].text) > 20)
        await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        await call.done_writing()
        outcome = (await reading.read(call)).outcomes[1]
        [finished] = outcome.finished
        assert finished.status.code == grpc.StatusCode.CANCELLED.value[0]
        assert finished.may_continue
        assert finished.usage.output_tokens == len(outcome.token_ids) == len(outcome.text)
        assert await self.left_behind(service, finished.request_id) == 5 + len(outcome.token_ids)
        assert whole.startswith(outcome.text)
        rest = await complete(service, continue_from=finished.request_id, max_tokens=10)
        assert whole.startswith(outcome.text + text_of(rest))

    async def test_a_stream_that_broke_off_can_be_gone_on_from(self, start_service, new_reading):
        service = await start_service(worker(seconds_per_step=0.002))
        whole = output("hello", ENDLESS)
        call = service.generation.Generate()
        await call.write(pb.GenerateRequest(start=start("hello", max_tokens=ENDLESS)))
        reading = await new_reading().read_until(call, lambda reading: len(reading.outcomes[1].text) > 20)
        call.cancel()
        await asyncio.wait_for(service.engine.wait_idle(), 120)
        request_id = reading.outcomes[1].accepted[0].request_id
        length = await self.left_behind(service, request_id) - 5
        assert length >= len(reading.outcomes[1].text)
        rest = await complete(service, continue_from=request_id, max_tokens=10)
        assert whole[length:].startswith(text_of(rest))

    @pytest.mark.parametrize("kind", ["several choices", "never began", "refused", "deadline"])
    async def test_what_leaves_no_context(self, start_service, new_reading, kind):
        service = await start_service(worker(seconds_per_step=0.002), SchedulerConfig(max_num_seqs=2))
        fields = {
            "several choices": {"n": 2, "max_tokens": 2},
            "never began": {"max_tokens": ENDLESS},
            "refused": {"max_tokens": 0},
            "deadline": {"max_tokens": ENDLESS, "timeout_ms": 30},
        }[kind]
        call = service.generation.Generate()
        if kind == "never began":
            for ref in (8, 9):
                await call.write(pb.GenerateRequest(start=start("x", ENDLESS, ref=ref)))
        await call.write(pb.GenerateRequest(start=start("hello", ref=1, **fields)))
        if kind == "never began":
            reading = await new_reading().read_until(call, lambda reading: bool(reading.outcomes[1].accepted))
            await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        else:
            reading = new_reading()
        await reading.read_until(call, lambda reading: bool(reading.outcomes[1].finished))
        [finished] = reading.outcomes[1].finished
        assert not finished.may_continue
        await call.write(pb.GenerateRequest(start=start("x", continue_from=finished.request_id, ref=2)))
        await reading.read_until(call, lambda reading: bool(reading.outcomes[2].finished))
        assert reading.outcomes[2].finished[0].status.code == NOT_FOUND
        call.cancel()


class TestNotFound:
    """A context that is not there, or not for this caller."""

    @pytest.fixture
    def keys(self, tmp_path, load_keys):
        lines = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {key}" for key in ("one", "two")]
        path = tmp_path / "keys"
        path.write_text("\n".join([*lines, f"sha256:{hashlib.sha256(b'gate').hexdigest()} gate act-for-others"]))
        return load_keys(path)

    async def test_another_tenants_is_as_if_it_were_not(self, start_service, keys, details_of):
        service = await start_service(worker(), authenticator=keys)

        async def ask(key, **fields):
            metadata = (("authorization", f"Bearer {key}"),)
            return await complete(service, "hello", metadata=metadata, **fields)

        first = await ask("one")
        told_of = []
        for key, request_id in (("two", first.request_id), ("gate", first.request_id), ("two", "0" * 26), ("one", "?")):
            error = await refusal(ask(key, continue_from=request_id))
            details = details_of(error)
            told_of.append((error.code(), error.details(), details["ErrorInfo"], set(details)))
        assert told_of[0][:2] == (
            grpc.StatusCode.NOT_FOUND,
            "no context of that request is kept, or no longer; send the whole context instead",
        )
        assert told_of == [told_of[0]] * 4
        assert text_of(await ask("gate", tenant="one", continue_from=first.request_id)) == text_of(
            await ask("one", continue_from=first.request_id)
        )

    async def test_it_is_refused_before_anything_is_sent_so_that_it_may_be_tried_elsewhere(self, service):
        request = pb.GenerateOneRequest(start=start("hello", continue_from="gone"))
        error = await refusal(service.generation.GenerateOne(request).read())
        assert error.code() is grpc.StatusCode.NOT_FOUND

    async def test_after_its_time(self, start_service):
        service = await start_service(worker(), conversation_ttl_s=0.05)
        first = await complete(service, "hello")
        assert first.finished.may_continue
        await asyncio.sleep(0.06)
        assert (await refusal(complete(service, continue_from=first.request_id))).code() is grpc.StatusCode.NOT_FOUND

    async def test_when_others_needed_the_room(self, start_service):
        service = await start_service(worker(), conversation_tokens=60)
        first, second, third = [await complete(service, "hello") for _ in range(3)]
        assert all(each.finished.may_continue for each in (first, second, third))
        assert (await refusal(complete(service, continue_from=first.request_id))).code() is grpc.StatusCode.NOT_FOUND
        assert text_of(await complete(service, continue_from=second.request_id))
        assert not (await complete(service, "x" * 50)).finished.may_continue

    @pytest.mark.parametrize("settings", [{"conversation_ttl_s": 0.0}, {"conversation_tokens": 0}])
    async def test_nothing_is_kept_if_the_operator_disables_it(self, start_service, settings):
        service = await start_service(worker(), **settings)
        assert not (await complete(service, "hello")).finished.may_continue

    async def test_a_context_that_fills_the_models_is_too_long_to_go_on(self, start_service):
        service = await start_service(worker(max_model_len=64))
        first = await complete(service, "x" * 44)
        error = await refusal(complete(service, continue_from=first.request_id, max_tokens=1))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").startswith("continue_from: at most 63 tokens together with the context")


@pytest.mark.parametrize("retained", [True, False])
async def test_a_turn_computes_its_new_tokens_and_at_most_16_old_ones_when_others_filled_the_pool_twice(
    start_service, retained
):
    """512 tokens of context in a pool of 1,536; without retention the same turn computes them all."""
    service = await start_service(worker(num_blocks=96))
    first = await complete(service, "x" * 500, max_tokens=12, retain_ms=60_000 if retained else 0)
    for index in range(8):
        others = f"{index:04}" * 100
        await asyncio.gather(complete(service, others + "a", max_tokens=4), complete(service, others[1:], max_tokens=4))
    more = await complete(service, "y" * 40, continue_from=first.request_id)
    usage = more.finished.usage
    assert usage.prompt_tokens == 552
    # The last token's KV is not computed when it is sent, so the last block of the context is not cached.
    assert usage.cached_tokens == (496 if retained else 0)
