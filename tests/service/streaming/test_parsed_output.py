"""Outputs that are parsed between the engine and a stream: the recorded ones of every format, cut anywhere."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

import penstock.v1 as pb
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import EngineFinishReason, SequenceDelta, StopMatch
from penstock.service.parsers.registry import make_parser
from penstock.service.streaming.messages import fill_delta
from penstock.service.streaming.parsed_output import ParsedChoice, ParsingReceiver
from penstock.service.streaming.pending_message import MAX_PART_BYTES, OutputForm, delta_bytes, split_delta

OUTPUTS = Path(__file__).parents[2] / "gateway" / "tool_outputs"
FORMATS = {path.stem: path.stem.removesuffix("_list").removesuffix("_named") for path in OUTPUTS.glob("*.jsonl")}
TOOLS = json.loads((OUTPUTS / "tools.json").read_text())
LINES = {kind: [json.loads(line) for line in (OUTPUTS / f"{kind}.jsonl").read_text().splitlines()] for kind in FORMATS}
FORM = OutputForm(text=True, token_ids=True, parsed=True)
EOS = 256
STOP, LENGTH = EngineFinishReason.STOP, EngineFinishReason.LENGTH


class Receiver:
    """Keeps what it gets, as messages."""

    def __init__(self):
        self.injected_message = pb.Injected()
        self.deltas: list[pb.Delta] = []
        self.at_once: list[bool] = []
        self.finished_message = pb.Finished()

    def accepted(self, accepted):
        raise AssertionError("no request is accepted here")

    def prompt_logprobs(self, ref, part, form):
        raise AssertionError("nobody asked for them")

    def injected(self, injected):
        self.injected_message.CopyFrom(injected)

    def delta(self, ref, delta, form, at_once):
        assert delta_bytes(delta, form)
        message = pb.Delta(ref=ref, choice=delta.choice)
        fill_delta(message, form, [delta])
        assert delta_bytes(delta, form) >= len(message.SerializeToString()) - 16
        self.deltas.append(message)
        self.at_once.append(at_once)

    def finished(self, finished):
        self.finished_message = finished

    def fail(self, error):
        raise error


def tokens_of(text):
    """A byte a token, and the characters that begin in each."""
    return [(byte, int(not at)) for char in text for at, byte in enumerate(char.encode())]


def deltas_of(text, cuts, end):
    """The engine's deltas: ``text`` cut at these positions, and the end."""
    parts = [text[begin:after] for begin, after in pairwise([0, *cuts, len(text)])]
    for index, part in enumerate(parts, 1):
        ids, lengths = [token for token, _ in tokens_of(part)], [length for _, length in tokens_of(part)]
        logprobs = TokenLogprobs(1, [-float(token) for token in ids], ids, [0.0] * len(ids))
        is_last = index == len(parts)
        if is_last and end.stop_token_id is not None:
            ids, lengths = [*ids, EOS], [*lengths, 0]
            logprobs = TokenLogprobs(1, [-float(token) for token in ids], ids, [0.0] * len(ids))
        yield SequenceDelta(0, ids, part, logprobs, end if is_last else None, lengths)


def parse(parser, text, cuts=(), end=StopMatch(STOP, stop_token_id=EOS)):  # noqa: B008 - it is frozen
    receiver = Receiver()
    parsing = ParsingReceiver(receiver, [ParsedChoice(0, parser)])
    for delta in deltas_of(text, cuts, end):
        parsing.delta(7, delta, FORM, at_once=False)
    parsing.finished(pb.Finished(reason=pb.FINISH_REASON_STOP if end.reason is STOP else pb.FINISH_REASON_LENGTH))
    return receiver


def summed(receiver):
    """The whole output, checked against its tokens."""
    content = "".join(delta.text for delta in receiver.deltas)
    calls: list[list[str]] = []
    for delta in receiver.deltas:
        for call in delta.tool_calls:
            if call.id:
                calls.append([call.name, "", str(call.text_offset)])
            calls[call.index][1] += call.arguments_json
    ids = [token for delta in receiver.deltas for token in delta.token_ids]
    lengths = [length for delta in receiver.deltas for length in delta.logprobs.text_lengths]
    assert [-chosen for delta in receiver.deltas for chosen in delta.logprobs.chosen] == ids
    # The tokens of the content can be found: a character begins in each that has a length.
    starts = bytes(token for token, length in zip(ids, lengths, strict=True) if length)
    assert starts == bytes(char.encode()[0] for char in content)
    reasoning = "".join(delta.reasoning for delta in receiver.deltas)
    reasons = (receiver.deltas[-1].end.reason, receiver.finished_message.reason)
    return content, reasoning, calls, ids, lengths, reasons, receiver.finished_message.usage.reasoning_tokens


def parser_of(kind, line):
    tools = dict.fromkeys([name for name, _ in line["calls"]]) | TOOLS
    reasoning, in_reasoning = line.get("reasoning_format"), line.get("in_reasoning", False)
    return make_parser(FORMATS[kind], reasoning, tools=tools, in_reasoning=in_reasoning)


