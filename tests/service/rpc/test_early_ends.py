"""Requests that end before their output does: their callers get the text of all tokens that count."""

import grpc
import pytest
from waiting import until
from wire.frames import begin

import penstock.v1 as pb
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.parsers.registry import make_parser
from penstock.service.text.tokenizer import Tokenizer

HELD = "S" * 900
"""A stop string: any number of its characters may be held back as its beginning."""
NUM_HELD = 20


def says(text, then):
    """A slow worker that generates ``text``, then one letter forever."""

    prompt_length: list[int] = []

    def next_token(history, sampling):
        prompt_length[:] = prompt_length or [len(history)]
        said = len(history) - prompt_length[0]
        return ord(text[said]) if said < len(text) else ord(then)

    return FakeExecutor(vocab_size=258, next_token=next_token, seconds_per_step=0.002)


async def cancel(stream):
    await stream.send(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))


async def let_deadline_pass(stream):
    await stream.send(pb.GenerateRequest(update=pb.GenerationUpdate(ref=1, timeout_ms=1)))


async def kill_worker(stream):
    stream.service.executor.fails_to_start.extend([ExecutorError("there is no other worker")] * 99)
    stream.service.executor.die()


async def stop_service(stream):
    stream.service.server._running.generation.shut_down()


ENDS = [
    (cancel, pb.FINISH_REASON_CANCELLED, grpc.StatusCode.CANCELLED),
    (let_deadline_pass, pb.FINISH_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
    (kill_worker, pb.FINISH_REASON_ERROR, grpc.StatusCode.UNAVAILABLE),
    (stop_service, pb.FINISH_REASON_ERROR, grpc.StatusCode.UNAVAILABLE),
]


async def begun(stream, start, num_tokens):
    """Sends a request and waits until it has this many tokens, some of which are held back."""
    await stream.send(pb.GenerateRequest(start=start))
    await stream.until(lambda: stream.outcome().accepted)
    await until(lambda: stream.service.engine.stats().output_tokens > num_tokens)


TOOL_TEMPLATE = "{{ tools or '' }}{% for m in messages %}<|turn|>{{ m.content }}{{ m.tool_calls }}{% endfor %}"


def choices_of(stream):
    """Returns the text, the ids and the ends of each choice."""
    found: dict[int, tuple[list[str], list[int], list[pb.ChoiceEnd]]] = {}
    for message in stream.reading.messages:
        for delta in message.deltas:
            text, ids, ends = found.setdefault(delta.choice, ([], [], []))
            assert not ends, "output after the end of a choice"
            text.append(delta.text)
            ids += delta.token_ids
            ends += [delta.end] * delta.HasField("end")
    return {choice: ("".join(text), ids, ends) for choice, (text, ids, ends) in found.items()}


@pytest.mark.parametrize(("end", "reason", "code"), ENDS)
async def test_what_may_begin_a_stop_string_is_in_the_last_delta(open_frames, end, reason, code):
    executor = says("hi", "S")
    stream = await open_frames(executor, engine=Engine(executor, restart_delay_s=0))
    start = begin(text="x", max_tokens=800).start
    start.sampling.stop.append(HELD)
    start.sampling.n = 2
    await begun(stream, start, 2 * (2 + NUM_HELD))
    assert "S" not in stream.outcome().text
    await end(stream)
    finished = await stream.finished()
    assert (finished.reason, finished.status.code) == (reason, code.value[0])
    choices = choices_of(stream)
    assert sum(len(ids) for _, ids, _ in choices.values()) == finished.usage.output_tokens
    for text, ids, ends in choices.values():
        assert text == bytes(ids).decode()
        assert text == "hi" + "S" * (len(text) - 2)
        assert len(text) > NUM_HELD // 2
        assert [each.reason for each in ends] == [reason]


async def test_a_call_of_its_own_gets_the_rest_before_its_status(start_service):
    service = await start_service(says("hi", "S"))
    start = begin(0, text="x", max_tokens=800).start
    start.sampling.stop.append(HELD)
    call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start))
    messages = [await call.read()]
    await until(lambda: service.engine.stats().output_tokens > NUM_HELD)
    service.engine.abort(messages[0].accepted.request_id, EngineFinishReason.DEADLINE)
    while not messages[-1].HasField("finished"):
        messages.append(await call.read())
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    deltas = [delta for message in messages for delta in message.deltas]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert "".join(delta.text for delta in deltas) == bytes(token_ids).decode()
    assert len(token_ids) == messages[-1].finished.usage.output_tokens > NUM_HELD
    assert deltas[-1].end.reason == pb.FINISH_REASON_DEADLINE


@pytest.mark.parametrize(("end", "reason", "code"), ENDS[:2])
@pytest.mark.parametrize(
    ("said", "then"),
    [("ok", "\n"), ("ok <tool_call>", "\n"), ("<think>so", " "), ('<tool_call>{"name": "look", "arguments": {', " ")],
)
async def test_what_may_be_a_marker_is_in_the_last_delta(
    open_frames, write_tokenizer, tmp_path, end, reason, code, said, then
):
    """The parts are those of the same text as a whole."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "tools", TOOL_TEMPLATE))
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    stream = await open_frames(says(said, then), tokenizer=tokenizer, **parsers)
    tool = pb.Tool(function=pb.FunctionTool(name="look"))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], tools=[tool])
    start = begin(chat=chat, max_tokens=800).start
    start.output.parse_reasoning = start.output.parse_tool_calls = True
    await begun(stream, start, len(said) + NUM_HELD)
    await end(stream)
    finished = await stream.finished()
    assert (finished.reason, finished.status.code) == (reason, code.value[0])
    [(text, ids, ends)] = choices_of(stream).values()
    assert len(ids) == finished.usage.output_tokens > len(said)
    assert [each.reason for each in ends] == [reason]
    parser = make_parser("hermes", "think", tools={"look": None})
    whole = parser.feed(bytes(ids).decode()) + parser.end()
    deltas = [delta for message in stream.reading.messages for delta in message.deltas]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert (text, "".join(delta.reasoning for delta in deltas)) == (whole.content, whole.reasoning)
    assert "".join(call.arguments_json for call in calls) == "".join(call.arguments for call in whole.calls)
    assert [call.is_incomplete for call in calls[-1:]] == [call.breaks_off for call in whole.calls]
