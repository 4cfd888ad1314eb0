"""Reads what gateways send about a request in the metadata of its call, and fills in its unset fields.

On a stream of many requests, the metadata are the defaults of all of them.
"""

from typing import Any

import grpc
from google.protobuf.message import Message

from penstock.clients.host.routing_headers import NO_HEADERS, Objectives, RoutingHeaderError, RoutingHeaders
from penstock.service.auth.identity import current_principal
from penstock.service.errors import ServiceError, invalid


class RoutingMetadata:
    """The metadata of all calls, with the operator's priorities of objectives."""

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives

    def read(self, call: "grpc.aio.ServicerContext[Any, Any] | None") -> RoutingHeaders:
        """Returns the values in the metadata of a call. Raises ServiceError."""
        if call is None:
            return NO_HEADERS
        try:
            return RoutingHeaders.read(call.invocation_metadata() or ())
        except RoutingHeaderError as error:
            raise _invalid(error) from None

    def fill(self, message: Message, headers: RoutingHeaders) -> None:
        """Sets those fields that the request has and that are not set. The tenant applies only if the caller may act
        for others: anyone can send it, and a gateway may forward the header of its own caller. Raises ServiceError."""
        if headers is NO_HEADERS:
            return
        try:
            headers.fill(message, self._objectives, may_act_for_others=current_principal.get().may_act_for_others)
        except RoutingHeaderError as error:
            raise _invalid(error) from None


ROUTING_METADATA = RoutingMetadata({})


def _invalid(error: RoutingHeaderError) -> ServiceError:
    return invalid(error.header, error.problem)
