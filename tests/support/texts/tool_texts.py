"""A call as models write it, and what tests make of answers."""

import itertools
from typing import Any

from penstock.service.parsers.registry import make_parser

ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln", "days": [1, {"a": "}"}]}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": "}"}]}}]',
    "pythonic": '[weather(city="Köln", days=[1, {"a": "}"}])]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    '<parameter=days>\n[1, {"a": "}"}]\n</parameter>\n</function>\n</tool_call>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    '<arg_key>days</arg_key>\n<arg_value>[1, {"a": "}"}]</arg_value>\n</tool_call>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
    '<parameter name="days">[1, {"a": "}"}]</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Köln", "days": [1, {"a": "}"}]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln", "days": [1, {"a": "}"}]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Köln", "days": [1, {"a": "}"}]}<|tool_call_end|><|tool_calls_section_end|>',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:[1,{a:<|"|>}<|"|>}]}<tool_call|>',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Köln<escape>,days:[1,{a:<escape>}<escape>}]}"
    "<end_function_call>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Köln", "days": [1, {"a": "}"}]}<|call|>',
}
ARGUMENTS = '{"city": "Köln", "days": [1, {"a": "}"}]}'
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}, "a": {"type": "integer"}},
}
TOOLS = {"weather": WEATHER, "time": {"type": "object", "properties": {"a": {"type": "integer"}}}, "ns.find": None}


def take_apart(parts, tool_format, reasoning_format=None, **given):
    """Content, reasoning and calls of an answer that comes in parts, and whether all of these calls are whole."""
    numbers = itertools.count()
    options: dict[str, Any] = {"tools": TOOLS, "new_call_id": lambda: f"id{next(numbers)}"} | given
    parser = make_parser(tool_format, reasoning_format, **options)
    text = "".join(parts)
    content, placed, reasoning, thought = "", "", "", ""
    joiner = "\n" if "harmony" in (tool_format, reasoning_format) else "\0"  # is between messages, in no token
    num_read = num_known = 0
    calls: list[list[str]] = []
    broken: set[int] = set()
    for part, piece in [*((part, parser.feed(part)) for part in parts), ("", parser.end())]:
        num_read += len(part)
        assert 0 <= piece.num_held <= num_read
        thought += "".join(text[begin:end] for begin, end in piece.reasoning_spans)
        written = (reasoning + piece.reasoning).replace(joiner, "")
        assert written == thought.replace(joiner, ""), "it stands where the parser says"
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
