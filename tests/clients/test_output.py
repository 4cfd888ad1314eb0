"""Parsed outputs in the client's events: parts of calls and reasoning, put together in every way."""

import penstock.v1 as pb
from penstock.clients.events import Delta, Finished, FinishReason, collect, merge
from penstock.clients.output import CalledTool, ToolCallPart

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
