"""The common part of every request to the service."""

from collections.abc import Mapping

from penstock.clients.gateway.requests.sampling import client_request_id
from penstock.clients.gateway.requests.truncation import fill_truncation
from penstock.clients.gateway.schemas.common import GenerationBody
from penstock.clients.gateway.schemas.unsupported import model_not_found
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.tracing import traceparent
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.requests import timeout_ms
from penstock.v1 import generation_pb2 as pb


def new_start(body: GenerationBody, headers: Mapping[str, str], settings: GatewaySettings) -> pb.Start:
    """Returns a request without its prompt: deadline, priority, and the caller's id."""
    start = pb.Start()
    if settings.request_timeout_s is not None:
        start.timeout_ms = timeout_ms(settings.request_timeout_s)
    if body.priority is not None:
        start.priority = body.priority
    if body.max_draft_tokens is not None:
        start.max_draft_tokens = body.max_draft_tokens
    fill_truncation(start, body)
    start.traceparent = traceparent()
    start.client_request_id = client_request_id(body.request_id, headers.get("x-request-id"))
    return start


def check_model(name: str | None, caller: UpstreamCaller) -> None:
    """Raises GatewayError for a model that is not served."""
    if name is not None and name != caller.model.name:
        raise model_not_found(name, caller.model.name)
