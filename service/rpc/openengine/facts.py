"""Facts about the service, its model and its load, for GetServerInfo, GetModelInfo, GetLoad and Health."""

import time

from google.protobuf.struct_pb2 import Struct
from openengine.v1 import kv_pb2, lifecycle_pb2, model_pb2, server_pb2

from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.policy import Policy
from penstock.service.config.limits import MAX_CHOICES, MAX_TOP_LOGPROBS
from penstock.service.rpc.foreign.contracts import ContractParts

SCHEMA_REVISION = 1
SCHEMA_RELEASE = "768a93c7b44e40f28c692ad0b471a8f2"
"""The release v0.1.0, as the Buf Schema Registry names it."""
_GUIDES = (
    model_pb2.GUIDED_DECODING_MODE_JSON_SCHEMA,
    model_pb2.GUIDED_DECODING_MODE_REGEX,
    model_pb2.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    model_pb2.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
    model_pb2.GUIDED_DECODING_MODE_CHOICE,
    model_pb2.GUIDED_DECODING_MODE_JSON_OBJECT,
)
_STARTING, _READY, _DEGRADED, _NOT_READY = (
    lifecycle_pb2.HEALTH_STATE_STARTING,
    lifecycle_pb2.HEALTH_STATE_READY,
    lifecycle_pb2.HEALTH_STATE_DEGRADED,
    lifecycle_pb2.HEALTH_STATE_NOT_READY,
)
_STATES = {EngineState.STARTING: _STARTING, EngineState.SERVING: _READY, EngineState.RECOVERING: _DEGRADED}
"""The states of the engine; NOT_READY for all others."""


class ServerFacts:
    """Builds the responses for one service."""

    def __init__(self, parts: ContractParts) -> None:
        self._parts = parts
        self._instance_id = parts.engine.kv_events.stream_id

    def server(self) -> server_pb2.ServerInfo:
        """Returns the facts of the service."""
        parts, facts, config = self._parts, self._parts.facts, self._parts.engine.config
        return server_pb2.ServerInfo(
            engine_name="penstock",
            engine_version=parts.version,
            engine_role=server_pb2.ENGINE_ROLE_AGGREGATED,
            instance_id=self._instance_id,
            supported_models=[parts.model_name],
            parallelism=server_pb2.ParallelismInfo(
                tensor_parallel_size=facts.tensor_parallel_size,
                pipeline_parallel_size=facts.pipeline_parallel_size,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_start_rank=0,
                decode_context_parallel_size=1,
            ),
            kv_connector=kv_pb2.KvConnectorInfo(enabled=False),
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=SCHEMA_REVISION,
            schema_release=SCHEMA_RELEASE,
            capacity=server_pb2.DeploymentCapacity(
                kv_block_size=facts.block_size,
                total_kv_blocks=facts.num_kv_tokens // facts.block_size,
                max_running_requests=config.max_rows(facts),
                max_batched_tokens=config.token_budget(facts),
                max_loras=facts.max_loras,
            ),
        )

    def model(self) -> model_pb2.ModelInfo:
        """Returns the model's facts, and what Generate supports."""
        parts, formats = self._parts, self._parts.formats
        return model_pb2.ModelInfo(
            model_id=parts.model_name,
            served_model_name=parts.model_name,
            max_context_length=parts.facts.max_model_len,
            max_output_tokens=parts.facts.max_model_len - 1 if parts.generates else 0,
            supports_text_input=parts.generates,
            supports_token_ids_input=parts.generates,
            generation=self._capabilities() if parts.generates else None,
            supports_lora=bool(parts.facts.max_loras),
            supports_multimodal=False,
            reasoning_parser=formats.plain.reasoning or "",
            tool_call_parser=formats.with_tools.tool or "",
        )

    def load(self, *, include_per_rank: bool) -> server_pb2.LoadInfo:
        """Returns the load now."""
        facts, stats = self._parts.facts, self._parts.engine.stats()
        load = server_pb2.LoadInfo(
            instance_id=self._instance_id,
            timestamp_unix_nanos=time.time_ns(),
            running_requests=stats.running,
            queued_requests=stats.waiting,
            used_kv_blocks=round(stats.kv_usage * facts.num_kv_tokens / facts.block_size),
            total_kv_blocks=facts.num_kv_tokens // facts.block_size,
            waiting_tokens=stats.waiting_tokens,
        )
        if stats.predicted_ttft_s is not None:
            attributes = Struct()
            attributes["predicted_ttft_ms"] = round(stats.predicted_ttft_s * 1000, 3)
            load.attributes.CopyFrom(attributes)
        if include_per_rank:
            load.ranks.add(
                data_parallel_rank=0,
                running_requests=load.running_requests,
                queued_requests=load.queued_requests,
                used_kv_blocks=load.used_kv_blocks,
                total_kv_blocks=load.total_kv_blocks,
            )
        return load

    def health(self, request: lifecycle_pb2.HealthRequest) -> lifecycle_pb2.HealthResponse:
        """Returns whether new requests are accepted, as in grpc.health.v1, and the checks by name."""
        parts = self._parts
        engine = parts.engine.state
        checks = [
            lifecycle_pb2.HealthCheck(name="grpc", state=_READY),
            lifecycle_pb2.HealthCheck(
                name="scheduler", state=_STATES.get(engine, _NOT_READY), message=engine.name.lower()
            ),
        ]
        if request.model:
            is_served = request.model == parts.model_name
            message = "" if is_served else f"the served model is {parts.model_name}"
            checks.append(_check("model", is_served, message))
        if request.role:
            fits = request.role == server_pb2.ENGINE_ROLE_AGGREGATED
            checks.append(_check("role", fits, "" if fits else "the role is AGGREGATED"))
        states = {check.state for check in checks}
        if states == {_READY} and not parts.health.is_ready:
            states.add(_NOT_READY)
        state = next((each for each in (_NOT_READY, _STARTING, _DEGRADED) if each in states), _READY)
        return lifecycle_pb2.HealthResponse(state=state, checks=checks)

    def _capabilities(self) -> model_pb2.GenerationCapabilities:
        logprobs = model_pb2.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=[model_pb2.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
            max_top_n=MAX_TOP_LOGPROBS,
        )
        return model_pb2.GenerationCapabilities(
            prompt_logprobs=logprobs,
            output_logprobs=logprobs,
            guided_decoding=model_pb2.GuidedDecodingCapabilities(supported=True, modes=_GUIDES),
            max_num_sequences=MAX_CHOICES,
            supports_priority=self._parts.engine.config.policy is Policy.PRIORITY,
            supports_stop_in_output=True,
            supports_cache_salt=False,
            supports_prefix_cache_bypass=False,
        )


def _check(name: str, is_good: bool, message: str) -> lifecycle_pb2.HealthCheck:
    return lifecycle_pb2.HealthCheck(name=name, state=_READY if is_good else _NOT_READY, message=message)
