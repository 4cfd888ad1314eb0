"""The stored responses of the gateway: the store in memory, its file if there is one, and what requests need of both.

For the event loop; the file is written in a thread.
"""

import asyncio
import logging
import math
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter

from penstock.clients.gateway.errors import GatewayError, invalid, try_again
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.schemas.responses import MAX_ITEMS, InputItem
from penstock.clients.gateway.schemas.unsupported import shown
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.stored.response_file import ResponseFile
from penstock.clients.gateway.stored.response_store import ResponseStore, StoreFull
from penstock.clients.gateway.stored.stored_response import Content, StoredResponse
from penstock.clients.host.parse_turns import ParseTurns

T = TypeVar("T")
_SWEEP_S = 30.0
"""How long expired responses, which are no longer found, may still take memory."""
_TURN_BYTES = 8 << 10
"""Longer conversations wait for their turn to be parsed, as bodies do."""
_CONTINUABLE = ("completed", "incomplete")
_INTERRUPTED = {
    "status": "failed",
    "error": {"code": "server_error", "message": "the gateway ended before the response was complete"},
}
_items = TypeAdapter(list[InputItem])

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EarlierTurns:
    """The part of a conversation that a request continues."""

    items: list[InputItem] = field(default_factory=list)
    session_id: str = ""
    """The service's session of the conversation; empty: there are no earlier turns."""


