"""The servicer of vllm.grpc.engine.VllmEngine."""

import asyncio
import math
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
from google.rpc import status_pb2
from smg_grpc_proto.generated import common_pb2 as common, vllm_engine_pb2 as vllm, vllm_engine_pb2_grpc as vllm_grpc

from penstock.scheduler.planning.rate_limit import Rated
from penstock.service.auth.identity import current_principal
from penstock.service.errors import ServiceError, StatusError, invalid, to_status
from penstock.service.requests.generate import ResponseMode
from penstock.service.requests.pooled.embed import SingleEmbedBuilder
from penstock.service.rpc.foreign.contracts import ContractParts, protocol_error, renamed_status
from penstock.service.rpc.foreign.live_calls import LiveCalls
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.rpc.single_call import SingleCall, status_error
from penstock.service.rpc.vllm.embedding import embed_request, embed_response
from penstock.service.rpc.vllm.facts import Facts
from penstock.service.rpc.vllm.generation_start import FIELD_NAMES, generation_start
from penstock.service.rpc.vllm.kv_events import KvEventStreams
from penstock.service.rpc.vllm.load import LoadReader
from penstock.service.rpc.vllm.output import OutputEncoder
from penstock.service.rpc.vllm.tokenizer_bundle import TokenizerBundle
from penstock.service.transport.call_end import write

MAX_ABORTED_IDS = 1000
MAX_FLUSH_WAIT_S = 600.0
_NO_PROFILER = "this service has no profiler; use those of its platform, such as py-spy or Nsight Systems"

Context = grpc.aio.ServicerContext[Any, Any]


def add_to_server(parts: ContractParts) -> "VllmEngine":
    """Adds the contract to the server."""
    servicer = VllmEngine(parts)
    vllm_grpc.add_VllmEngineServicer_to_server(servicer, parts.server)  # type: ignore[no-untyped-call]
    return servicer


class VllmEngine(vllm_grpc.VllmEngineServicer):
    """Translates calls, and keeps the live requests by the ids that callers gave them."""

    def __init__(self, parts: ContractParts) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._facts = Facts(parts)
        self._load = LoadReader(parts.engine, parts.facts, parts.recent_stats)
        self._kv_events = KvEventStreams(parts.engine.kv_events, self._load)
        self._embed_builder = SingleEmbedBuilder(parts.embed_builder, embed_response)
        self._bundle = None if parts.files is None else TokenizerBundle(parts.files, parts.pool.tokenizer)
        self._live = LiveCalls()

    def close(self) -> None:
        self._kv_events.close()

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Streams chunks, if ``stream`` is set, and one complete for each choice. A request that an Abort ends has
        completes with the reason ``abort``; any other failure is the call's status."""
        tenant = current_principal.get().tenant
        try:
            start = generation_start(request)
        except ServiceError:
            self._engine.charge(tenant, Rated.REQUEST)  # a refusal counts too
            raise
        encoder = OutputEncoder(start, request.stream, self._parts.pool.tokenizer.eos_token_ids)
        generation = _Generation(encoder)
        # The log-probabilities of a prompt are in one message, as is the output of a choice without chunks.
        is_whole = not request.stream or start.output.HasField("prompt_logprobs")
        answer = ResponseMode.WHOLE if is_whole else ResponseMode.STREAMED
        call = SingleCall(self._parts.generation, start, context, encoder, answer, error_of=generation.error_of)
        encoder.live = call.live
        with self._live.registered(tenant, request.request_id, generation.abort):
            await call.run(start)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """Ends the caller's requests with these ids; unknown and empty ids are ignored."""
        if len(request.request_ids) > MAX_ABORTED_IDS:
            raise invalid("request_ids", f"at most {MAX_ABORTED_IDS:,}; there are {len(request.request_ids):,}")
        tenant = current_principal.get().tenant
        for request_id in filter(None, request.request_ids):
            self._live.abort(tenant, request_id)
        return vllm.AbortResponse()

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        try:
            return await self._parts.pooled_calls.serve(self._embed_builder, embed_request(request), context)
        except ServiceError as error:
            raise StatusError(renamed_status(to_status(error, current_request_id.get()), FIELD_NAMES)) from None

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        return vllm.HealthCheckResponse(healthy=self._parts.health.is_ready, message=self._engine.state.name.lower())

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        return self._facts.model()

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        return self._facts.server()

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        loads = [self._load.scheduler_load()] if not request.dp_rank else []
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=self._parts.version, dp_rank_count=1, loads=loads
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Streams the tokenizer's files as a zip."""
        self._engine.charge(current_principal.get().tenant, Rated.TOKENIZER_CALL)
        if self._bundle is None:
            raise protocol_error(grpc.StatusCode.FAILED_PRECONDITION, "the tokenizer's files are not known")
        chunks = await self._bundle.chunks()
        await context.send_initial_metadata(())
        for chunk in chunks:
            await write(context, chunk)

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        await self._kv_events.subscribe(request, context)

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """Waits until no request is live, and drops the prefix cache. So nothing of it remains, not even blocks that
        requests hold."""
        timeout_s = request.timeout_s
        if not 0 <= timeout_s <= MAX_FLUSH_WAIT_S:
            given = f"{timeout_s:g}" if math.isfinite(timeout_s) else "not finite"
            raise invalid("timeout_s", f"must be 0 to {MAX_FLUSH_WAIT_S:g} seconds; it is {given}")
        if self._engine.stats().requests:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._engine.wait_idle()
            except TimeoutError:
                live = self._engine.stats().requests
                return common.FlushCacheResponse(
                    message=f"{live} requests are live; call again with a longer timeout_s"
                )
        num_blocks = self._engine.flush_cache()
        return common.FlushCacheResponse(success=True, message=f"{num_blocks} blocks were dropped")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> NoReturn:
        raise protocol_error(grpc.StatusCode.UNIMPLEMENTED, _NO_PROFILER)

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> NoReturn:
        raise protocol_error(grpc.StatusCode.UNIMPLEMENTED, _NO_PROFILER)


class _Generation:
    """A live request."""

    def __init__(self, encoder: OutputEncoder) -> None:
        self._encoder = encoder

    def abort(self) -> None:
        """Ends the request, and with it its stream."""
        if not self._encoder.live.has_ended:
            self._encoder.is_aborted = True
            self._encoder.live.cancel()

    def error_of(self, status: status_pb2.Status) -> StatusError | None:
        """Returns the error that ends the call of a request with this status; None if it succeeded or was aborted."""
        return None if self._encoder.is_aborted else status_error(renamed_status(status, FIELD_NAMES))
