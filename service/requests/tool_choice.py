"""Constrains an output to tool calls: those that ``tool_choice`` forces, and those of ``strict`` tools."""

from dataclasses import replace

import penstock.v1 as pb
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.parsers.harmony import HARMONY
from penstock.service.parsers.lark_grammar import AnswerShape, CallableTool, CannotBeHeld
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.tool_grammar import MARKED_FORMATS, call_grammar, text_grammar
from penstock.service.requests.answer_formats import AnswerFormats
from penstock.service.requests.chat import ToolSchemas, content_text, shows_tools

_FIELD = "chat.tool_choice"


def forces_call(chat: pb.Chat) -> bool:
    """Whether the output must be a call."""
    choice = chat.tool_choice
    return choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED or choice.WhichOneof("choice") == "function"


class CallConstraints:
    """Makes the constraints on calls for one served model."""

    def __init__(self, formats: AnswerFormats) -> None:
        self._formats = formats

    def applies(self, start: pb.GenerationStart) -> bool:
        """Whether a request's calls are constrained. Strict tools are if a marker distinguishes calls from text, and
        there is no other constraint."""
        if forces_call(start.chat):
            return True
        is_strict = shows_tools(start.chat) and any(tool.function.strict for tool in start.chat.tools)
        has_other = start.constraint.WhichOneof("kind") is not None
        return is_strict and not has_other and self._formats.with_tools.tool in MARKED_FORMATS

    def includes_reasoning(self, start: pb.GenerationStart) -> bool:
        """Whether a request's calls are constrained by a grammar that describes the reasoning too: that of harmony,
        since a call has a channel of its own."""
        return self._formats.with_tools.reasoning == HARMONY and self.applies(start)

    def check(self, start: pb.GenerationStart) -> None:
        """Makes the checks of a request that ``applies``, without reading schemas. Raises ServiceError."""
        chat, name = start.chat, start.chat.tool_choice.function
        for field in ("ignore_eos", "allowed_token_ids"):
            if getattr(start.sampling, field):
                raise invalid(_place(start), f"constrains the output, which {field} excludes; omit one of them")
        if not forces_call(chat):
            return
        if start.constraint.WhichOneof("kind") is not None:
            raise invalid(_FIELD, "cannot force a call together with constraint; set one of them")
        if not chat.tools:
            raise invalid(_FIELD, "needs tools, of which one is called")
        if name and all(tool.function.name != name for tool in chat.tools):
            raise invalid(_FIELD, "names a function that is not among the tools")
        if self._formats.with_tools.tool is None:
            raise unknown_format()

    def constraint(self, start: pb.GenerationStart, schemas: ToolSchemas) -> pb.Constraint:
        """Returns the constraint of a request that ``applies`` and has passed ``check``. ``schemas`` are those of its
        tools. Slow for long ones. Raises ServiceError."""
        chat, name = start.chat, start.chat.tool_choice.function
        is_forced = forces_call(chat)
        tools = [
            CallableTool(tool.function.name, schemas.of(index) if is_forced or tool.function.strict else None)
            for index, tool in enumerate(chat.tools)
            if name in ("", tool.function.name)
        ]
        one = bool(name) or (chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls)
        shape = AnswerShape(self._formats.shown_call, self._formats.marker_ids)
        if self.includes_reasoning(start):
            last = content_text(chat.messages[-1]) if chat.continue_final_message else ""
            shape = replace(shape, reasoning=HARMONY, in_reasoning=REASONING_FORMATS[HARMONY].is_open_in(last))
        write = call_grammar if is_forced else text_grammar
        tool_format = self._formats.with_tools.tool
        assert tool_format is not None, "checked before"
        try:
            return pb.Constraint(lark=write(tool_format, tools, one=one, shape=shape))
        except CannotBeHeld as error:
            raise invalid("chat.tools", str(error)) from None

    @staticmethod
    def renamed(error: ServiceError, start: pb.GenerationStart) -> ServiceError:
        """Returns an error of the constraint under the name of the schemas. If there are several, the invalid one is
        not known."""
        if error.reason is not Reason.INVALID_FIELD:
            return error
        place = _place(start)
        return ServiceError(error.reason, place + error.message.removeprefix(error.field), field=place)


def unknown_format() -> ServiceError:
    """Returns the error for tools whose calls can neither be parsed nor constrained."""
    return invalid(
        "chat.tools",
        "the format of this model's calls is unknown; the service's operator can set it with --tool-call-parser",
    )


def _place(start: pb.GenerationStart) -> str:
    """Returns the path of the schema that constrains calls, or that of all tools."""
    chat, is_forced = start.chat, forces_call(start.chat)
    held = [
        index
        for index, tool in enumerate(chat.tools)
        if (chat.tool_choice.function in ("", tool.function.name) if is_forced else tool.function.strict)
    ]
    return f"chat.tools[{held[0]}].function.parameters_json" if len(held) == 1 else "chat.tools"
