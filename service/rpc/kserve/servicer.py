"""The servicer of inference.GRPCInferenceService."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor

import penstock.v1 as pb
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.request import Refused
from penstock.service.auth.identity import current_principal
from penstock.service.config.limits import UINT32_MAX
from penstock.service.errors import ServiceError, StatusError, from_refusal, invalid, to_status
from penstock.service.requests.pooled.embed import SingleEmbedBuilder
from penstock.service.rpc.foreign.caller_ids import MAX_ID_BYTES
from penstock.service.rpc.foreign.contracts import ContractParts, protocol_error, renamed_status
from penstock.service.rpc.frame_dispatcher import Frame, RefusedFrame
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.rpc.kserve.metadata import InferenceMetadata
from penstock.service.rpc.kserve.request import (
    EMBEDDING,
    InferOptions,
    fill_embedding,
    fill_generation,
    is_embedding,
)
from penstock.service.rpc.kserve.response import StreamEncoder, empty_response, whole_response
from penstock.service.rpc.kserve.tensors import Datatype, add_output, raw_numbers
from penstock.v1.kserve import METHODS, SERVICE, message_class

_NO_STATISTICS = (
    "this service counts requests elsewhere; read its metrics page or WatchStats of penstock.v1.AdminService"
)
_ONE_MODEL = "this service serves the model that it was started with; start another service for another model"
_NO_SHARED_MEMORY = "shared memory is not supported; send tensors in the request"
_NO_SETTINGS = "this service has its settings from its flags; change them there, and restart it"
_REFUSED: Mapping[str, str] = {
    "ModelStatistics": _NO_STATISTICS,
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), _ONE_MODEL),
    **{
        f"{kind}SharedMemory{action}": _NO_SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
    **dict.fromkeys(("TraceSetting", "LogSettings"), _NO_SETTINGS),
}
"""The methods that are refused with UNIMPLEMENTED, each with the reason and the remedy."""

Context = grpc.aio.ServicerContext[Any, Any]
Translated = TypeVar("Translated")
Method = Callable[[Any, Context], Any]


def add_to_server(parts: ContractParts) -> "InferenceService":
    """Adds the contract to the server."""
    servicer = InferenceService(parts)
    handlers = {method.name: _handler(method, servicer.behaviour(method.name)) for method in METHODS}
    parts.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    parts.server.add_registered_method_handlers(SERVICE, handlers)
    return servicer


def _handler(method: MethodDescriptor, behaviour: Method) -> "grpc.RpcMethodHandler[Any, Any]":
    parse = message_class(method.input_type.name).FromString
    serialize = message_class(method.output_type.name).SerializeToString
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(behaviour, parse, serialize)
    return grpc.unary_unary_rpc_method_handler(behaviour, parse, serialize)


class InferenceService:
    """Translates calls. The messages are those of ``penstock.v1.kserve``."""

    def __init__(self, parts: ContractParts) -> None:
        self._parts = parts
        self._metadata = InferenceMetadata(parts)

    def close(self) -> None:
        """Does nothing: its streams end with those of penstock.v1."""

    def behaviour(self, name: str) -> Method:
        """Returns the function that serves the method of this name."""
        if name in _REFUSED:
            return _refusing(_REFUSED[name])
        method: Method = getattr(self, name)
        return method

    async def ServerLive(self, request: Any, context: Context) -> Any:
        return self._metadata.server_live()

    async def ServerReady(self, request: Any, context: Context) -> Any:
        return self._metadata.server_ready()

    async def ModelReady(self, request: Any, context: Context) -> Any:
        return self._metadata.model_ready(request)

    async def ServerMetadata(self, request: Any, context: Context) -> Any:
        return self._metadata.server_metadata()

    async def ModelMetadata(self, request: Any, context: Context) -> Any:
        return self._metadata.model_metadata(request)

    async def ModelConfig(self, request: Any, context: Context) -> Any:
        return self._metadata.model_config(request)

    async def RepositoryIndex(self, request: Any, context: Context) -> Any:
        return self._metadata.repository_index(request)

    async def ModelInfer(self, request: Any, context: Context) -> Any:
        """Serves one request for a text or an embedding. Its failure is the status of the call."""
        if is_embedding(request, self._parts.generates):
            return await self._embed(request, context)
        complete = pb.CompleteRequest()
        options = self._charged(lambda: fill_generation(complete.start, request, may_stream=False))
        try:
            response = await self._parts.generation.Complete(complete, context)
        except StatusError as error:
            raise StatusError(renamed_status(error.status, options.field_names)) from None
        return whole_response(complete.start.model or self._parts.model_name, options, response)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Serves many requests for texts. Their failures are messages; only bytes that are no message end the
        stream."""
        encoder = StreamEncoder(self._parts.model_name)
        await self._parts.generation.serve_stream(self._frames(requests, encoder), context, encoder, encoder.mode_of)

    async def _frames(self, requests: AsyncIterator[Any], encoder: StreamEncoder) -> AsyncIterator[Frame]:
        """Yields the requests of a stream as frames of penstock.v1, each with a new ref."""
        ref = 0
        async for request in requests:
            ref = ref % UINT32_MAX + 1
            yield request if isinstance(request, ServiceError) else self._frame(ref, request, encoder)
            del request  # it may be megabytes, and the next one may not arrive for hours

    def _frame(self, ref: int, request: Any, encoder: StreamEncoder) -> Frame:
        frame = pb.GenerateRequest()
        start = frame.start
        start.ref = ref
        try:
            options = self._charged(lambda: self._streamed(start, request, encoder))
        except ServiceError as error:
            encoder.add_refused(ref, request.id if len(request.id) <= MAX_ID_BYTES else "")
            return RefusedFrame(ref, error)
        encoder.add_request(start, options)
        return frame

    def _streamed(self, start: pb.GenerationStart, request: Any, encoder: StreamEncoder) -> InferOptions:
        if is_embedding(request, self._parts.generates):
            raise invalid("outputs", "an embedding has one response; call ModelInfer")
        if request.id and encoder.has_live(request.id):
            raise invalid("id", "a live request of this stream has the same id; choose another, or leave it empty")
        return fill_generation(start, request, may_stream=True)

    async def _embed(self, request: Any, context: Context) -> Any:
        embed = pb.EmbedRequest()
        field_names = self._charged(lambda: fill_embedding(embed, request))

        def respond(values: Sequence[float], usage: pb.Usage) -> Any:
            response = empty_response(request.model_name or self._parts.model_name, request.id)
            add_output(response, EMBEDDING, Datatype.FP32, (1, len(values)))
            response.raw_output_contents.append(raw_numbers(Datatype.FP32, values))
            return response

        builder = SingleEmbedBuilder(self._parts.embed_builder, respond)
        try:
            return await self._parts.pooled_calls.serve(builder, embed, context)
        except ServiceError as error:
            raise StatusError(renamed_status(to_status(error, current_request_id.get()), field_names)) from None

    def _charged(self, translate: Callable[[], Translated]) -> Translated:
        """Returns what ``translate`` returns. A request that it refuses counts against the tenant's rate too."""
        try:
            return translate()
        except ServiceError:
            try:
                self._parts.engine.charge(current_principal.get().tenant, Rated.REQUEST)
            except Refused as refused:
                raise from_refusal(refused) from None
            raise


def _refusing(message: str) -> Method:
    async def refuse(request: Any, context: Context) -> Any:
        raise protocol_error(grpc.StatusCode.UNIMPLEMENTED, message)

    return refuse
