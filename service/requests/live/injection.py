"""Injects appended content into the output of one request: tokenizes it, in order, and reports what was refused."""

import asyncio
import logging
from collections.abc import Callable

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.request import Refused
from penstock.service.errors import Reason, ServiceError, from_refusal
from penstock.service.requests.chat import chat_options, shows_tools
from penstock.service.requests.generate import RequestBuilder

_log = logging.getLogger(__name__)

MAX_WAITING_INJECTIONS = 16
"""The maximum number of appends of a request that wait to be tokenized."""
MAX_UNINJECTED = 1024
"""The maximum number of appends of a request that are accepted and wait for the end of a step."""

Refuse = Callable[[ServiceError], None]


class Injections:
    """The appends of one request that are not in its history yet. Each is injected or refused."""

    def __init__(self, engine: Engine, request_builder: RequestBuilder, request_id: str) -> None:
        self._takes_any = False
        """Whether tokens may be injected; calls that are forced are known only when the prompt is prepared."""
        self._options = pb.Chat()
        """Appended messages are rendered with them, as if they were in the request's chat."""
        self._engine = engine
        self._request_builder = request_builder
        self._request_id = request_id
        self._last: asyncio.Task[None] | None = None
        """Tokenizes the newest append, and waits for those before it."""
        self._waiting: dict[asyncio.Task[None], Refuse] = {}
        """The appends that the engine does not have yet, the oldest first."""
        self._with_engine: list[tuple[int, Refuse]] = []
        """The numbers of the appends that the engine has accepted but not injected yet."""
        self._is_closed = False

    def allow(self, start: pb.GenerationStart) -> None:
        """Accepts appends from now on, if the request with this ``start`` can take any. Copies the tools of its chat,
        which may have 4 MiB."""
        self._takes_any = start.sampling.n <= 1 and not start.HasField("constraint")
        if self._takes_any:
            self._options = chat_options(start.chat)

    @property
    def shows_tools(self) -> bool:
        """Whether the model sees tools, if the request is a chat."""
        return shows_tools(self._options)

    def add(
        self, append: pb.GenerationAppend, tenant: str, refuse: Refuse, preparation: "asyncio.Task[None] | None"
    ) -> None:
        """Injects the content of ``append`` after ``preparation``, which puts the request into the queue. Calls
        ``refuse`` once, perhaps later, if it cannot be injected."""
        try:
            if not self._takes_any:
                raise ServiceError(Reason.NOT_INJECTABLE)
            if len(self._waiting) == MAX_WAITING_INJECTIONS:
                raise ServiceError(Reason.PREPARATION_FULL, "too many appends wait to be tokenized; try again")
            self._engine.charge(tenant, Rated.TOKENIZER_CALL)
        except ServiceError as error:
            refuse(error)
            return
        except Refused as error:
            refuse(from_refusal(error))
            return
        before = [task for task in (self._last, preparation) if task is not None]
        self._last = asyncio.create_task(self._inject(append, tenant, refuse, before))
        self._waiting[self._last] = refuse
        self._last.add_done_callback(lambda task: self._waiting.pop(task, None))

    def take_injected(self) -> list[int]:
        """Returns the numbers of all accepted appends, which the engine has now injected."""
        append_ids = [append_id for append_id, _ in self._with_engine]
        self._with_engine.clear()
        return append_ids

    def close(self) -> None:
        """Refuses what is not injected, because the request has ended."""
        self._is_closed = True
        for refuse in (*(refuse for _, refuse in self._with_engine), *self._waiting.values()):
            refuse(ServiceError(Reason.UNKNOWN_REF))
        self._with_engine.clear()
        for task in self._waiting:
            task.cancel()

    async def _inject(
        self, append: pb.GenerationAppend, tenant: str, refuse: Refuse, before: "list[asyncio.Task[None]]"
    ) -> None:
        try:
            append_id = append.append_id
            token_ids = await self._request_builder.prepare_injection(append, self._options, tenant)
            del append
            if before:
                await asyncio.wait(before)
            before.clear()  # or each task would keep all earlier ones
            self._submit(token_ids, append_id, refuse)
        except ServiceError as error:
            if not self._is_closed:  # otherwise it was refused already
                refuse(error)
        except Exception as error:
            _log.error("request %s: internal error", self._request_id, exc_info=error)
            if not self._is_closed:
                refuse(ServiceError(Reason.INTERNAL))

    def _submit(self, token_ids: list[int], append_id: int, refuse: Refuse) -> None:
        """Raises ServiceError."""
        if self._is_closed:
            raise ServiceError(Reason.UNKNOWN_REF)
        if len(self._with_engine) == MAX_UNINJECTED:
            raise ServiceError(Reason.PREPARATION_FULL, "too many appends wait for the end of a step; try again")
        self._with_engine.append((append_id, refuse))  # first, because the engine may inject the tokens at once
        try:
            if not self._engine.inject(self._request_id, token_ids):
                raise ServiceError(Reason.UNKNOWN_REF)
        except BaseException as error:
            if not self._is_closed:
                self._with_engine.pop()
            if isinstance(error, Refused):
                raise from_refusal(error) from None
            raise
