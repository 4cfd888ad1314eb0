"""ModelService: the served model with its LoRA adapters, and the service's limits."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.worker_config import SpeculationConfig, WorkerFacts
from penstock.service.auth.identity import current_principal
from penstock.service.config.limits import Validator
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.errors import invalid
from penstock.service.requests.adapters import AdapterRegistry
from penstock.service.requests.answer_formats import AnswerFormats
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1 import model_pb2_grpc as pb_grpc

_ALWAYS = (
    "choices", "continue_from", "embeddings", "logprobs", "prompt_logprobs", "seeded_sampling", "stop_strings", "update"
)  # fmt: skip


_PAGE_SIZE, _MAX_PAGE_SIZE = 100, 1000
"""The default and the limit of the models in a page."""


class ModelService(pb_grpc.ModelServiceServicer):
    """Describes the model and the current limits."""

    def __init__(
        self,
        name: str,
        version: str,
        facts: WorkerFacts,
        tokenizer: Tokenizer,
        validator: Validator,
        config: Callable[[], SchedulerConfig],
        speculation: SpeculationConfig | None = None,
        defaults: SamplingDefaults | None = None,
        *,
        labels: Sequence[str] = (),
        generates: bool = True,
        formats: AnswerFormats | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """``config`` returns the engine's configuration. ``defaults`` are the model's, and ``labels`` those of its
        classification head. ``generates``: whether it has an output head. ``formats`` are those of its outputs,
        and ``adapters`` those that requests may name as their model."""
        self._generates = generates
        self._adapters = adapters or AdapterRegistry(name)
        self._facts = facts
        self._validator = validator
        self._config = config
        self._max_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self._model = pb.Model(
            name=name,
            architecture=facts.architecture,
            max_model_len=facts.max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            has_chat_template=tokenizer.has_chat_template,
            dtype=facts.dtype,
            quantization=facts.quantization,
            kv_cache_dtype=facts.kv_cache_dtype,
            backend=facts.backend,
            version=version,
            embedding_size=facts.hidden_size,
            speculation="" if speculation is None else speculation.method.value,
            sampling_defaults=None if defaults is None else defaults.sampling,
            labels=labels,
            tool_call_parser=(formats.with_tools.tool or "") if formats is not None else "",
            reasoning_parser=(formats.plain.reasoning or "") if formats is not None else "",
        )

    async def GetModel(
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelResponse:
        """Returns the model, and the limits and features, which may change while the service runs. Raises
        ServiceError."""
        principal = current_principal.get()
        self._validator.check(request)
        tenant = principal.tenant_for(request.tenant)
        config = self._config()
        return pb.GetModelResponse(
            model=self._described(config),
            tenant=principal.tenant,
            may_act_for_others=principal.may_act_for_others,
            requests_per_second=config.tenant(tenant).requests_per_second,
        )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """Returns a page of the model and the adapters that the caller's tenant may use. Raises ServiceError."""
        self._validator.check(request)
        model = self._described(self._config())
        models = [model]
        for adapter in self._adapters.of_tenant(current_principal.get().tenant):
            models.append(pb.Model())
            models[-1].CopyFrom(model)
            models[-1].name, models[-1].parent = adapter.name, model.name
        token, size = request.page_token, min(request.page_size or _PAGE_SIZE, _MAX_PAGE_SIZE)
        if token and not (token.isdecimal() and 0 < int(token) < len(models)):
            raise invalid("page_token", "this service has returned no such token; leave it empty")
        end = int(token or 0) + size
        return pb.ListModelsResponse(
            models=models[end - size : end], next_page_token=str(end) if end < len(models) else ""
        )

    def _described(self, config: SchedulerConfig) -> pb.Model:
        facts = self._facts
        limits = pb.ServiceLimits(
            max_num_seqs=config.max_rows(facts),
            max_num_batched_tokens=config.token_budget(facts),
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            kv_block_size=facts.block_size,
            num_kv_blocks=facts.num_kv_tokens // facts.block_size,
            max_draft_tokens=self._max_drafts,
        )
        model = pb.Model(limits=limits, features=self._features(config))
        model.MergeFrom(self._model)
        return model

    def _features(self, config: SchedulerConfig) -> list[str]:
        optional = {
            "chat": self._model.has_chat_template and self._generates,
            "classification": bool(self._model.labels),
            "generation": self._generates,
            "lora": bool(self._facts.max_loras),
            "scoring": len(self._model.labels) == 1,
            "prefix_caching": config.enable_prefix_caching,
            "priority": config.policy is Policy.PRIORITY,
        }
        return sorted([*_ALWAYS, *(name for name, is_there in optional.items() if is_there)])
