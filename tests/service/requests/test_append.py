"""Prompts that arrive in pieces, and tokens that are injected into outputs."""

import asyncio
import time

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.injection import MAX_WAITING_INJECTIONS
from penstock.service.requests.open_prompt import MAX_OPEN_BYTES, OpenPromptBudget

TEXT = "The kernel reads each block of keys once, and the page table says where it is. " * 4
PIECES = [TEXT[at : at + 30] for at in range(0, len(TEXT), 30)]
KIND = pb.FrameKind.Name


def begin(ref=1, max_tokens=12, **fields):
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, ignore_eos=True)
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
    fields = {"sampling": sampling, "output": output} | fields
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, **fields))


def append(ref=1, **content):
    return pb.GenerateRequest(append=pb.GenerationAppend(ref=ref, **content))


def commit(ref=1):
    return pb.GenerateRequest(commit=pb.GenerationCommit(ref=ref))


def chat(*texts, role="user", **fields):
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for text in texts], **fields)


class Stream:
    """One multiplexed stream, and what it brought."""

    def __init__(self, service, reading):
        self.service = service
        self.call = service.generation.Generate()
        self.reading = reading

    async def send(self, *frames):
        for frame in frames:
            await self.call.write(frame)

    async def until(self, enough):
        async with asyncio.timeout(120):
            await self.reading.read_until(self.call, lambda reading: bool(enough()))

    def outcome(self, ref=1):
        return self.reading.outcomes[ref]

    async def finished(self, ref=1):
        await self.until(lambda: self.outcome(ref).finished)
        return self.outcome(ref).finished[0]

    @property
    def refused(self):
        """The refused frames: kind, ref and reason."""
        return [
            (KIND(refused.frame).removeprefix("FRAME_KIND_"), refused.ref, self.reason_of(refused.status))
            for message in self.reading.messages
            for refused in message.frames_refused
        ]

    @property
    def injected(self):
        return [each for message in self.reading.messages for each in message.injected]

    async def whole(self, **start):
        """The answer to the same prompt at once."""
        return await self.service.generation.Complete(pb.CompleteRequest(start=begin(**start).start))


@pytest.fixture
def open_stream(start_service, new_reading, details_of):
    async def open_stream(executor=None, scheduler=None, **config):
        service = await start_service(executor or FakeExecutor(vocab_size=258), scheduler, **config)
        stream = Stream(service, new_reading())
        stream.reason_of = lambda status: details_of(status)["ErrorInfo"].reason
        return stream

    return open_stream


def paced(seconds_per_step=0.005, **options):
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


