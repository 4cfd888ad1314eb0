"""Calls as models of each family write them."""

import json
from collections.abc import Callable
from typing import Any


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """A value between tags: strings are unchanged, others are JSON."""
    return value if isinstance(value, str) else _json(value)


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(each, quote) for each in value) + "]"
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return "{" + ",".join(f"{key}:{_gemma(each, quote)}" for key, each in pairs) + "}"
    return _json(value)


def _qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm45(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def _minimax_m2(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def _deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    begin, end = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    return f"{begin}{name}\n```json\n{_json(arguments)}\n```{end}"


def _deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"


def _gemma4(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{_gemma(arguments, '<|' + chr(34) + '|>')}<tool_call|>"


def _functiongemma(name: str, arguments: dict[str, Any]) -> str:
    return f"<start_function_call>call:{name}{_gemma(arguments, '<escape>')}<end_function_call>"


def _harmony(name: str, arguments: dict[str, Any]) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"


def write_calls(kind: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Returns an answer that consists of calls."""
    if kind == "kimi_k2":
        inner = "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
            for index, (name, arguments) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    write, between, before, after = _WRITERS[kind]
    return before + between.join(write(name, arguments) for name, arguments in calls) + after


_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_WRITERS: dict[str, tuple[Callable[[str, dict[str, Any]], str], str, str, str]] = {
    "qwen3_coder": (_qwen3_coder, "\n", "", ""),
    "glm45": (_glm45, "\n", "", ""),
    "minimax_m2": (_minimax_m2, "", "<minimax:tool_call>\n", "</minimax:tool_call>"),
    "deepseek_v3": (_deepseek_v3, "\n", *_SECTION),
    "deepseek_v31": (_deepseek_v31, "", *_SECTION),
    "gemma4": (_gemma4, "", "", ""),
    "functiongemma": (_functiongemma, "", "", ""),
    "harmony": (_harmony, "<|start|>assistant", "", ""),
}
FAMILY_FORMATS = ("kimi_k2", *_WRITERS)