def check_cuts(kind, line, step):
    text = line["text"]
    whole = summed(parse(parser_of(kind, line), text))
    assert whole[3] == [*text.encode(), EOS]
    assert [call[0] for call in whole[2]] == [name for name, _ in line["calls"]]
    num_joiners = whole[1].count("\n") if kind == "harmony" else 0  # between messages, in no token
    assert 0 <= len(whole[1].encode()) - whole[6] <= num_joiners
    is_complete = bool(line["calls"]) and not line.get("breaks_off")
    assert (whole[5] == (pb.FINISH_REASON_TOOL_CALLS,) * 2) == is_complete
    for at in range(1, len(text), step):
        assert summed(parse(parser_of(kind, line), text, [at])) == whole
    one_by_one = parse(parser_of(kind, line), text, range(1, len(text)))
    assert summed(one_by_one) == whole
    assert one_by_one.at_once == [True, *[False] * (len(one_by_one.at_once) - 1)]


@pytest.mark.parametrize("kind", FORMATS)
def test_wherever_an_output_is_cut_it_is_the_same(kind):
    for line in LINES[kind]:
        check_cuts(kind, line, max(1, len(line["text"]) // 4))


@pytest.mark.soak
@pytest.mark.parametrize("kind", FORMATS)
def test_cut_at_every_character_it_is_the_same(kind):
    for line in LINES[kind]:
        check_cuts(kind, line, 1)


def test_tokens_wait_for_their_text():
    """Each delta has exactly the tokens of what it shows, and those of markers before it."""
    text = "<think>\nHm  </think>\nYes. <tool_call>{no"
    receiver = parse(make_parser("hermes", "think"), text, range(1, len(text)))
    shown = [(delta.reasoning, delta.text, bytes(delta.token_ids).decode()) for delta in receiver.deltas[:-1]]
    assert shown[:4] == [("H", "", "<think>\nH"), ("m", "", "m"), ("", "Y", "  </think>\nY"), ("", "e", "e")]
    assert shown[-1] == ("", " <tool_call>{n", " <tool_call>{n")
    assert (receiver.deltas[-1].text, list(receiver.deltas[-1].token_ids)) == ("o", [ord("o"), EOS])
    assert summed(receiver)[6] == 2


def test_a_multibyte_character_of_reasoning_counts_all_its_tokens():
    receiver = parse(make_parser(None, "think"), "<think>é🙂</think>ü", range(1, 17))
    assert summed(receiver)[6] == len("é🙂".encode())


def test_the_stop_token_is_not_reasoning():
    assert summed(parse(make_parser(None, "think"), "<think>abc"))[6] == 3


def test_tokens_of_a_stop_string_come_with_the_end():
    """They are in no text, and have no length there."""
    receiver = Receiver()
    parsing = ParsingReceiver(receiver, [ParsedChoice(0, make_parser("hermes", "think"))])
    end = StopMatch(STOP, stop="END")
    parsing.delta(7, SequenceDelta(0, [1, 2, 3], "ab", None, end, [1, 3, 1]), FORM, at_once=False)
    (delta,) = receiver.deltas
    assert (delta.text, list(delta.token_ids), delta.end.stop) == ("ab", [1, 2, 3], "END")


@pytest.mark.parametrize(
    ("text", "end", "expected"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', StopMatch(STOP), pb.FINISH_REASON_TOOL_CALLS),
        ('<tool_call>{"name": "f"}</tool_call>', StopMatch(LENGTH), pb.FINISH_REASON_LENGTH),
        ('<tool_call>{"name": "f", "arguments": {"a', StopMatch(STOP), pb.FINISH_REASON_STOP),
        ("text", StopMatch(STOP), pb.FINISH_REASON_STOP),
    ],
)
def test_the_reason_tells_callers_to_run_calls_only_if_all_are_complete(text, end, expected):
    receiver = parse(make_parser("hermes", None), text, end=end)
    assert (receiver.deltas[-1].end.reason, receiver.finished_message.reason) == (expected, expected)


def test_a_delta_that_is_too_large_is_split():
    arguments, reasoning = json.dumps({"a": "🙂" * 12_000}, ensure_ascii=False), "ü" * 22_000
    text = f"<think>{reasoning}</think>{'x' * 22_000}<tool_call>" + '{"name": "f", "arguments": ' + arguments + "}"
    found = []

    class Splitting(Receiver):
        def delta(self, ref, delta, form, at_once):
            for part in split_delta(delta, form):
                assert delta_bytes(part, form) <= MAX_PART_BYTES
                super().delta(ref, part, form, at_once)
                found.append(part)

    receiver = Splitting()
    parsing = ParsingReceiver(receiver, [ParsedChoice(0, make_parser("hermes", "think"))])
    for delta in deltas_of(text, [], StopMatch(STOP, stop_token_id=EOS)):
        parsing.delta(7, delta, FORM, at_once=False)
    assert len(found) > 5
    parsing.finished(pb.Finished(reason=pb.FINISH_REASON_STOP))
    content, thought, calls, *_, reasons, _ = summed(receiver)
    assert (content, thought, calls) == ("x" * 22_000, reasoning, [["f", arguments, "22000"]])
    assert reasons == (pb.FINISH_REASON_TOOL_CALLS,) * 2
