"""Tokens that are injected into outputs."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from wire.frames import TEXT, append, begin, chat, commit, paced

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.requests.chat import chat_options
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.live.injection import MAX_WAITING_INJECTIONS
from penstock.service.text.tokenizer import Tokenizer


async def test_only_streams_keep_what_appends_need(open_frames, monkeypatch):
    """And only for requests that have passed their checks: it is a copy of the tools."""
    copying = Mock(side_effect=chat_options)
    monkeypatch.setattr("penstock.service.requests.live.injection.chat_options", copying)
    stream = await open_frames()
    await stream.whole(chat=chat("x"))
    call = stream.service.generation.GenerateOne(pb.GenerateOneRequest(start=begin(chat=chat("x")).start))
    assert [message async for message in call]
    await stream.send(begin(chat=chat("x"), max_tokens=0))
    assert (await stream.finished()).status.code
    assert not copying.called
    await stream.send(begin(ref=2, chat=chat("x")))
    await stream.finished(2)
    assert copying.call_count == 1


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
    async def test_the_output_goes_on_after_it(self, open_frames, kind):
        stream = await open_frames(paced())
        contents: dict[str, Any] = {"text": " 42 ", "token_ids": pb.TokenIds(ids=[5, 6, 7]), "chat": chat("42")}
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

    async def test_deltas_before_it_are_in_earlier_messages(self, open_frames):
        stream = await open_frames(paced())
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

    async def test_before_the_first_token(self, open_frames):
        stream = await open_frames(paced(0.05))
        await stream.send(begin(text=TEXT), append(text="42"))
        finished = await stream.finished()
        assert finished.status.code == 0
        await self.check(stream, TEXT.encode(), stream.outcome().token_ids, [list(b"42")])

    async def test_several_at_once(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(text=TEXT, max_tokens=80))
        await stream.until(lambda: len(stream.outcome().token_ids) > 5)
        await stream.send(append(text="a"), append(text="b"), append(text="c"))
        await stream.finished()
        assert sum(event.injected_tokens for event in stream.injected) == 3
        letters = iter(b"abc")
        merged = [[next(letters) for _ in range(event.injected_tokens)] for event in stream.injected]
        await self.check(stream, TEXT.encode(), stream.outcome().token_ids, merged)

    async def test_after_the_commit_of_an_open_prompt(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(open=True, text=TEXT, max_tokens=40), commit(), append(text="42"))
        await stream.finished()
        await self.check(stream, TEXT.encode(), stream.outcome().token_ids, [list(b"42")])

    async def test_a_continued_conversation_contains_it(self, open_frames):
        stream = await open_frames(paced())
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
    async def test_a_refused_one_changes_nothing(self, open_frames, fields, content, reason):
        stream = await open_frames(paced())
        await stream.send(begin(text=TEXT, max_tokens=50, **fields))
        await stream.until(lambda: stream.outcome().deltas)
        await stream.send(append(**content))
        finished = await stream.finished()
        assert stream.refused == [("APPEND", 1, reason)]
        assert finished.status.code == 0
        assert finished.usage.prompt_tokens == len(TEXT)

    async def test_appends_have_numbers(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(text=TEXT, max_tokens=60))
        await stream.until(lambda: len(stream.outcome().token_ids) > 5)
        bad = pb.TokenIds(ids=[258])
        await stream.send(
            append(text="a", append_id=7), append(text="", append_id=8), append(token_ids=bad, append_id=9)
        )
        await stream.send(append(text="b"), append(text="c", append_id=7), append(ref=5, text="d", append_id=11))
        finished = await stream.finished()
        assert finished.usage.prompt_tokens == len(TEXT) + 3
        assert [number for event in stream.injected for number in event.append_ids] == [7, 7]
        assert sum(event.injected_tokens for event in stream.injected) == 3
        refused = [each for message in stream.reading.messages for each in message.frames_refused]
        assert sorted((each.ref, each.append_id) for each in refused) == [(1, 8), (1, 9), (5, 11)]

    async def test_a_number_of_one_that_is_refused_at_the_end(self, open_frames, monkeypatch):
        stream = await open_frames(paced())
        await stream.send(begin(text=TEXT, max_tokens=400))
        await stream.until(lambda: stream.outcome().deltas)
        never = asyncio.Event()
        monkeypatch.setattr(RequestBuilder, "prepare_injection", lambda *arguments: never.wait())
        await stream.send(append(text="x", append_id=3), pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        await stream.finished()
        await stream.until(lambda: stream.refused)
        [refused] = [each for message in stream.reading.messages for each in message.frames_refused]
        assert (refused.append_id, stream.refused) == (3, [("APPEND", 1, "UNKNOWN_REF")])

    async def test_into_one_that_has_ended(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(text=TEXT))
        await stream.finished()
        await stream.send(append(text="42"))
        await stream.until(lambda: stream.refused)
        assert stream.refused == [("APPEND", 1, "UNKNOWN_REF")]

    async def test_too_many_at_once(self, open_frames, monkeypatch):
        stream = await open_frames(paced())
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


TAIL_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.content }}{% if loop.last %}{{ mood or '' }}{% if tools %}"
    "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}{% endif %}{% endfor %}"
)
TOOL_TEMPLATE = TAIL_TEMPLATE + "!"


class TestMessages:
    """Injected messages are rendered as they are in a conversation with the options of the request's chat."""

    async def test_options(self, open_frames, write_tokenizer, tmp_path):
        path = write_tokenizer(tmp_path, [("default", TAIL_TEMPLATE), ("tool_use", TOOL_TEMPLATE)])
        stream = await open_frames(paced(), tokenizer=Tokenizer(path))
        cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
            ({}, {}, ""),
            ({"tools": ["look"]}, {}, "[look]!"),
            ({"tools": ["look"]}, {"tools": ["ask"]}, "[ask]!"),
            ({}, {"tools": ["ask"]}, "[ask]!"),
            ({"mood": "?"}, {}, "?"),
            ({"mood": "?"}, {"mood": ""}, ""),
            ({"mood": "?", "tools": ["look"]}, {}, "?[look]!"),
        ]
        for ref, (options, _, _) in enumerate(cases, 1):
            is_open = ref % 2 == 0
            whole = chat("Look.", **self.fields(**options))
            await stream.send(begin(ref=ref, chat=whole, max_tokens=100, open=is_open), *[commit(ref)] * is_open)
        await stream.until(lambda: all(stream.outcome(ref).deltas for ref in range(1, 1 + len(cases))))
        for ref, (_, own, _) in enumerate(cases, 1):
            await stream.send(append(ref=ref, chat=chat("42", role="tool", **self.fields(**own))))
        await stream.until(lambda: len(stream.injected) == len(cases))
        assert not stream.refused
        found = {event.ref: event.injected_tokens for event in stream.injected}
        assert found == {ref: len(f"T42{tail}") for ref, (_, _, tail) in enumerate(cases, 1)}

    def fields(self, tools=(), mood=None):
        return {
            "tools": [pb.Tool(function=pb.FunctionTool(name=name)) for name in tools],
            "template_variables_json": "" if mood is None else f'{{"mood": "{mood}"}}',
        }


