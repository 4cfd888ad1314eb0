"""Injects appended content into the output of one request: tokenizes it, in order, and reports what was refused."""

import asyncio
import logging
from collections.abc import Callable

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import Refused
from penstock.service.errors import Reason, ServiceError, from_refusal
from penstock.service.requests.generate import RequestBuilder

_log = logging.getLogger(__name__)

MAX_WAITING_INJECTIONS = 16
"""The maximum number of appends of a request that wait to be tokenized."""

Refuse = Callable[[ServiceError], None]


class Injections:
    """The appends of one request that are not in its history yet. Each is injected or refused."""

    def __init__(self, engine: Engine, request_builder: RequestBuilder, request_id: str) -> None:
        self._engine = engine
        self._request_builder = request_builder
        self._request_id = request_id
        self._last: asyncio.Task[None] | None = None
        """Tokenizes the newest append, and waits for those before it."""
        self._num_waiting = 0
        self._with_engine: list[Refuse] = []
        """One for each append that the engine has accepted, and not injected yet."""
        self._is_closed = False

    def add(
        self, append: pb.GenerationAppend, tenant: str, refuse: Refuse, preparation: "asyncio.Task[None] | None"
    ) -> None:
        """Injects the content of ``append`` after ``preparation``, which puts the request into the queue. Calls
        ``refuse`` once, perhaps later, if it cannot be injected."""
        if self._num_waiting == MAX_WAITING_INJECTIONS:
            refuse(ServiceError(Reason.PREPARATION_FULL, "too many appends wait to be tokenized; try again"))
            return
        self._num_waiting += 1
        before = [task for task in (self._last, preparation) if task is not None]
        self._last = asyncio.create_task(self._inject(append, tenant, refuse, before))

    def injected(self) -> None:
        """Records that the engine has injected everything that it had accepted."""
        self._with_engine.clear()

    def close(self) -> None:
        """Refuses what is not injected, because the request has ended."""
        self._is_closed = True
        for refuse in self._with_engine:
            refuse(ServiceError(Reason.UNKNOWN_REF))
        self._with_engine.clear()

    async def _inject(
        self, append: pb.GenerationAppend, tenant: str, refuse: Refuse, before: "list[asyncio.Task[None]]"
    ) -> None:
        try:
            token_ids = await self._request_builder.prepare_injection(append, tenant)
            del append
            if before:
                await asyncio.wait(before)
            before.clear()  # or each task would keep all earlier ones
            self._submit(token_ids, refuse)
        except ServiceError as error:
            refuse(error)
        except Exception as error:
            _log.error("request %s: internal error", self._request_id, exc_info=error)
            refuse(ServiceError(Reason.INTERNAL))
        finally:
            self._num_waiting -= 1

    def _submit(self, token_ids: list[int], refuse: Refuse) -> None:
        """Raises ServiceError."""
        if self._is_closed:
            raise ServiceError(Reason.UNKNOWN_REF)
        self._with_engine.append(refuse)  # before, because the engine may inject the tokens at once
        try:
            if not self._engine.inject(self._request_id, token_ids):
                raise ServiceError(Reason.UNKNOWN_REF)
        except BaseException as error:
            self._with_engine.remove(refuse)
            if isinstance(error, Refused):
                raise from_refusal(error) from None
            raise
