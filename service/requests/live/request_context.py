"""The parts of the service that every request needs."""

from dataclasses import dataclass

from penstock.scheduler.loop.engine import Engine
from penstock.service.requests.contexts import ContextStore
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.live.idempotency import IdempotencyKeys
from penstock.service.requests.live.open_prompt import OpenPromptConfig
from penstock.service.telemetry.tracing import Telemetry


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts of the service that every request needs."""

    engine: Engine
    request_builder: RequestBuilder
    telemetry: Telemetry
    conversations: ContextStore
    open_prompts: OpenPromptConfig
    idempotency_keys: IdempotencyKeys
