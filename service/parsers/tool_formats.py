"""Tool calls in a model's text, in the formats that models are trained to write."""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.service.parsers.gemma_calls import FunctionGemmaParser, Gemma4Parser
from penstock.service.parsers.harmony import HARMONY, HARMONY_MARKERS, HarmonyParser
from penstock.service.parsers.incremental_text import Reading
from penstock.service.parsers.marked_calls import DeepSeekParser, KimiK2Parser
from penstock.service.parsers.pythonic import arguments_as_json, read_parentheses
from penstock.service.parsers.tagged_calls import Glm45Parser, MinimaxM2Parser, Qwen3CoderParser
from penstock.service.parsers.tool_parser import ToolCallParser

_NAME = re.compile(r"[\w.:-]*")


class _HermesParser(ToolCallParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

    def _read(self) -> Reading[None]:
        while (yield from self._read_content("<tool_call>")):
            if (yield from self._read_calls(self._read_object(), "<tool_call>")):
                yield from self._source.after_space()
                yield from self._source.starts_with("</tool_call>")


class _Llama3JsonParser(ToolCallParser):
    """{"name": ..., "parameters": {...}}, from the beginning of the answer, others after semicolons. There is no
    marker, so an object is a call only if it names one of the request's tools."""

    def _read(self) -> Reading[None]:
        while (yield from self._read_calls(self._read_next())):
            pass
        yield from self._read_rest()

    def _read_next(self) -> Reading[bool]:
        if self._num_calls and (yield from self._source.after_space()) == ";":
            self._source.at += 1
        return (yield from self._read_object(must_be_known=True))


class _MistralParser(ToolCallParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} in later models."""

    def _read(self) -> Reading[None]:
        while (yield from self._read_content("[TOOL_CALLS]")):
            yield from self._read_calls(self._read_marked(), "[TOOL_CALLS]")

    def _read_marked(self) -> Reading[bool]:
        if (yield from self._source.after_space()) == "[":
            return (yield from self._read_list())
        name = yield from self._source.match(_NAME)
        call_id = ""
        if name and (yield from self._source.starts_with("[CALL_ID]")):
            call_id = yield from self._source.match(_NAME)
        if name:
            yield from self._source.starts_with("[ARGS]")
        if not name or (yield from self._source.after_space()) != "{":
            return False
        self._open_call(name, call_id)
        whole = yield from self._source.nested(self._add_arguments)
        if not whole:
            self._break_off()
        return whole

    def _read_list(self) -> Reading[bool]:
        separator = "["
        while separator != "]":
            self._source.at += 1
            if separator not in ("[", ",") or not (yield from self._read_object()):
                return False
            self._source.keep()
            separator = yield from self._source.after_space()
        self._source.at += 1
        return True


class _PythonicParser(ToolCallParser):
    """[name(argument=value, ...), ...], from the beginning of the answer, only of the request's tools. A call is
    reported when it is complete, since its values are converted from Python to JSON."""

    def _read(self) -> Reading[None]:
        yield from self._read_calls(self._read_list())
        yield from self._read_rest()

    def _read_list(self) -> Reading[bool]:
        source = self._source
        separator = yield from source.after_space()
        if separator != "[":
            return False
        while separator != "]":
            source.at += 1
            if separator not in ("[", ","):
                return False
            yield from source.after_space()
            name = yield from source.match(_NAME)
            if name not in self._tools or (yield from source.char()) != "(":
                return False
            code = yield from read_parentheses(source)
            arguments = None if code is None else arguments_as_json(code)
            if arguments is None:
                return False
            self._open_call(name)
            self._add_arguments(arguments)
            separator = yield from source.after_space()
        source.at += 1
        return True


def _mistral_id() -> str:
    """Returns an id that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of calls."""

    parser: type[ToolCallParser]
    markers: tuple[str, ...] = ()
    """The texts of its syntax that may be special tokens of a model, which are in the text only on request."""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(_HermesParser, ("<tool_call>", "</tool_call>")),
    "llama3_json": ToolFormat(_Llama3JsonParser),
    "mistral": ToolFormat(_MistralParser, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), _mistral_id),
    "pythonic": ToolFormat(_PythonicParser),
    "qwen3_coder": ToolFormat(Qwen3CoderParser, Qwen3CoderParser.tags.markers),
    "glm45": ToolFormat(Glm45Parser, Glm45Parser.tags.markers),
    "minimax_m2": ToolFormat(MinimaxM2Parser, MinimaxM2Parser.tags.markers),
    "deepseek_v3": ToolFormat(DeepSeekParser, DeepSeekParser.markers()),
    "deepseek_v31": ToolFormat(DeepSeekParser, DeepSeekParser.markers()),
    "kimi_k2": ToolFormat(KimiK2Parser, KimiK2Parser.markers()),
    "gemma4": ToolFormat(Gemma4Parser, Gemma4Parser.markers()),
    "functiongemma": ToolFormat(FunctionGemmaParser, FunctionGemmaParser.markers()),
    HARMONY: ToolFormat(HarmonyParser, HARMONY_MARKERS),
}
"""The formats by the names for ``--tool-call-parser``."""
