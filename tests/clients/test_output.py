"""Parsed outputs in the client's events: parts of calls and reasoning, put together in every way."""

import penstock.v1 as pb
from penstock.clients.events import Delta, Finished, FinishReason, collect, merge
from penstock.clients.output import CalledTool, Logprobs, ToolCallPart

FINISHED = Finished.from_proto(
    pb.Finished(reason=pb.FINISH_REASON_TOOL_CALLS, usage=pb.Usage(output_tokens=9, reasoning_tokens=4))
)


def deltas():
    """Three parts of an output, with two calls."""
    first = pb.ToolCallDelta(index=0, id="a", name="look", arguments_json='{"x"', text_offset=2)
    rest = pb.ToolCallDelta(index=0, arguments_json=": 1}")
    second = pb.ToolCallDelta(index=1, id="b", name="go", arguments_json="{", text_offset=3, is_incomplete=True)
    end = pb.ChoiceEnd(reason=pb.FINISH_REASON_TOOL_CALLS, stop_token_id=7)
    return [
        Delta.from_proto(pb.Delta(reasoning="H", token_ids=[1])),
        Delta.from_proto(pb.Delta(reasoning="m", text="ok", tool_calls=[first], token_ids=[2])),
        Delta.from_proto(pb.Delta(text="!", tool_calls=[rest, second], end=end, token_ids=[3, 7])),
    ]


def test_parts_become_a_whole_answer():
    completion = collect([*deltas(), FINISHED], 1)
    assert (completion.text, completion.reasoning, completion.token_ids) == ("ok!", "Hm", [1, 2, 3, 7])
    assert completion.tool_calls == [
        CalledTool("a", "look", '{"x": 1}', 2),
        CalledTool("b", "go", "{", 3, is_incomplete=True),
    ]
    assert completion.finish_reason is completion.finished.reason is FinishReason.TOOL_CALLS
    assert completion.usage.reasoning_tokens == 4


def test_merged_deltas_are_the_same_answer():
    merged = merge([*deltas(), FINISHED])
    (delta, _) = merged
    assert isinstance(delta, Delta)
    assert delta.tool_calls == [
        ToolCallPart(0, "a", "look", '{"x": 1}', 2),
        ToolCallPart(1, "b", "go", "{", 3, is_incomplete=True),
    ]
    assert collect(merged, 1) == collect([*deltas(), FINISHED], 1)


def test_log_probabilities_are_divided_with_the_texts_of_tokens():
    whole = Logprobs(
        [-1.0, -2.0, -3.0],
        2,
        [1, 2, 3, 4, 5, 6],
        [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6],
        [1, 0, 1],
        [b"a", b"\xc3", b"\xa9"],
        [b"a", b"b", b"c", b"d", b"e", b"f"],
    )
    assert Logprobs.from_proto(pb.Logprobs(chosen_texts=[b"\xc3"], top_texts=[b"\xa9"])) == Logprobs(
        chosen_texts=[b"\xc3"], top_texts=[b"\xa9"]
    )
    first, rest = whole.part(0, 1), whole.part(1, 9)
    assert (rest.top_token_ids, rest.top_texts) == ([3, 4, 5, 6], [b"c", b"d", b"e", b"f"])
    joined = Logprobs()
    joined.extend(first)
    joined.extend(rest)
    assert joined == whole
    cut = whole.cut(1)
    assert (cut.top_token_ids, cut.top, cut.top_texts) == ([1, 3, 5], [-0.1, -0.3, -0.5], [b"a", b"c", b"e"])
    assert (cut.num_top, cut.chosen_texts, whole.cut(2)) == (1, whole.chosen_texts, whole)
    assert not whole.cut(0).top_texts