TEMPLATE = (
    "{{ tools or '' }}{% for m in messages %}<|turn|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
THOUGHT = "Hm, " * 40 + "so"
SAID = f'{THOUGHT}</think>Well. <tool_call>{{"name": "look", "arguments": {{"at": "x"}}}}</tool_call>'.encode()
TOOL = pb.Tool(function=pb.FunctionTool(name="look"))
MARK = b"#"


class TestParsedOutput:
    """The parser of an output goes on after an injection."""

    @pytest.fixture
    async def stream(self, open_frames, write_tokenizer, tmp_path):
        """A stream to a model that says the same whatever it is asked, and whatever is injected."""
        begins: dict[int, int] = {}

        def say(history, sampling):
            said = history[begins.setdefault(sampling.seed, len(history)) :]
            return [*SAID, 256][min(len(said) - list(said).count(MARK[0]), len(SAID))]

        executor = FakeExecutor(vocab_size=258, seconds_per_step=0.005, next_token=say)
        return await open_frames(executor, tokenizer=Tokenizer(write_tokenizer(tmp_path, TEMPLATE)))

    async def test_reasoning_and_calls_are_whole(self, stream):
        form = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
        output = pb.OutputOptions(format=form, parse_reasoning=True, parse_tool_calls=True, logprobs=0)
        sampling = pb.SamplingParams(seed=3, temperature=0)
        await stream.send(begin(chat=chat("Look.", tools=[TOOL]), output=output, sampling=sampling))
        await stream.until(lambda: len(stream.outcome().token_ids) > 10)
        await stream.send(append(text=MARK.decode() * 2))
        finished = await stream.finished()
        [event] = stream.injected
        assert event.injected_tokens == 2
        assert finished.reason == pb.FINISH_REASON_TOOL_CALLS
        assert finished.usage.reasoning_tokens == len(THOUGHT)
        deltas = [delta for message in stream.reading.messages for delta in message.deltas]
        assert "".join(delta.reasoning for delta in deltas) == THOUGHT
        assert "".join(delta.text for delta in deltas) == "Well."
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert "".join(call.arguments_json for call in calls) == '{"at": "x"}'
        assert [token for delta in deltas for token in delta.token_ids] == [*SAID, 256]

    async def test_not_into_a_forced_call(self, stream):
        forced = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
        start = begin(chat=chat("Look.", tools=[TOOL], tool_choice=forced), sampling=pb.SamplingParams(seed=3))
        await stream.send(start, append(text="#"))  # together: the call may soon end
        await stream.until(lambda: stream.refused)
        assert stream.refused == [("APPEND", 1, "NOT_INJECTABLE")]
