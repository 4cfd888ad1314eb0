"""Prompts that arrive in pieces: the pieces, their limits, and the computation of what has arrived.

Knows neither streams nor the life of a request.
"""

import asyncio
import logging
import sys
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Union, cast

import penstock.v1 as pb
from penstock.scheduler.request import Event, Request
from penstock.service.config.field_rules import MAX_UNCUT_IDS
from penstock.service.config.limits import MAX_CHAT_MESSAGES, MAX_INNER_PARTS, chat_bytes
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.requests.chat import shows_tools
from penstock.service.requests.contexts import StoredContext
from penstock.service.requests.generate import RequestBuilder, ResponseMode
from penstock.service.requests.live.warm_up import PaidPrefix, PrefixWarmer
from penstock.service.requests.preparation import Origin
from penstock.service.requests.resumption import PreparedRequest

_log = logging.getLogger(__name__)

OPEN_PROMPT_TTL_S = 60.0
MAX_PIECES = 65_536
MAX_OPEN_BYTES = 64 << 20
"""The memory of all open prompts. A tenant may have half of what the others leave."""
_PROMPT_BYTES = 4 << 10
"""The memory overhead of an open prompt besides its content."""
_PIECE_BYTES = 150
"""The memory overhead of a piece besides its content."""
_MESSAGE_BYTES = 1 << 10
"""The memory of a chat message besides its texts."""
_ID_BYTES = 4
_FEW_BYTES = 64 << 10
"""Pieces that take less memory are joined and checked on the event loop, within a millisecond."""
_REST = 4
"""A warm-up is followed by a rest that is this many times as long as the tokenizer worked for it, because each one
tokenizes the whole prompt."""

Piece = Union[str, "array[int]", pb.Chat]
Prepare = Callable[[Origin, Callable[[Event], None], ResponseMode, StoredContext | None], Awaitable[PreparedRequest]]
"""Does what ``RequestBuilder.prepare`` does, with a start of its own."""


@dataclass(slots=True)
class OpenPromptBudget:
    """The memory that open prompts may take, in total and by tenant."""

    max_bytes: int = MAX_OPEN_BYTES
    num_bytes: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Counts memory. Raises ServiceError if there is too little."""
        own = self.by_tenant[tenant]
        if own + num_bytes > (self.max_bytes - (self.num_bytes - own)) // 2:
            raise ServiceError(Reason.OPEN_PROMPTS_FULL)
        self.num_bytes += num_bytes
        self.by_tenant[tenant] += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self.by_tenant[tenant] -= num_bytes
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class OpenPromptConfig:
    """What all open prompts of a service share."""

    warm_up: PrefixWarmer
    ttl_s: float = OPEN_PROMPT_TTL_S
    """The time after the last piece at which a prompt that was not committed ends."""
    max_ids: int = MAX_UNCUT_IDS
    """Limit on the token ids of a prompt that is not truncated."""
    budget: OpenPromptBudget = field(default_factory=OpenPromptBudget)


class _Size(NamedTuple):
    """The size of a piece, or of several."""

    num_bytes: int = 0
    """In memory, about."""
    length: int = 0
    """The number of ids, or of bytes of UTF-8."""
    num_messages: int = 0
    num_calls: int = 0
    num_parts: int = 0

    def changed(self, added: "_Size", removed: Iterable["_Size"]) -> "_Size":
        """Returns the size of pieces without some of them, and with another."""
        gone = [sum(sizes) for sizes in zip(*removed, strict=True)] or [0] * len(self)
        return _Size(*(size + more - less for size, more, less in zip(self, added, gone, strict=True)))


class PromptPieces(NamedTuple):
    """A snapshot of a prompt's pieces, which threads may join."""

    start: pb.GenerationStart
    """The start, except for its prompt."""
    options: pb.Chat
    """The chat of the start, except for its messages."""
    kind: str | None
    """The field of the prompt; None: the prompt is empty."""
    pieces: Sequence[Piece]
    num_bytes: int
    """The memory of all of it, about."""

    def whole(self) -> pb.GenerationStart:
        """Returns the start with the pieces as its prompt."""
        start = pb.GenerationStart()
        start.CopyFrom(self.start)
        start.open = False
        if self.kind == "text":
            start.text = "".join(cast(list[str], self.pieces))
        elif self.kind == "token_ids":
            for ids in cast("list[array[int]]", self.pieces):
                start.token_ids.ids.extend(ids)
        elif self.kind == "chat":
            start.chat.CopyFrom(self.options)
            for chat in cast(list[pb.Chat], self.pieces):
                start.chat.messages.extend(chat.messages)
        return start


