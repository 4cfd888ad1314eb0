"""What the service and the processes that render chat templates send each other, and what a template may take.

Frames are msgpack, each after its length.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from penstock.service.chat_templates.chat_message import TemplateInput

MEMORY_BYTES = 64 << 20
"""For rendering a conversation, besides what a renderer has and ``MEMORY_PER_BYTE``."""
MEMORY_PER_BYTE = 48
"""More memory for each byte of the conversation: texts are copied a few times, and take up to 4 bytes a character."""
COMPILE_S = 2.0
"""Processor time for compiling the templates of a model and rendering a greeting with each."""
COMPILE_MEMORY_BYTES = 256 << 20
MAX_GROWTH, FREE_GROWTH_CHARS = 8, 1 << 20
"""A prompt has at most this many characters for each byte of its conversation, and this many more."""
LONG_FRAME_BYTES = 1 << 20
"""A renderer ends after a conversation that is longer, since it would keep much of the memory."""

LENGTH_BYTES = 4
"""Before each frame, its length."""
MAX_FRAME_BYTES = 1 << 30
_WIDE = 0
"""The type of an integer that has more than 64 bits, as decimal text."""


class TemplateFailure(Enum):
    """Why a template does not render a conversation."""

    REFUSED = "refused"
    """The template or its limits refuse it."""
    NOT_CONTINUABLE = "not continuable"
    """It does not show the last message as it is."""
    ANSWER_NOT_SHOWN = "answer not shown"
    """It does not show an answer as it is, so that nothing can follow one."""


class Setup(msgspec.Struct, array_like=True):
    """The first frame to a renderer."""

    sources: Mapping[str, str]
    """By the templates' names."""
    special_tokens: Mapping[str, str]
    timeout_s: float
    """Processor time for rendering one conversation."""


class Compiled(msgspec.Struct, array_like=True):
    """What a renderer says of a template that it has compiled."""

    shows_tools: bool
    roles: frozenset[str]


class Ready(msgspec.Struct, array_like=True):
    """The answer to a ``Setup``. If ``problem`` is not empty, the template ``name`` cannot be compiled."""

    templates: Mapping[str, Compiled]
    name: str = ""
    problem: str = ""


class Render(msgspec.Struct, array_like=True):
    """A conversation for a template."""

    name: str
    chat: TemplateInput
    after_answer: bool = False
    """Whether only what follows an answer of the assistant's is wanted."""


class Rendered(msgspec.Struct, array_like=True):
    """The answer to a ``Render``."""

    text: str = ""
    marks: str = ""
    """Of the text's characters, as in ``template_text``."""
    failure: TemplateFailure | None = None
    problem: str = ""


def encode(value: object) -> bytes:
    """A frame's content."""
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
    """The integer that ``encode`` wrote as text."""
    assert code == _WIDE
    return int(bytes(data))
