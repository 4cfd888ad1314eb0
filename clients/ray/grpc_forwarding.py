"""Passes calls of Serve's gRPC proxy on to a replica's child, with their metadata, and statuses back."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

Response = TypeVar("Response", bound=Message)
Metadata = Sequence[tuple[str, str | bytes]]

_OF_CONNECTION = frozenset({"user-agent", "te", "content-type"})


class CallFailed(Exception):
    """A call ended with an error. The call's context has its status."""


class CallContext(Protocol):
    """The part of Serve's ``RayServegRPCContext`` that is used here."""

    def invocation_metadata(self) -> list[tuple[str, str]]: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None: ...


async def forward_call(
    method: grpc.aio.UnaryUnaryMultiCallable[Any, Response], request: Message, context: CallContext, empty: Response
) -> Response:
    """Returns the response to a unary call. After a failure it returns ``empty``, which is not sent: a status in the
    context keeps its details, and one that is raised would lose them."""
    try:
        return await method(request, metadata=_metadata_for_child(context))
    except grpc.aio.AioRpcError as error:
        _set_status(context, error)
        context.set_trailing_metadata(list(error.trailing_metadata() or ()))
        return empty


async def forward_stream(method: Any, request: Any, context: CallContext) -> AsyncIterator[Message]:
    """Yields the responses to a streaming call; ``request`` is a message, or an iterator of messages. If the iterator
    is closed early, because the client has cancelled, so is the child's call. Raises CallFailed."""
    call = method(request, metadata=_metadata_for_child(context))
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        _set_status(context, error)
        raise CallFailed(f"{error.code().name}: {error.details()}") from None
    finally:
        call.cancel()


def _set_status(context: CallContext, error: grpc.aio.AioRpcError) -> None:
    context.set_code(error.code())
    context.set_details(error.details() or "")


def _metadata_for_child(context: CallContext) -> Metadata:
    """Returns the caller's metadata, such as the key and the trace, without those of the connection."""
    return tuple(
        (name, value)
        for name, value in context.invocation_metadata()
        if name not in _OF_CONNECTION and not name.startswith("grpc-")
    )