class CommittedPrompt(NamedTuple):
    """An open prompt after its last piece."""

    pieces: PromptPieces
    paid: PaidPrefix

    async def prepare(
        self,
        request_builder: RequestBuilder,
        origin: Origin,
        sink: Callable[[Event], None],
        answer: ResponseMode,
        context: StoredContext | None,
    ) -> PreparedRequest:
        """Checks the whole prompt, then does what ``RequestBuilder.prepare`` does. Raises ServiceError."""
        pieces = self.pieces
        if pieces.num_bytes <= _FEW_BYTES:
            start = pieces.whole()
            request_builder.check(start)
        else:
            start = await request_builder.check_in_thread(pieces.whole, pieces.num_bytes, origin.tenant)
        prepared = await request_builder.prepare(start, origin, sink, answer, context)
        prepared.request.num_paid_tokens = self.paid.num_tokens(prepared.request.block_hashes)
        return prepared


class OpenPrompt:
    """The pieces of one prompt, from ``start`` to ``close``."""

    def __init__(
        self, config: OpenPromptConfig, start: pb.GenerationStart, tenant: str, end: Callable[[ServiceError], None]
    ) -> None:
        """``start`` has passed its checks. ``end`` is called if nothing is appended for too long, or at the deadline.
        Raises ServiceError."""
        self._config = config
        self._tenant = tenant
        self._start = pb.GenerationStart()
        self._start.CopyFrom(start)
        kind = start.WhichOneof("prompt")
        self._kind = kind
        """The field that has the pieces; None before the first one."""
        self._options = pb.Chat()
        if kind is not None:
            self._start.ClearField(kind)
        if kind == "chat":
            self._options.CopyFrom(start.chat)
            self._options.ClearField("messages")
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._paid = config.warm_up.new_paid_prefix()
        self._last_hash: list[bytes] = []
        """The hash of the last block that was computed ahead."""
        self._refused: Request | None = None
        """The warm-up of the prompt as it is now, if it was refused for some time."""
        self._changed = asyncio.Event()
        self._warming: asyncio.Task[None] | None = None
        self._pieces: list[Piece] = [""] if kind is None else [_piece(start, kind)]
        self._sizes = [_size(self._pieces[0])]
        self._total = self._sizes[0]
        self._num_fixed_bytes = _PROMPT_BYTES + self._start.ByteSize() + self._options.ByteSize()
        """The memory besides the pieces: that of tools, of a constraint and of lists may be far larger."""
        config.budget.take(tenant, self._num_bytes)

    @property
    def is_chat(self) -> bool:
        return self._kind == "chat"

    @property
    def shows_tools(self) -> bool:
        """Whether the model sees tools, if the prompt is a chat."""
        return shows_tools(self._options)

    def begin_warm_ups(self, request_id: str, deadline: float | None) -> None:
        """Starts to compute what arrives, and the time that a prompt may stay open."""
        self._restart_timer()
        if deadline is not None:
            self.set_deadline(deadline)
        if not self._is_truncated:  # truncation cuts the beginning, once the end is known
            self._warming = asyncio.create_task(self._warm_up(request_id))

    def append(self, append: pb.GenerationAppend) -> None:
        """Adds a piece, or puts it in place of others. ``append`` has passed the validator. Raises ServiceError,
        without changing anything."""
        kind = append.WhichOneof("content")
        assert kind is not None
        if self._kind not in (None, kind):
            raise invalid(kind, f"the pieces of this prompt are {self._kind}; append {self._kind}")
        if kind == "chat":
            for given, _ in append.chat.ListFields():
                if given.name != "messages":
                    raise invalid(f"chat.{given.name}", "allowed only in the chat of the start")
        num_kept = append.replace_from if append.HasField("replace_from") else len(self._pieces)
        if num_kept > len(self._pieces):
            raise invalid("replace_from", f"at most {len(self._pieces)}, the number of pieces; it is {num_kept}")
        if num_kept == MAX_PIECES:
            raise invalid(kind, f"the prompt has {MAX_PIECES:,} pieces, which is the most; append longer ones")
        piece = _piece(append, kind)
        size = _size(piece)
        total = self._total.changed(size, self._sizes[num_kept:])
        self._check_total(total, kind)
        if (change := total.num_bytes - self._total.num_bytes) > 0:
            self._config.budget.take(self._tenant, change)
        else:
            self._config.budget.give_back(self._tenant, -change)
        if self._kind is None:
            self._kind = kind
            self._pieces[0] = "" if kind == "text" else array("I") if kind == "token_ids" else pb.Chat()
        self._pieces[num_kept:], self._sizes[num_kept:], self._total = [piece], [size], total
        self._refused = None
        self._changed.set()
        self._restart_timer()

    def set_deadline(self, deadline: float) -> None:
        """Ends the prompt at ``deadline``, by ``time.monotonic()``, in place of an earlier deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        error = ServiceError(Reason.DEADLINE, "the deadline passed before the prompt was committed")
        self._deadline = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._end, error)

    def committed(self) -> CommittedPrompt:
        """Returns the prompt as it is now."""
        return CommittedPrompt(self._snapshot(), self._paid)

    def close(self) -> None:
        """Stops the warm-ups and gives the memory back. Safe to call twice."""
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        if self._warming is not None:
            self._warming.cancel()
        if self._pieces:
            self._config.budget.give_back(self._tenant, self._num_bytes)
        self._pieces = []
        self._end = _ignore  # it refers to this object's owner: a reference cycle

    @property
    def _num_bytes(self) -> int:
        return self._num_fixed_bytes + self._total.num_bytes

    @property
    def _is_truncated(self) -> bool:
        return self._start.HasField("truncate_prompt_tokens")

    def _check_total(self, total: _Size, kind: str) -> None:
        max_ids = max(self._config.max_ids, MAX_UNCUT_IDS) if self._is_truncated else self._config.max_ids
        limits = [
            ("ids", total.length, max_ids) if kind == "token_ids" else ("bytes", total.length, MAX_TEXT_BYTES),
            ("messages", total.num_messages, MAX_CHAT_MESSAGES),
            ("tool_calls", total.num_calls, MAX_INNER_PARTS),
            ("content_parts", total.num_parts, MAX_INNER_PARTS),
        ]
        for what, number, most in limits:
            if number > most:
                problem = f"the prompt has at most {most:,} {what} in all its pieces; it would have {number:,}"
                raise invalid(kind, problem)

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        error = ServiceError(Reason.OPEN_PROMPT_EXPIRED)
        self._timer = asyncio.get_running_loop().call_later(self._config.ttl_s, self._end, error)

    def _snapshot(self) -> PromptPieces:
        return PromptPieces(self._start, self._options, self._kind, self._pieces.copy(), self._num_bytes)

    async def _warm_up(self, request_id: str) -> None:
        """Computes what has arrived, again and again."""
        number = 0
        if self._kind is not None:
            self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            number += 1
            try:
                rest_s = await self._warm_up_once(Origin(f"{request_id}.{number}", self._tenant, time.monotonic()))
            except Exception:
                _log.exception("request %s: its open prompt could not be computed ahead", request_id)
                return
            await asyncio.sleep(rest_s)

    async def _warm_up_once(self, origin: Origin) -> float:
        """Computes what has arrived; returns how long the service then rests."""
        request, worked_s = self._refused, 0.0
        try:
            if request is None:
                request, worked_s = await self._prepared(origin)
            self._refused = None
            last_hash = request.block_hashes[-1:]
            if last_hash and last_hash != self._last_hash:
                await self._config.warm_up.run(request, self._paid, self._config.ttl_s)
                self._last_hash = last_hash
        except ServiceError as error:
            worked_s = worked_s or time.monotonic() - origin.arrival
            if error.retry_after_ms is None or error.retry_after_ms < 0:
                return _REST * worked_s  # errors in the prompt are reported when it is committed
            self._refused = None if self._changed.is_set() else request
            self._changed.set()
            return max(_REST * worked_s, error.retry_after_ms / 1000)
        return _REST * worked_s

    async def _prepared(self, origin: Origin) -> tuple[Request, float]:
        continue_from = self._start.continue_from
        pieces = self._snapshot()._replace(start=pb.GenerationStart(continue_from=continue_from))
        return await self._config.warm_up.prepare(pieces.whole, pieces.num_bytes, continue_from, origin)


def _piece(message: pb.GenerationStart | pb.GenerationAppend, kind: str) -> Piece:
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return array("I", message.token_ids.ids)
    chat = pb.Chat()
    chat.messages.extend(message.chat.messages)
    return chat


def _size(piece: Piece) -> _Size:
    if isinstance(piece, str):
        return _Size(_PIECE_BYTES + sys.getsizeof(piece), utf8_bytes(piece))
    if isinstance(piece, array):
        return _Size(_PIECE_BYTES + _ID_BYTES * len(piece), len(piece))
    return _Size(
        _PIECE_BYTES + piece.ByteSize() + _MESSAGE_BYTES * len(piece.messages),
        chat_bytes(piece.messages),
        len(piece.messages),
        sum(len(message.tool_calls) for message in piece.messages),
        sum(len(message.content_parts) for message in piece.messages),
    )


def _ignore(error: ServiceError) -> None:
    """Does nothing."""
