"""The frames between the service and the processes that render chat templates, and the limits on a template.

A frame is its length, then msgpack.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from penstock.service.chat_templates.chat_message import TemplateInput

MEMORY_BYTES = 64 << 20
"""Memory for rendering a conversation, besides the renderer's own and ``MEMORY_PER_BYTE``."""
MEMORY_PER_BYTE = 48
"""Further memory per byte of the conversation: texts are copied a few times, and take up to 4 bytes per character."""
COMPILE_S = 2.0
"""CPU time for compiling the templates of a model and rendering a greeting with each."""
COMPILE_MEMORY_BYTES = 256 << 20
MAX_GROWTH, FREE_GROWTH_CHARS = 8, 1 << 20
"""Limit on the characters of a prompt: this many per byte of its conversation, plus this many."""
LONG_FRAME_BYTES = 1 << 20
"""A renderer ends after a longer conversation, since it would keep much of the memory."""

LENGTH_BYTES = 4
"""Size of the length before each frame."""
MAX_FRAME_BYTES = 1 << 30
_WIDE = 0
"""The msgpack type of integers with more than 64 bits, which are sent as decimal text."""


class TemplateFailure(Enum):
    """Why a template does not render a conversation."""

    REFUSED = "refused"
    """The template or its limits refuse it."""
    NOT_CONTINUABLE = "not continuable"
    """It does not show the last message as it is."""
    ANSWER_NOT_SHOWN = "answer not shown"
    """It does not show an answer as it is, so nothing can follow one."""


class Setup(msgspec.Struct, array_like=True):
    """The first frame to a renderer."""

    sources: Mapping[str, str]
    """Sources by template name."""
    special_tokens: Mapping[str, str]
    timeout_s: float
    """CPU time for rendering one conversation."""


class Compiled(msgspec.Struct, array_like=True):
    """Facts of a compiled template."""

    shows_tools: bool
    roles: frozenset[str]


class Ready(msgspec.Struct, array_like=True):
    """The response to a ``Setup``. If ``problem`` is not empty, the template ``name`` cannot be compiled."""

    templates: Mapping[str, Compiled]
    name: str = ""
    problem: str = ""


class Render(msgspec.Struct, array_like=True):
    """A conversation for a template."""

    name: str
    chat: TemplateInput
    after_answer: bool = False
    """Whether to return only the text that follows the assistant's answer."""


class Rendered(msgspec.Struct, array_like=True):
    """The response to a ``Render``."""

    text: str = ""
    marks: str = ""
    """The marks of the text's characters, as in ``text``."""
    failure: TemplateFailure | None = None
    problem: str = ""


def encode(value: object) -> bytes:
    """Returns a frame's content."""
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # JSON's integers have no bounds, and msgpack's have
        return msgspec.msgpack.encode(_with_wide(msgspec.to_builtins(value, builtin_types=(int,))))


def _with_wide(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_wide(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_wide(each) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_WIDE, str(value).encode())
    return value


def read_wide(code: int, data: memoryview) -> int:
    """Returns an integer that ``encode`` wrote as text."""
    assert code == _WIDE
    return int(bytes(data))