class TestOpenPrompt:
    """A prompt in pieces is the same as the prompt at once."""

    @pytest.mark.parametrize("first", [{}, {"text": PIECES[0]}], ids=["nothing at first", "a text at first"])
    async def test_of_text(self, open_stream, first):
        stream = await open_stream()
        await stream.send(begin(open=True, **first))
        await stream.send(*(append(text=piece) for piece in PIECES[len(first) :]), commit())
        finished = await stream.finished()
        whole = await stream.whole(text=TEXT)
        assert finished.status.code == 0
        assert stream.outcome().token_ids == whole.choices[0].token_ids
        assert finished.usage.prompt_tokens == whole.finished.usage.prompt_tokens == len(TEXT)
        assert not stream.refused

    async def test_of_token_ids(self, open_stream):
        stream = await open_stream()
        ids = list(TEXT.encode())
        await stream.send(begin(open=True, token_ids=pb.TokenIds(ids=ids[:50])))
        await stream.send(append(token_ids=pb.TokenIds(ids=ids[50:51])), append(token_ids=pb.TokenIds(ids=ids[51:])))
        await stream.send(commit())
        assert (await stream.finished()).usage.prompt_tokens == len(ids)
        assert stream.outcome().token_ids == (await stream.whole(token_ids=pb.TokenIds(ids=ids))).choices[0].token_ids

    async def test_of_messages(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(open=True, chat=chat("Be brief.", role="system")))
        await stream.send(append(chat=chat("Hello")), append(chat=chat("Hi.", role="assistant")))
        await stream.send(append(chat=chat("And now?")), commit())
        await stream.finished()
        messages = [*chat("Be brief.", role="system").messages, *chat("Hello").messages]
        messages += [*chat("Hi.", role="assistant").messages, *chat("And now?").messages]
        whole = await stream.whole(chat=pb.Chat(messages=messages))
        assert stream.outcome().token_ids == whole.choices[0].token_ids

    async def test_pieces_are_taken_back(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(open=True, text="The cat"), append(text=" sad"), append(text=" on"))
        await stream.send(append(text=" sat", replace_from=1), append(text=" down."))
        await stream.send(append(text="!", replace_from=3), commit())
        assert (await stream.finished()).usage.prompt_tokens == len("The cat sat down.!")
        assert stream.outcome().token_ids == (await stream.whole(text="The cat sat down.!")).choices[0].token_ids

    async def test_all_of_it_is_taken_back(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(open=True, text="wrong"), append(text="right", replace_from=0), commit())
        assert (await stream.finished()).usage.prompt_tokens == len("right")

    async def test_half_close_commits(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(open=True, text="The cat"), append(text=" sat"))
        await stream.call.done_writing()
        assert (await stream.finished()).usage.prompt_tokens == len("The cat sat")

    async def test_what_has_arrived_is_computed_ahead(self, open_stream):
        stream = await open_stream()
        block = stream.service.engine.facts.block_size
        await stream.send(begin(open=True))
        for piece in PIECES:
            before = stream.service.engine.counters.prefill_tokens
            await stream.send(append(text=piece))
            await until(lambda before=before: stream.service.engine.counters.prefill_tokens > before)
        before = stream.service.engine.counters.prefill_tokens
        await stream.send(commit())
        finished = await stream.finished()
        assert finished.usage.cached_tokens >= len(TEXT) - len(PIECES[-1]) - 2 * block
        assert finished.usage.cached_tokens >= len(TEXT) - 4 * block
        assert stream.service.engine.counters.prefill_tokens - before <= 4 * block

    async def test_a_tenant_pays_for_its_tokens_once(self, open_stream):
        limits = TenantLimits(tokens_per_minute=2 * len(TEXT))
        stream = await open_stream(scheduler=SchedulerConfig(default_tenant=limits))
        await stream.send(begin(open=True, max_tokens=1))
        for piece in PIECES:
            await stream.send(append(text=piece))
            await asyncio.sleep(0.01)
        await stream.send(commit())
        assert (await stream.finished()).status.code == 0

    async def test_one_that_is_left_open_ends(self, open_stream):
        stream = await open_stream(open_prompt_ttl_s=0.2)
        began = time.monotonic()
        await stream.send(begin(open=True, text=TEXT))
        await asyncio.sleep(0.15)
        await stream.send(append(text=TEXT))
        finished = await stream.finished()
        assert time.monotonic() - began > 0.3
        assert finished.reason == pb.FINISH_REASON_DEADLINE
        assert stream.reason_of(finished.status) == "OPEN_PROMPT_EXPIRED"
        assert "commit" in finished.status.message
        await until(lambda: not stream.service.engine.stats().requests)
        await stream.send(begin(text="next"))
        assert (await stream.finished()).status.code

    async def test_cancelled_before_its_commit(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(open=True, text=TEXT), pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        assert (await stream.finished()).reason == pb.FINISH_REASON_CANCELLED
        await until(lambda: not stream.service.engine.stats().requests)

    async def test_what_is_wrong_with_it_ends_it_at_the_commit(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(open=True), commit())
        finished = await stream.finished()
        assert stream.reason_of(finished.status) == "INVALID_FIELD"
        assert "prompt: is required" in finished.status.message

    @pytest.mark.parametrize(
        ("frames", "reason"),
        [
            ([append(token_ids=pb.TokenIds(ids=[1]))], "INVALID_FIELD"),
            ([append(chat=chat("x"))], "INVALID_FIELD"),
            ([append(text="x", replace_from=9)], "INVALID_FIELD"),
            ([append()], "INVALID_FIELD"),
            ([append(text="x" * (4 << 20))], "INVALID_FIELD"),
            ([append(ref=7, text="x")], "UNKNOWN_REF"),
            ([commit(ref=7)], "UNKNOWN_REF"),
        ],
        ids=["other kind", "messages", "piece", "nothing", "too long", "no such ref", "no such commit"],
    )
    async def test_a_refused_frame_changes_nothing(self, open_stream, frames, reason):
        stream = await open_stream()
        await stream.send(begin(open=True, text="The cat"), *frames, append(text=" sat"), commit())
        finished = await stream.finished()
        assert [refused[2] for refused in stream.refused] == [reason]
        assert finished.usage.prompt_tokens == len("The cat sat")

    async def test_only_on_a_stream(self, open_stream):
        stream = await open_stream()
        for call in (
            lambda start: stream.service.generation.Complete(pb.CompleteRequest(start=start)),
            lambda start: stream.service.generation.GenerateOne(pb.GenerateOneRequest(start=start)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=r"start.open: only on a Generate stream"):
                await call(begin(open=True, text="x").start)

    async def test_a_commit_without_an_open_prompt_is_refused(self, open_stream):
        stream = await open_stream(paced())
        await stream.send(begin(text="x", max_tokens=100), commit())
        await stream.finished()
        assert stream.refused == [("COMMIT", 1, "NOT_OPEN")]

    def test_memory_is_bounded(self):
        budget = OpenPromptBudget(max_bytes=100)
        budget.take("a", 50)
        with pytest.raises(Exception, match="open prompts take too much memory"):
            budget.take("a", 1)
        budget.take("b", 50)
        with pytest.raises(Exception, match="open prompts take too much memory"):
            budget.take("c", 1)
        budget.give_back("a", 50)
        budget.give_back("b", 50)
        assert not budget.by_tenant
        assert MAX_OPEN_BYTES == 64 << 20


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)


class TestInjection:
    """Tokens in a running output: it goes on as a fresh request with the same history does."""

    async def check(self, stream, prompt_ids, output, injected, ref=1):
        """``injected``: the tokens of each injection."""
        history = list(prompt_ids)
        at = 0
        for event, token_ids in zip(stream.injected, injected, strict=True):
            assert (event.ref, event.injected_tokens) == (ref, len(token_ids))
            history += [*output[at : event.output_tokens], *token_ids]
            at = event.output_tokens
        rest = output[at:]
        fresh = await stream.whole(token_ids=pb.TokenIds(ids=history), max_tokens=len(rest))
        assert rest == list(fresh.choices[0].token_ids)

    @pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
    async def test_the_output_goes_on_after_it(self, open_stream, kind):
        stream = await open_stream(paced())
        contents = {"text": " 42 ", "token_ids": pb.TokenIds(ids=[5, 6, 7]), "chat": chat("42")}
        await stream.send(begin(text=TEXT, max_tokens=100))
        await stream.until(lambda: len(stream.outcome().token_ids) > 10)
        await stream.send(append(**{kind: contents[kind]}))
        finished = await stream.finished()
        assert finished.status.code == 0
        [event] = stream.injected
        assert event.output_tokens >= 10
        output = stream.outcome().token_ids
        assert len(output) == finished.usage.output_tokens == 100
        assert finished.usage.prompt_tokens == len(TEXT) + event.injected_tokens
        if kind != "chat":
            ids = list(b" 42 ") if kind == "text" else [5, 6, 7]
            await self.check(stream, TEXT.encode(), output, [ids])

    async def test_deltas_before_it_are_in_earlier_messages(self, open_stream):
        stream = await open_stream(paced())
        await stream.send(begin(text=TEXT, max_tokens=60))
        await stream.until(lambda: len(stream.outcome().token_ids) > 5)
        await stream.send(append(text="42"))
        await stream.finished()
        num_before = 0
        for message in stream.reading.messages:
            if message.injected:
                break
            num_before += sum(len(delta.token_ids) for delta in message.deltas)
        assert stream.injected[0].output_tokens == num_before

    async def test_before_the_first_token(self, open_stream):
        stream = await open_stream(paced(0.05))
        await stream.send(begin(text=TEXT), append(text="42"))
        finished = await stream.finished()
        assert finished.status.code == 0
        await self.check(stream, TEXT.encode(), stream.outcome().token_ids, [list(b"42")])

    async def test_several_at_once(self, open_stream):
        stream = await open_stream(paced())
        await stream.send(begin(text=TEXT, max_tokens=80))
        await stream.until(lambda: len(stream.outcome().token_ids) > 5)
        await stream.send(append(text="a"), append(text="b"), append(text="c"))
        await stream.finished()
        assert sum(event.injected_tokens for event in stream.injected) == 3
        letters = iter(b"abc")
        merged = [[next(letters) for _ in range(event.injected_tokens)] for event in stream.injected]
        await self.check(stream, TEXT.encode(), stream.outcome().token_ids, merged)

    async def test_after_the_commit_of_an_open_prompt(self, open_stream):
        stream = await open_stream(paced())
        await stream.send(begin(open=True, text=TEXT, max_tokens=40), commit(), append(text="42"))
        await stream.finished()
        await self.check(stream, TEXT.encode(), stream.outcome().token_ids, [list(b"42")])

    async def test_a_continued_conversation_contains_it(self, open_stream):
        stream = await open_stream(paced())
        await stream.send(begin(text=TEXT, max_tokens=30))
        await stream.until(lambda: len(stream.outcome().token_ids) > 5)
        await stream.send(append(text="42"))
        finished = await stream.finished()
        [event] = stream.injected
        output = list(stream.outcome().token_ids)
        history = [*TEXT.encode(), *output[: event.output_tokens], *b"42", *output[event.output_tokens :], *b"on"]
        more = await stream.whole(text="on", continue_from=finished.request_id)
        assert more.finished.usage.prompt_tokens == len(history)
        whole = await stream.whole(token_ids=pb.TokenIds(ids=history))
        assert more.choices[0].token_ids == whole.choices[0].token_ids

    @pytest.mark.parametrize(
        ("fields", "content", "reason"),
        [
            ({"sampling": pb.SamplingParams(n=2, max_tokens=50, ignore_eos=True)}, {"text": "x"}, "NOT_INJECTABLE"),
            ({}, {"text": "x" * 4000}, "CONTEXT_LENGTH"),
            ({}, {"text": "x" * 5000}, "CONTEXT_LENGTH"),
            ({}, {"text": "x", "replace_from": 0}, "NOT_OPEN"),
            ({}, {"token_ids": pb.TokenIds(ids=[258])}, "INVALID_FIELD"),
            ({}, {"text": ""}, "INVALID_FIELD"),
            ({}, {"chat": chat("x", role="nobody")}, "INVALID_FIELD"),
        ],
        ids=["choices", "no room", "longer than the context", "replacement", "no token", "empty", "no role"],
    )
    async def test_a_refused_one_changes_nothing(self, open_stream, fields, content, reason):
        stream = await open_stream(paced())
        await stream.send(begin(text=TEXT, max_tokens=50, **fields))
        await stream.until(lambda: stream.outcome().deltas)
        await stream.send(append(**content))
        finished = await stream.finished()
        assert stream.refused == [("APPEND", 1, reason)]
        assert finished.status.code == 0
        assert finished.usage.prompt_tokens == len(TEXT)

    async def test_into_one_that_has_ended(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(text=TEXT))
        await stream.finished()
        await stream.send(append(text="42"))
        await stream.until(lambda: stream.refused)
        assert stream.refused == [("APPEND", 1, "UNKNOWN_REF")]

    async def test_too_many_at_once(self, open_stream, monkeypatch):
        stream = await open_stream(paced())
        await stream.send(begin(text=TEXT, max_tokens=400))
        await stream.until(lambda: stream.outcome().deltas)
        gate, prepare = asyncio.Event(), RequestBuilder.prepare_injection

        async def slow(*arguments):
            await gate.wait()
            return await prepare(*arguments)

        monkeypatch.setattr(RequestBuilder, "prepare_injection", slow)
        await stream.send(*(append(text="x") for _ in range(MAX_WAITING_INJECTIONS + 3)))
        await stream.until(lambda: len(stream.refused) == 3)
        gate.set()
        assert {refused[2] for refused in stream.refused} == {"PREPARATION_FULL"}
        await stream.finished()
        assert sum(event.injected_tokens for event in stream.injected) == MAX_WAITING_INJECTIONS
