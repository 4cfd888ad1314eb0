"""Composes what needs the worker's facts: the gRPC services with their interceptors, and the listeners. Knows neither
signals nor the order of a shutdown."""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from penstock.clients.host.distribution import installed_version
from penstock.clients.host.span_exporter import export_spans
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.admin.listener import AdminListener
from penstock.service.admin.operations import AdminService
from penstock.service.app.server_config import ServerConfig
from penstock.service.auth.identity import IdentityInterceptor
from penstock.service.config.addresses import Address
from penstock.service.config.contracts import CONTRACTS
from penstock.service.config.field_rules import ModelLimits
from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.config.limits import Validator
from penstock.service.requests.adapters import AdapterRegistry
from penstock.service.requests.answer_formats import AnswerFormats
from penstock.service.requests.contexts import ContextStore
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.grammar_check import GrammarChecks
from penstock.service.requests.live.idempotency import IdempotencyKeys
from penstock.service.requests.live.open_prompt import OpenPromptConfig
from penstock.service.requests.live.request_context import RequestContext
from penstock.service.requests.live.warm_up import PrefixWarmer
from penstock.service.requests.pooled.embed import EmbedRequestBuilder
from penstock.service.requests.pooled.inputs import PooledInputs
from penstock.service.requests.resumption import digest_replica
from penstock.service.rpc.classification import ClassificationService
from penstock.service.rpc.embedding import EmbeddingService
from penstock.service.rpc.foreign.contracts import AddedContract, ContractParts, add_contract
from penstock.service.rpc.generation import GenerationService
from penstock.service.rpc.health import Health
from penstock.service.rpc.interceptor import StatusInterceptor
from penstock.service.rpc.load_report import LoadReporter
from penstock.service.rpc.load_stream import LoadStreams
from penstock.service.rpc.model import ModelService
from penstock.service.rpc.pooled_calls import PooledCalls
from penstock.service.rpc.reflection import add_reflection
from penstock.service.rpc.routing_metadata import RoutingMetadata
from penstock.service.rpc.tokenizer import TokenizerService
from penstock.service.telemetry.collector import MetricsReader
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.metrics import Metrics
from penstock.service.telemetry.recent_stats import RecentStats
from penstock.service.telemetry.tracing import Telemetry
from penstock.service.text.tokenizer import Tokenizer, TokenizerPool
from penstock.service.transport.call_limits import CallLimits
from penstock.service.transport.connections import max_connections
from penstock.service.transport.transport import bind, new_server, only_for_this_user
from penstock.v1 import (
    classification_pb2,
    classification_pb2_grpc,
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    orca,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:  # its library is an extra
    from penstock.service.kv_publisher.publisher import KvEventPublisher

_STREAMS_BESIDES = 64
"""Streams on a connection besides those for requests: probes, multiplexed streams, tokenizing."""

SERVICES = tuple(
    service.full_name
    for file in (classification_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)


class RunningService:
    """The gRPC services, their listeners, and the parts that they share."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        formats: AnswerFormats,
        facts: WorkerFacts,
        health: Health,
    ) -> None:
        self.pool = TokenizerPool(
            tokenizer,
            block_size=facts.block_size,
            max_prompt_tokens=facts.max_model_len - 1,
            num_threads=config.tokenizer_threads,
        )
        self.grammars = GrammarChecks(tokenizer, config.closes_objects)
        if config.checks_grammars_soon:
            self.grammars.warm()
        self._config, self._engine, self._facts, self._health = config, engine, facts, health
        self._tls = config.tls
        self._close_exporter = export_spans(os.environ, "penstock")
        self._metrics = Metrics()
        self._recent_stats = RecentStats(lambda: engine.counters, self._metrics)
        self._bound: Address | None = None
        self._kv_publisher: KvEventPublisher | None = None
        self._load = LoadReporter(engine, self._recent_stats, config.target_ttft_s)
        self._load_streams = LoadStreams(self._load)
        telemetry = Telemetry(config.model_name, self._metrics)
        self.adapters = AdapterRegistry(config.model_name, engine if facts.max_loras else None, config.may_use_adapters)
        limits = ModelLimits(tokenizer.vocab_size, facts.max_model_len, config.model_name, self.adapters)
        self._validator = validator = Validator(limits)
        request_context = self._new_request_context(formats, telemetry)
        metadata = RoutingMetadata(config.objectives)
        self.generation = GenerationService(request_context, validator, config.heartbeat_s, metadata)
        self.pooled_calls = PooledCalls(engine, telemetry, metadata)
        self._limits = CallLimits()
        identity = IdentityInterceptor(config.authenticator)
        # Separate limits, so that operators get through even if callers have used up theirs.
        admin_limits = CallLimits(self._limits.connections)
        self._admin_interceptors = [StatusInterceptor(telemetry, admin_limits, self._load), identity]
        self._max_connections = max_connections(config.max_connections)
        self._server = self._new_server([StatusInterceptor(telemetry, self._limits, self._load), identity])
        self._admin_listeners: list[AdminListener] = []
        self._add_services(tokenizer, formats, health)

    def _new_request_context(self, formats: AnswerFormats, telemetry: Telemetry) -> RequestContext:
        config, engine, facts = self._config, self._engine, self._facts
        max_sequence_tokens = min(facts.max_model_len, facts.longest_in_cache)
        conversations = ContextStore(config.conversation_ttl_s, config.conversation_tokens)
        request_builder = RequestBuilder(
            self._validator,
            self.pool,
            config.model_name,
            max_sequence_tokens,
            max_retain_s=conversations.ttl_s,
            max_drafts=config.max_drafts,
            drafts_predictions=config.drafts_predictions,
            grammars=self.grammars,
            defaults=config.sampling_defaults,
            generates=config.generates,
            formats=formats,
            auto_retain_s=conversations.return_times.retain_s,
            replica=digest_replica(
                config.checkpoint, installed_version(), facts, max_sequence_tokens, config.sampling_defaults
            ),
            adapters=self.adapters,
        )
        warm_up = PrefixWarmer(engine, self.pool, request_builder, conversations)
        prompts = OpenPromptConfig(warm_up, config.open_prompt_ttl_s, facts.max_model_len - 1)
        return RequestContext(engine, request_builder, telemetry, conversations, prompts, IdempotencyKeys())

    def _new_server(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> grpc.aio.Server:
        scheduler = self._config.scheduler
        max_streams = scheduler.max_num_seqs + scheduler.max_queued_requests + _STREAMS_BESIDES
        cut, trailing = self._limits.connections.cut, self._load.trailers
        return new_server(interceptors, max_streams, self._max_connections, cut, trailing)

    def _add_services(self, tokenizer: Tokenizer, formats: AnswerFormats, health: Health) -> None:
        config, engine, server = self._config, self._engine, self._server
        model_service = ModelService(
            config.model_name,
            installed_version(),
            self._facts,
            tokenizer,
            self._validator,
            lambda: engine.config,
            config.speculation,
            config.sampling_defaults,
            labels=() if config.head is None else config.head.labels,
            generates=config.generates,
            formats=formats,
            adapters=self.adapters,
        )
        inputs = PooledInputs(self._validator, self.pool, config.model_name, self.adapters)
        embed_builder = EmbedRequestBuilder(inputs, config.embedding, self._facts.hidden_size)
        embedding_service = EmbeddingService(self.pooled_calls, embed_builder)
        classification_service = ClassificationService(self.pooled_calls, inputs, config.head)
        tokenizer_service = TokenizerService(self._validator, self.pool, engine.charge)
        classification_pb2_grpc.add_ClassificationServiceServicer_to_server(classification_service, server)
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(embedding_service, server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(model_service, server)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(tokenizer_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)  # type: ignore[no-untyped-call]
        self._contracts: list[AddedContract] = [
            add_contract(name, self._contract_parts(embed_builder, formats, health)) for name in config.contracts
        ]
        self._load_streams.add_to(server)
        added = (service for name in config.contracts for service in CONTRACTS[name].services)
        add_reflection((*SERVICES, HEALTH_SERVICE, orca.SERVICE, *added), server)

    def _contract_parts(
        self, embed_builder: EmbedRequestBuilder, formats: AnswerFormats, health: Health
    ) -> ContractParts:
        config = self._config
        return ContractParts(
            server=self._server,
            model_name=config.model_name,
            version=installed_version(),
            adapters=self.adapters,
            engine=self._engine,
            facts=self._facts,
            validator=self._validator,
            pool=self.pool,
            generation=self.generation,
            pooled_calls=self.pooled_calls,
            embed_builder=embed_builder,
            health=health,
            recent_stats=self._recent_stats,
            defaults=config.sampling_defaults,
            formats=formats,
            generates=config.generates,
            files=config.model_files,
            kv_publisher=lambda: self._kv_publisher,
        )

    def add_admin(self, addresses: Sequence[Address], loop_lag: LoopLag, is_going_down: Callable[[], bool]) -> None:
        """Adds admin listeners, which ``listen`` then opens too."""
        service = AdminService(
            self._engine,
            self._validator,
            loop_lag,
            self._recent_stats,
            is_going_down,
            self._config.configured,
            self.adapters,
        )
        self._admin_listeners = [
            AdminListener(
                address,
                service,
                self._health,
                self._admin_interceptors,
                self._config.tls,
                self._limits.connections,
                self._load.trailers,
            )
            for address in addresses
        ]

    def publish_kv_events(self, config: KvEventsConfig) -> "KvEventPublisher":
        """Publishes the prefix cache's changes, until the result is closed. Raises ListenError."""
        from penstock.service.kv_publisher.publisher import KvEventPublisher

        self._kv_publisher = publisher = KvEventPublisher(config, self._engine.kv_events)
        history = publisher.history
        self._metrics.read_kv_batches = lambda: (history.num_batches, history.num_dropped)
        return publisher

    def metrics_reader(self, loop_lag: LoopLag) -> MetricsReader:
        return MetricsReader(self._engine, self._facts, self._metrics, loop_lag, self._config.model_name)

    async def listen(self, address: Address, private: Sequence[Address] = ()) -> tuple[str, list[str]]:
        """Opens all listeners; callers' also on ``private`` Unix sockets, which only this user can open. Returns the
        callers' address, and those of the admin listeners. Raises ListenError."""
        try:
            bound = bind(self._server, address, self._config.tls)
            self._bound = address
            self._limits.connections.add_listener(Address.parse(bound), self._max_connections)
            with only_for_this_user():
                for socket in private:
                    bind(self._server, socket)
        finally:
            # After a failure too: gRPC frees only the ports of servers that were started.
            await self._server.start()
        admin = [await listener.start() for listener in self._admin_listeners]
        self._limits.start()
        self._recent_stats.start(asyncio.get_running_loop())
        return bound, admin

    async def stop_listening(self, flush_s: float) -> None:
        """Closes all listeners. Clients have ``flush_s`` to read final messages."""
        self._load_streams.close()
        self._limits.stop()
        self._recent_stats.stop()
        for contract in self._contracts:
            contract.close()
        await self._server.stop(flush_s)
        if self._bound is not None:
            self._bound.remove()
        for listener in self._admin_listeners:
            await listener.stop()

    def close(self) -> None:
        """Ends threads, and sends the last spans."""
        self.pool.close()
        self.grammars.close()
        self._close_exporter()
