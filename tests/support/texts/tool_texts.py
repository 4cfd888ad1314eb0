"""A call as models write it, and what tests make of answers."""

import itertools
from typing import Any

from penstock.service.parsers.registry import make_parser

ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln", "days": [1, {"a": "}"}]}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}]',
    "pythonic": '[weather(city="Köln", days=[1, {"a": "}"}])]',
}
ARGUMENTS = '{"city": "Köln", "days": [1, {"a": "}"}]}'
NAMES = frozenset({"weather", "time", "ns.find"})


def take_apart(parts, tool_format, reasoning_format=None, **given):
    """Content, reasoning and calls of an answer that comes in parts, and whether all of these calls are whole."""
    numbers = itertools.count()
    options: dict[str, Any] = {"tool_names": NAMES, "new_call_id": lambda: f"id{next(numbers)}"} | given
    parser = make_parser(tool_format, reasoning_format, **options)
    text = "".join(parts)
    content, placed, reasoning, thought = "", "", "", ""
    num_read = num_known = 0
    calls: list[list[str]] = []
    broken: set[int] = set()
    for part, piece in [*((part, parser.feed(part)) for part in parts), ("", parser.end())]:
        num_read += len(part)
        assert 0 <= piece.num_held <= num_read
        thought += "".join(text[begin:end] for begin, end in piece.reasoning_spans)
        assert reasoning + piece.reasoning == thought, "it stands where the parser says"
        for begin, end in (*piece.spans, *piece.reasoning_spans):
            assert num_known <= begin <= end <= num_read - piece.num_held, "what was known is not reported again"
        num_known = num_read - piece.num_held
        content += piece.content
        placed += "".join(text[begin:end] for begin, end in piece.spans)
        assert content == placed, "it stands where the parser says"
        reasoning += piece.reasoning
        for call in piece.calls:
            if call.index == len(calls):
                assert call.id
                assert call.name
                calls.append([call.id, call.name, call.arguments])
            else:
                assert call.index == len(calls) - 1, "calls come one after another"
                assert (call.id, call.name) == ("", "")
                calls[-1][2] += call.arguments
            assert call.index not in broken, "nothing is added to a call that broke off"
            if call.breaks_off:
                broken.add(call.index)
    return content, reasoning, calls, not broken


def folded(chunks):
    """The one choice of a streamed answer."""
    content, reasoning, calls, end = "", "", [], None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            end = choice["finish_reason"] or end
    return content, reasoning, calls, end


def whole(answer):
    message = answer["choices"][0]["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return (
        message["content"] or "",
        message.get("reasoning_content") or "",
        calls,
        answer["choices"][0]["finish_reason"],
    )
