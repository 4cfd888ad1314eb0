"""Facts about the model, the service and its engine, for GetModelInfo and GetServerInfo."""

import json
import time

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.models.checkpoint.checkpoint import read_json
from penstock.models.errors import ModelError
from penstock.scheduler.engine_stats import EngineState
from penstock.service.rpc.foreign.contracts import ContractParts

_SERVER_TYPE = "vllm-grpc"
"""The name that gateways expect from a server with this contract."""
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling defaults that gateways apply."""
_FIRST_TOKEN, _AFTER_REASONING = "first_token", "after_reasoning"


class Facts:
    """Builds the responses for one service."""

    def __init__(self, parts: ContractParts) -> None:
        self._parts = parts
        self._began = time.monotonic()
        self._model_type, self._architectures = _described(parts)

    def model(self) -> vllm.GetModelInfoResponse:
        """Returns the model's facts, without paths: a gateway gets the tokenizer from GetTokenizer."""
        parts, tokenizer = self._parts, self._parts.pool.tokenizer
        defaults = {
            name: round(getattr(parts.defaults.sampling, name), 6)
            for name in _DEFAULTS
            if parts.defaults.sampling.HasField(name)  # type: ignore[arg-type]
        }
        return vllm.GetModelInfoResponse(
            model_path=parts.model_name,
            served_model_name=parts.model_name,
            is_generation=parts.generates,
            max_context_length=parts.facts.max_model_len,
            max_req_input_len=parts.facts.max_model_len - 1,
            vocab_size=tokenizer.vocab_size,
            model_type=self._model_type,
            architectures=self._architectures,
            eos_token_ids=tokenizer.eos_token_ids,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    def server(self) -> vllm.GetServerInfoResponse:
        """Returns the facts of the service, and its state."""
        parts, stats = self._parts, self._parts.engine.stats()
        reasoning = parts.formats.plain.reasoning or ""
        return vllm.GetServerInfoResponse(
            active_requests=stats.requests,
            is_paused=stats.state is not EngineState.SERVING,
            last_receive_timestamp=time.time(),
            uptime_seconds=time.monotonic() - self._began,
            server_type=_SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=parts.facts.kv_cache_dtype,
            block_size=parts.facts.block_size,
            model_dtype=parts.facts.dtype,
            max_num_seqs=parts.engine.config.max_rows(parts.facts),
            engine_reasoning_parser=reasoning,
            constrained_decoding_start=_AFTER_REASONING if reasoning else _FIRST_TOKEN,
        )


def _described(parts: ContractParts) -> tuple[str, list[str]]:
    """Returns the model's type and architectures from its config.json; without one, only the latter."""
    config = None if parts.files is None else parts.files.model / "config.json"
    if config is None or not config.is_file():
        return "", [parts.facts.architecture]
    try:
        described = read_json(config)
    except ModelError:  # the worker has read it before
        return "", [parts.facts.architecture]
    return str(described.get("model_type", "")), [str(name) for name in described.get("architectures") or ()]
