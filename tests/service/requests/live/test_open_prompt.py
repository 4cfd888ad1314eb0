"""Prompts that arrive in pieces."""

import asyncio
from typing import Any
from unittest.mock import create_autospec

import grpc
import pytest
from waiting import until
from wire.frames import PIECES, TEXT, append, begin, chat, commit, paced

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.service.requests.live.lifecycle import MAX_EARLY_UPDATES
from penstock.service.requests.live.open_prompt import MAX_OPEN_BYTES, OpenPrompt, OpenPromptBudget, OpenPromptConfig
from penstock.service.requests.live.warm_up import PrefixWarmer


class TestOpenPrompt:
    """A prompt in pieces is the same as the prompt at once."""

    @pytest.mark.parametrize("first", [{}, {"text": PIECES[0]}], ids=["nothing at first", "a text at first"])
    async def test_of_text(self, open_frames, first):
        stream = await open_frames()
        await stream.send(begin(open=True, **first))
        await stream.send(*(append(text=piece) for piece in PIECES[len(first) :]), commit())
        finished = await stream.finished()
        whole = await stream.whole(text=TEXT)
        assert finished.status.code == 0
        assert stream.outcome().token_ids == whole.choices[0].token_ids
        assert finished.usage.prompt_tokens == whole.finished.usage.prompt_tokens == len(TEXT)
        assert not stream.refused

    async def test_of_token_ids(self, open_frames):
        stream = await open_frames()
        ids = list(TEXT.encode())
        await stream.send(begin(open=True, token_ids=pb.TokenIds(ids=ids[:50])))
        await stream.send(append(token_ids=pb.TokenIds(ids=ids[50:51])), append(token_ids=pb.TokenIds(ids=ids[51:])))
        await stream.send(commit())
        assert (await stream.finished()).usage.prompt_tokens == len(ids)
        assert stream.outcome().token_ids == (await stream.whole(token_ids=pb.TokenIds(ids=ids))).choices[0].token_ids

    async def test_of_messages(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, chat=chat("Be brief.", role="system")))
        await stream.send(append(chat=chat("Hello")), append(chat=chat("Hi.", role="assistant")))
        await stream.send(append(chat=chat("And now?")), commit())
        await stream.finished()
        messages = [*chat("Be brief.", role="system").messages, *chat("Hello").messages]
        messages += [*chat("Hi.", role="assistant").messages, *chat("And now?").messages]
        whole = await stream.whole(chat=pb.Chat(messages=messages))
        assert stream.outcome().token_ids == whole.choices[0].token_ids

    async def test_parts_of_contents_count_in_all_pieces(self, open_frames):
        stream = await open_frames()
        message = pb.ChatMessage(role="user", content_parts=[pb.ContentPart(text="x")] * 128)
        many = pb.Chat(messages=[message] * 32)
        await stream.send(begin(open=True, chat=chat("x")), append(chat=many), append(chat=pb.Chat(messages=[message])))
        await stream.until(lambda: stream.refused)
        assert stream.refused == [("APPEND", 1, "INVALID_FIELD")]

    async def test_options_of_a_chat_are_those_of_the_start(self, open_frames):
        stream = await open_frames()
        mode = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
        options: dict[str, Any] = {"tool_choice": mode, "parallel_tool_calls": False}
        options |= {"template_variables_json": "{}"}
        await stream.send(begin(open=True, chat=chat("x")))
        await stream.send(*(append(chat=chat("y", **{name: value})) for name, value in options.items()))
        await stream.until(lambda: len(stream.refused) == len(options))
        statuses = [refused.status for message in stream.reading.messages for refused in message.frames_refused]
        named = [stream.details_of(status)["BadRequest"].field_violations[0].field for status in statuses]
        assert named == [f"chat.{name}" for name in options]

    async def test_pieces_are_taken_back(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, text="The cat"), append(text=" sad"), append(text=" on"))
        await stream.send(append(text=" sat", replace_from=1), append(text=" down."))
        await stream.send(append(text="!", replace_from=3), commit())
        assert (await stream.finished()).usage.prompt_tokens == len("The cat sat down.!")
        assert stream.outcome().token_ids == (await stream.whole(text="The cat sat down.!")).choices[0].token_ids

    async def test_all_of_it_is_taken_back(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, text="wrong"), append(text="right", replace_from=0), commit())
        assert (await stream.finished()).usage.prompt_tokens == len("right")

    async def test_ids_may_exceed_the_context_if_they_are_truncated(self, open_frames):
        stream = await open_frames()
        ids = list(TEXT.encode()) * (1 + stream.service.engine.facts.max_model_len // len(TEXT))
        await stream.send(begin(ref=1, open=True, truncate_prompt_tokens=16), begin(ref=2, open=True))
        for ref in (1, 2):
            await stream.send(append(ref=ref, token_ids=pb.TokenIds(ids=ids)))
        await stream.until(lambda: stream.refused)
        assert stream.refused == [("APPEND", 2, "INVALID_FIELD")]
        await stream.send(commit(ref=1))
        assert (await stream.finished(1)).usage.prompt_tokens == 16

    async def test_half_close_commits(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, text="The cat"), append(text=" sat"))
        await stream.call.done_writing()
        assert (await stream.finished()).usage.prompt_tokens == len("The cat sat")

    async def test_what_has_arrived_is_computed_ahead(self, open_frames):
        stream = await open_frames()
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

    async def test_a_tenant_pays_for_its_tokens_once(self, open_frames):
        limits = TenantLimits(tokens_per_minute=2 * len(TEXT))
        stream = await open_frames(scheduler=SchedulerConfig(default_tenant=limits))
        await stream.send(begin(open=True, max_tokens=1))
        for piece in PIECES:
            await stream.send(append(text=piece))
            await asyncio.sleep(0.01)
        await stream.send(commit())
        assert (await stream.finished()).status.code == 0

    async def test_one_that_is_left_open_ends(self, open_frames):
        stream = await open_frames(open_prompt_ttl_s=0.2)
        await stream.send(begin(open=True, text=TEXT), append(text=TEXT))
        finished = await stream.finished()
        assert finished.reason == pb.FINISH_REASON_DEADLINE
        assert stream.reason_of(finished.status) == "OPEN_PROMPT_EXPIRED"
        assert "commit" in finished.status.message
        await until(lambda: not stream.service.engine.stats().requests)
        await stream.send(begin(text="next"))
        assert (await stream.finished()).status.code

    async def test_each_piece_restarts_the_timer(self, open_frames, monkeypatch):
        loop, ttl_s, timers = asyncio.get_running_loop(), 4321.0, []
        call_later = loop.call_later

        def record(delay, *arguments, **options):
            timer = call_later(delay, *arguments, **options)
            if delay == ttl_s:
                timers.append(timer)
            return timer

        monkeypatch.setattr(loop, "call_later", record)
        stream = await open_frames(open_prompt_ttl_s=ttl_s)
        await stream.send(begin(open=True, text=TEXT))
        await until(lambda: len(timers) == 1)
        await stream.send(append(text=TEXT))
        await until(lambda: len(timers) == 2)
        assert [timer.cancelled() for timer in timers] == [True, False]

    async def test_its_deadline_ends_it(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, text=TEXT, timeout_ms=50))
        finished = await stream.finished()
        assert finished.reason == pb.FINISH_REASON_DEADLINE
        assert stream.reason_of(finished.status) == "DEADLINE"
        assert "committed" in finished.status.message

    @pytest.mark.parametrize("first", [{}, {"timeout_ms": 3_600_000}], ids=["none before", "a later one before"])
    async def test_a_deadline_that_an_update_sets(self, open_frames, first):
        stream = await open_frames()
        update = pb.GenerateRequest(update=pb.GenerationUpdate(ref=1, timeout_ms=50))
        await stream.send(begin(open=True, text=TEXT, **first), update)
        assert stream.reason_of((await stream.finished()).status) == "DEADLINE"

    async def test_a_deadline_that_an_update_moves_away(self, open_frames):
        stream = await open_frames()
        update = pb.GenerateRequest(update=pb.GenerationUpdate(ref=1, timeout_ms=3_600_000))
        await stream.send(begin(ref=1, open=True, text=TEXT, timeout_ms=1000), update)
        await stream.send(begin(ref=2, open=True, text=TEXT, timeout_ms=1500))
        assert stream.reason_of((await stream.finished(2)).status) == "DEADLINE"
        assert not stream.outcome(1).finished
        await stream.send(commit())
        assert (await stream.finished(1)).status.code == 0

    async def test_a_deadline_that_moves_together_with_the_limit_on_the_output(self, open_frames):
        stream = await open_frames()
        update = pb.GenerationUpdate(ref=1, timeout_ms=3_600_000, max_tokens=5)
        await stream.send(begin(open=True, text=TEXT, timeout_ms=1000), pb.GenerateRequest(update=update))
        await stream.send(begin(ref=2, open=True, text=TEXT, timeout_ms=1500))
        assert stream.reason_of((await stream.finished(2)).status) == "DEADLINE"
        assert not stream.outcome(1).finished
        await stream.send(commit())
        assert (await stream.finished(1)).usage.output_tokens == 5

    async def test_its_deadline_may_move_any_number_of_times(self, open_frames):
        stream = await open_frames()
        update = pb.GenerateRequest(update=pb.GenerationUpdate(ref=1, timeout_ms=3_600_000))
        await stream.send(begin(open=True, text=TEXT), *[update] * (MAX_EARLY_UPDATES + 1), commit())
        assert (await stream.finished()).status.code == 0
        assert not stream.refused

    async def test_a_service_that_drains_ends_it(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(ref=1, text=TEXT, max_tokens=30), begin(ref=2, open=True, text=TEXT))
        await stream.until(lambda: stream.outcome(1).deltas)
        stream.service.engine.drain()
        finished = await stream.finished(2)
        assert finished.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert stream.reason_of(finished.status) == "DRAINING"
        await stream.send(begin(ref=3, open=True))
        assert stream.reason_of((await stream.finished(3)).status) == "DRAINING"
        assert (await stream.finished(1)).usage.output_tokens == 30

    async def test_a_service_that_stops_ends_it(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, text=TEXT))
        await until(lambda: stream.service.engine.counters.prefill_tokens)
        stopping = asyncio.create_task(stream.service.server.stop(grace_s=600))
        assert stream.reason_of((await stream.finished()).status) == "DRAINING"
        await stopping

    async def test_cancelled_before_its_commit(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(open=True, text=TEXT), pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        assert (await stream.finished()).reason == pb.FINISH_REASON_CANCELLED
        await until(lambda: not stream.service.engine.stats().requests)

    async def test_what_is_wrong_with_it_ends_it_at_the_commit(self, open_frames):
        stream = await open_frames()
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
    async def test_a_refused_frame_changes_nothing(self, open_frames, frames, reason):
        stream = await open_frames()
        await stream.send(begin(open=True, text="The cat"), *frames, append(text=" sat"), commit())
        finished = await stream.finished()
        assert [refused[2] for refused in stream.refused] == [reason]
        assert finished.usage.prompt_tokens == len("The cat sat")

    async def test_only_on_a_stream(self, open_frames):
        stream = await open_frames()
        for call in (
            lambda start: stream.service.generation.Complete(pb.CompleteRequest(start=start)),
            lambda start: stream.service.generation.GenerateOne(pb.GenerateOneRequest(start=start)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=r"start.open: only on a Generate stream"):
                await call(begin(open=True, text="x").start)

    async def test_a_commit_without_an_open_prompt_is_refused(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(text="x", max_tokens=100), commit())
        await stream.finished()
        assert stream.refused == [("COMMIT", 1, "NOT_OPEN")]

    def test_its_size_includes_the_tools(self):
        tool = pb.Tool(function=pb.FunctionTool(name="f", description="x" * 300_000))
        start = pb.GenerationStart(open=True, chat=pb.Chat(tools=[tool]))
        prompt = OpenPrompt(OpenPromptConfig(create_autospec(PrefixWarmer, instance=True)), start, "a", print)
        assert prompt.committed().pieces.num_bytes > 300_000

    def test_memory_is_bounded(self):
        budget = OpenPromptBudget(max_bytes=100)
        budget.take("a", 50)
        with pytest.raises(Exception, match="open prompts take too much memory"):
            budget.take("a", 1)
        budget.take("b", 25)
        with pytest.raises(Exception, match="open prompts take too much memory"):
            budget.take("b", 1)
        budget.take("c", 12)
        budget.give_back("a", 50)
        budget.give_back("b", 25)
        budget.give_back("c", 12)
        assert not budget.by_tenant
        assert MAX_OPEN_BYTES == 64 << 20