class StoredResponses:
    """All stored responses. Use it by ``async with``."""

    def __init__(self, settings: GatewaySettings, turns: ParseTurns) -> None:
        """Opens the file, if the settings have one, and loads what it has. Raises PenstockError."""
        self.is_on = settings.responses_ttl_s > 0
        self._turns = turns
        self._store = ResponseStore(settings.responses_ttl_s, settings.max_responses_bytes)
        self._file = None
        if settings.responses_file is not None and self.is_on:
            self._file = ResponseFile(settings.responses_file)
            self._store.load(map(_ended, self._file.load()))
        self._lock = asyncio.Lock()
        self._saving = set[asyncio.Task[bool]]()
        self._thread = ThreadPoolExecutor(1, "penstock-gateway-responses")

    async def __aenter__(self) -> "StoredResponses":
        self._sweeper = asyncio.create_task(self._sweep(), name="penstock-gateway-responses")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeper.cancel()
        await self.save()
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    def count(self) -> int:
        """Returns the number of stored responses."""
        return len(self._store)

    def size(self) -> int:
        """Returns the size of all stored responses, in bytes."""
        return self._store.num_bytes

    def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Returns a response of this tenant. Raises GatewayError, the same one for unknown ids and for those of other
        tenants."""
        found = self._store.find(response_id, tenant)
        if found is None:
            raise GatewayError(
                404, _not_stored("response_id", response_id), param="response_id", code="response_not_found"
            )
        return found

    async def earlier_turns(self, response_id: str | None, tenant: str, held: ExitStack) -> EarlierTurns:
        """Returns what precedes a request that continues a response. Holds the response until ``held`` is closed.
        Raises GatewayError."""
        if response_id is None:
            return EarlierTurns()
        previous = self._store.find(response_id, tenant)
        if previous is None:
            problem = _not_stored("previous_response_id", response_id)
            raise GatewayError(404, problem, param="previous_response_id", code="previous_response_not_found")
        if previous.is_live:
            raise invalid("previous_response_id", "this response is still in progress; wait until it has ended")
        if (status := previous.content.field("status")) not in _CONTINUABLE:
            raise invalid("previous_response_id", f"this response is {status}; continue one before it")
        self._store.hold(previous)
        held.callback(self._store.release, previous)
        items = await self._items_of(previous, _checked_items, with_output=True)
        if len(items) > MAX_ITEMS:
            problem = f"the conversation has more than {MAX_ITEMS:,} items; send those that matter as input"
            raise invalid("previous_response_id", problem)
        return EarlierTurns(items, previous.session_id)

    async def input_items(self, response: StoredResponse) -> list[Any]:
        """Returns the items that a response answers, in order: those of earlier turns and its own, as JSON."""
        with ExitStack() as held:
            self._store.hold(response)
            held.callback(self._store.release, response)
            return await self._items_of(response, _json_items, with_output=False)

    async def add(self, response: StoredResponse) -> None:
        """Stores a response, in the file too. Raises GatewayError, and then does not store it."""
        try:
            self._store.add(response)
        except StoreFull:
            raise self._no_room(response.num_bytes) from None
        if not await self.save():
            self._store.delete(response)
            raise try_again(503, "the gateway's file of responses cannot be written", code="responses_unwritable")

    async def keep(self, response: StoredResponse, answer: Json) -> bool:
        """Stores a response that has ended, with this answer; returns whether it is stored."""
        response.content = await Content.encode(answer)
        try:
            await self.add(response)
        except GatewayError as error:
            _log.warning("a response is not stored: %s", error.message)
            return False
        return True

    async def end(self, response: StoredResponse, content: Content) -> None:
        """Sets the content of a live response, which has ended. If that has no room, the response has failed. If the
        file cannot be written, the content is only in memory until it can."""
        try:
            self._store.end(response, content)
        except StoreFull:
            error = {"code": "server_error", "message": self._no_room(content.num_bytes).message}
            failed = response.content.with_fields({"status": "failed", "error": error})
            self._store.end(response, failed, may_exceed=True)  # by the length of the error
        await self.save()

    async def delete(self, response: StoredResponse) -> None:
        """Deletes a response, in the file too. Raises GatewayError if the file cannot be written."""
        self._store.delete(response)
        if not await self.save():
            message = "the response is still in the gateway's file, which cannot be written; the gateway tries again"
            raise GatewayError(503, message, code="responses_unwritable")

    async def save(self) -> bool:
        """Writes all changes to the file; returns whether that was possible. Otherwise they wait for the next time."""
        if self._file is None:
            self._store.take_changes()
            return True
        saving = asyncio.create_task(self._save(self._file))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        return await asyncio.shield(saving)  # a request that ends now must not withdraw what waits to be written

    async def _save(self, file: ResponseFile) -> bool:
        async with self._lock:  # meanwhile changes gather, for one transaction
            changes = self._store.take_changes()
            if not changes:
                return True
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, file.write, changes)
            except sqlite3.Error as error:
                self._store.restore_changes(changes)
                _log.error("the file of stored responses cannot be written: %s", error)
                return False
            return True

    def _no_room(self, num_bytes: int) -> GatewayError:
        most = self._store.max_tenant_bytes
        if num_bytes > most:
            message = (
                f"a tenant may store {most:,} bytes, and this response has {num_bytes:,}; send less, or store: false"
            )
            return GatewayError(413, message, code="request_too_large")
        message = (
            "the responses of this tenant that are in progress, and those that they continue, leave no room for "
            "another; wait until some have ended, or begin a new conversation"
        )
        return try_again(429, message, code="responses_full")

    async def _items_of(
        self, response: StoredResponse, parse: Callable[[StoredResponse, bool], list[T]], *, with_output: bool
    ) -> list[T]:
        """Returns the items of a conversation, with the last response's output or without it. ``parse`` returns those
        of one turn, with its output or without it."""
        turns = self._store.conversation(response)
        if sum(turn.num_bytes for turn in turns) <= _TURN_BYTES:
            return [item for turn in turns for item in parse(turn, with_output or turn is not response)]
        items: list[Any] = []
        async with self._turns.turn(response.tenant):
            for turn in turns:
                with self._turns.portion():
                    items += parse(turn, with_output or turn is not response)
                await self._turns.pause()
        return items

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._store.expire()
            await self.save()


def _json_items(turn: StoredResponse, with_output: bool) -> list[Any]:
    return turn.input_items() + (turn.content.output_items() if with_output else [])


def _checked_items(turn: StoredResponse, with_output: bool) -> list[InputItem]:
    return _items.validate_python(_json_items(turn, with_output))


def _ended(response: StoredResponse) -> StoredResponse:
    """Returns a response from a file. One that was live when the gateway ended has failed; its time to live begins."""
    if response.is_live:
        response.content = response.content.with_fields(_INTERRUPTED)
        response.is_live, response.expires_at = False, math.inf
    return response


def _not_stored(param: str, response_id: str) -> str:
    return (
        f"{param}: {shown(response_id)} is not stored, or not any more; another key's tenant, or another gateway, may "
        "have it"
    )
