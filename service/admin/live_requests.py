"""ListRequests and CancelRequests: the live requests for operators, in pages and in the order in which they entered the
queue.

Both let the event loop run after every few requests, however many there are.
"""

import asyncio
import base64
import hmac
import secrets
import time

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.loop.live_requests import LiveRequest, LiveRequestFilter, RequestStatus
from penstock.scheduler.request import EngineFinishReason
from penstock.service.config.durations import to_duration, to_seconds
from penstock.service.errors import ServiceError, invalid

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_CANCELS = 8
"""The maximum number of requests that are cancelled before the event loop runs: each takes up to a tenth of a
millisecond, most of it for the final message."""
MESSAGE = "cancelled by an administrator of the service"

_STATES = {status: pb.RequestState.Value(f"REQUEST_STATE_{status.name}") for status in RequestStatus}
_STATUSES = {state: status for status, state in _STATES.items()}
_NUMBER_BYTES, _SIGNATURE_BYTES = 8, 16


class LiveRequests:
    """Lists and cancels the live requests of a started engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._page_tokens = PageTokens()

    async def list_requests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Returns a page. The request has been validated. Raises ServiceError if its token is invalid."""
        wanted = request.filter
        after = self._page_tokens.read(request.page_token, wanted) if request.page_token else -1
        scan = self._engine.scan(_filter(wanted), after)
        page_size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        response = pb.ListRequestsResponse()
        num_found = 0
        while not scan.is_done:
            now = time.monotonic()
            for live in scan.read(page_size + 1 - num_found):
                if num_found == page_size:  # there is another page
                    response.next_page_token = self._page_tokens.write(after, wanted)
                    return response
                _fill(response.requests.add(), live, now)
                num_found += 1
                after = live.number
            await asyncio.sleep(0)
        return response

    async def cancel(self, request: pb.CancelRequestsRequest, response: pb.CancelRequestsResponse) -> None:
        """Cancels requests, and fills in ``response`` as it goes on: its own caller may leave meanwhile. The request
        has been validated. Raises ServiceError if it has no target."""
        match request.WhichOneof("target"):
            case "ids":
                await self._cancel_ids(list(dict.fromkeys(request.ids.request_ids)), response)
            case "filter" if not request.filter.ByteSize():
                raise invalid("filter", "would match every request; set one of its fields, or set all in its place")
            case "filter":
                await self._cancel_matching(_filter(request.filter), response)
            case "all":
                await self._cancel_matching(_filter(pb.RequestFilter()), response)
            case _:
                raise invalid("target", "is required; set ids, filter or all")

    async def _cancel_ids(self, request_ids: list[str], response: pb.CancelRequestsResponse) -> None:
        for start in range(0, len(request_ids), MAX_CANCELS):
            for request_id in request_ids[start : start + MAX_CANCELS]:
                if not self._cancel(request_id, response):
                    response.unknown_request_ids.append(request_id)
            await asyncio.sleep(0)

    async def _cancel_matching(self, wanted: LiveRequestFilter, response: pb.CancelRequestsResponse) -> None:
        scan = self._engine.scan(wanted)
        while not scan.is_done:
            for live in scan.read(MAX_CANCELS):
                self._cancel(live.request.request_id, response)
            await asyncio.sleep(0)

    def _cancel(self, request_id: str, response: pb.CancelRequestsResponse) -> bool:
        was_live = self._engine.abort(request_id, EngineFinishReason.CANCELLED, MESSAGE)
        response.cancelled_requests += was_live
        return was_live


class PageTokens:
    """Page tokens of one process: the arrival number of the last request of a page, signed together with the filter.

    Arrival numbers begin again with the process, so a token of an earlier one would leave out requests.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def write(self, number: int, wanted: pb.RequestFilter) -> str:
        """Returns the token for the page after the request with this arrival number."""
        raw = number.to_bytes(_NUMBER_BYTES, "big")
        signature = hmac.digest(self._secret, raw + wanted.SerializeToString(deterministic=True), "sha256")
        return base64.urlsafe_b64encode(raw + signature[:_SIGNATURE_BYTES]).decode()

    def read(self, token: str, wanted: pb.RequestFilter) -> int:
        """Returns the arrival number in a token. Raises ServiceError if it was not written by this object, or for
        another filter."""
        try:
            raw = base64.urlsafe_b64decode(token)
        except ValueError:
            raise _bad_token() from None
        number = int.from_bytes(raw[:_NUMBER_BYTES], "big")
        if not hmac.compare_digest(self.write(number, wanted).encode(), token.encode()):
            raise _bad_token()
        return number


def _bad_token() -> ServiceError:
    return invalid(
        "page_token",
        "must be the next_page_token of the page before, from this process and with the same filter; begin again "
        "without it",
    )


def _filter(wanted: pb.RequestFilter) -> LiveRequestFilter:
    return LiveRequestFilter(
        tenant=wanted.tenant or None,
        statuses=frozenset(_STATUSES[state] for state in wanted.states),
        arrived_by=time.monotonic() - to_seconds(wanted.min_age) if wanted.HasField("min_age") else None,
    )


def _fill(message: pb.LiveRequest, live: LiveRequest, now: float) -> None:
    request = live.request
    message.request_id = request.request_id
    message.client_request_id = request.client_request_id
    message.tenant = request.tenant
    message.state = _STATES[live.status]
    message.age.CopyFrom(to_duration(now - request.arrival))
    message.prompt_tokens = request.num_prompt_tokens
    message.output_tokens = live.num_output_tokens
    message.max_tokens = live.max_tokens
    message.num_choices = request.n
    message.priority = request.priority
    message.preemptions = live.num_preemptions
