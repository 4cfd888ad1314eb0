"""The servicers of openengine.v1: Inference, and Control."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from google.rpc import code_pb2, status_pb2
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, openengine_pb2_grpc, server_pb2

import penstock.v1 as pb
from penstock.scheduler.adapters import Adapter
from penstock.scheduler.planning.rate_limit import Rated
from penstock.service.auth.identity import current_principal
from penstock.service.errors import ServiceError, StatusError, invalid, to_status
from penstock.service.requests.generate import ResponseMode
from penstock.service.rpc.foreign.contracts import ContractParts, protocol_error, renamed_status
from penstock.service.rpc.foreign.live_calls import LiveCalls
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.rpc.openengine.facts import ServerFacts
from penstock.service.rpc.openengine.generation_start import field_names, generation_start
from penstock.service.rpc.openengine.kv_events import KvSubscriptions, check_ranks
from penstock.service.rpc.openengine.kv_sources import kv_sources
from penstock.service.rpc.openengine.output import EventEncoder
from penstock.service.rpc.single_call import SingleCall, status_error

MAX_ENDED_IDS = 4096
"""How many ids of ended requests are kept for Abort."""

Context = grpc.aio.ServicerContext[Any, Any]


def add_to_server(parts: ContractParts) -> "Control":
    """Adds the contract to the server."""
    inference = Inference(parts)
    control = Control(parts, inference)
    openengine_pb2_grpc.add_InferenceServicer_to_server(inference, parts.server)
    openengine_pb2_grpc.add_ControlServicer_to_server(control, parts.server)
    return control


class Inference(openengine_pb2_grpc.InferenceServicer):
    """Translates requests, and keeps the live ones by the ids that callers gave them."""

    def __init__(self, parts: ContractParts) -> None:
        self._parts = parts
        self.live = LiveCalls()
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()
        """The last requests that ended, by tenant and id."""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Context) -> None:
        """Streams tokens, and the end of each output. Before a request is accepted, a failure is the call's status;
        later it is an EngineError, and the call ends with OK."""
        tenant = current_principal.get().tenant
        try:
            if request.lora_name and request.model not in ("", self._parts.model_name):
                raise invalid("model", f"must be {self._parts.model_name}, the base of all adapters, or empty")
            start = generation_start(request, context.invocation_metadata() or ())
        except ServiceError:
            self._parts.engine.charge(tenant, Rated.REQUEST)  # a refusal counts too
            raise
        encoder = EventEncoder(request, start, self._parts.pool.tokenizer.pieces)
        generation = _LiveGeneration(encoder, request)
        # The log-probabilities of a prompt are in one message.
        answer = ResponseMode.WHOLE if start.output.HasField("prompt_logprobs") else ResponseMode.STREAMED
        call = SingleCall(self._parts.generation, start, context, encoder, answer, error_of=generation.error_of)
        encoder.live = call.live
        with self.live.registered(tenant, encoder.request_id, generation.abort):
            try:
                await call.run(start)
            finally:
                self._keep_id(tenant, encoder.request_id)

    def has_ended(self, tenant: str, request_id: str) -> bool:
        """Returns whether a request with this id ended not long ago."""
        return (tenant, request_id) in self._ended

    def _keep_id(self, tenant: str, request_id: str) -> None:
        self._ended[tenant, request_id] = None
        self._ended.move_to_end((tenant, request_id))
        if len(self._ended) > MAX_ENDED_IDS:
            self._ended.popitem(last=False)


class Control(openengine_pb2_grpc.ControlServicer):
    """Reports facts, load, health and KV events, and ends requests."""

    def __init__(self, parts: ContractParts, inference: Inference) -> None:
        self._parts = parts
        self._inference = inference
        self._facts = ServerFacts(parts)
        self._kv_events = KvSubscriptions(parts.engine.kv_events)

    def close(self) -> None:
        self._kv_events.close()

    async def GetServerInfo(self, request: server_pb2.GetServerInfoRequest, context: Context) -> server_pb2.ServerInfo:
        return self._facts.server()

    async def GetModelInfo(self, request: model_pb2.GetModelInfoRequest, context: Context) -> model_pb2.ModelInfo:
        if not request.model:
            raise invalid("model", f"is required; the served model is {self._parts.model_name}")
        if request.model != self._parts.model_name:
            raise protocol_error(
                grpc.StatusCode.NOT_FOUND,
                f"model: there is no model {request.model[:64]!r}; the served model is {self._parts.model_name}",
            )
        return self._facts.model()

    async def GetLoad(self, request: server_pb2.GetLoadRequest, context: Context) -> server_pb2.LoadInfo:
        return self._facts.load(include_per_rank=request.include_per_rank)

    async def Health(self, request: lifecycle_pb2.HealthRequest, context: Context) -> lifecycle_pb2.HealthResponse:
        if request.include_inference_probe:
            raise invalid(
                "include_inference_probe",
                "is not supported: callers of Health need no credentials; call Generate with max_tokens 1",
            )
        return self._facts.health(request)

    async def Abort(self, request: lifecycle_pb2.AbortRequest, context: Context) -> lifecycle_pb2.AbortResponse:
        """Ends the caller's request with this id, or all requests of its tenant in this contract."""
        tenant, inference = current_principal.get().tenant, self._inference
        match request.WhichOneof("target"):
            case "request_id" if request.request_id:
                count = inference.live.abort(tenant, request.request_id)
                if not count and inference.has_ended(tenant, request.request_id):
                    return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED)
                if not count:
                    raise protocol_error(
                        grpc.StatusCode.NOT_FOUND, "request_id: no live request of this caller has this id"
                    )
            case "all_requests":
                count = inference.live.abort_all(tenant)
            case "kv_session":
                raise invalid("kv_session", "is not supported: this service has no KV sessions; set request_id")
            case _:
                raise invalid("target", "is required; set request_id or all_requests")
        noun = "request was" if count == 1 else "requests were"
        return lifecycle_pb2.AbortResponse(status=lifecycle_pb2.ABORT_STATUS_ABORTED, message=f"{count} {noun} aborted")

    async def LoadLora(self, request: lora_pb2.LoadLoraRequest, context: Context) -> lora_pb2.LoadLoraResponse:
        name = request.adapter.lora_name
        was_loaded = name in self._parts.adapters
        with _lora_names({"name": "adapter.lora_name", "path": "adapter.source_path"}):
            self._parts.validator.check(pb.LoadAdapterRequest(name=name, path=request.adapter.source_path))
            adapter = await self._parts.adapters.load(name, request.adapter.source_path)
        return lora_pb2.LoadLoraResponse(adapter=_lora(adapter), already_loaded=was_loaded)

    async def UnloadLora(self, request: lora_pb2.UnloadLoraRequest, context: Context) -> lora_pb2.UnloadLoraResponse:
        with _lora_names({"name": "lora_name"}):
            self._parts.validator.check(pb.UnloadAdapterRequest(name=request.lora_name))
            adapter = self._parts.adapters.unload(request.lora_name)
        return lora_pb2.UnloadLoraResponse(adapter=_lora(adapter))

    async def ListLoras(self, request: lora_pb2.ListLorasRequest, context: Context) -> lora_pb2.ListLorasResponse:
        return lora_pb2.ListLorasResponse(adapters=map(_lora, self._parts.adapters))

    async def GetKvEventSources(
        self, request: kv_pb2.GetKvEventSourcesRequest, context: Context
    ) -> kv_pb2.GetKvEventSourcesResponse:
        check_ranks(request.data_parallel_ranks)
        return kv_pb2.GetKvEventSourcesResponse(sources=kv_sources(self._parts.kv_publisher()))

    async def SubscribeKvEvents(self, request: kv_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        await self._kv_events.subscribe(request, context)


def _lora(adapter: Adapter) -> lora_pb2.LoraAdapter:
    """Returns the message for an adapter. Adapters have no numbers."""
    return lora_pb2.LoraAdapter(lora_name=adapter.name, source_path=adapter.path)


@contextmanager
def _lora_names(names: Mapping[str, str]) -> Iterator[None]:
    """Gives the contract's names to the fields of errors."""
    try:
        yield
    except ServiceError as error:
        raise StatusError(renamed_status(to_status(error, current_request_id.get()), names)) from None


class _LiveGeneration:
    """A live request."""

    def __init__(self, encoder: EventEncoder, request: generation_pb2.GenerateRequest) -> None:
        self._encoder = encoder
        self._request = request

    def abort(self) -> None:
        """Ends the request, and with it its stream."""
        if not self._encoder.live.has_ended:
            self._encoder.is_aborted = True
            self._encoder.live.cancel()

    def error_of(self, status: status_pb2.Status) -> StatusError | None:
        """Returns the error that ends the call of a request with this status; None if the messages report the end."""
        is_reported = self._encoder.is_aborted or (
            self._encoder.live.was_accepted and status.code != code_pb2.DEADLINE_EXCEEDED
        )
        return None if is_reported else status_error(renamed_status(status, field_names(self._request)))
