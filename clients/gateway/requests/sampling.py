"""Converts the options of a request's body to ``GenerationStart``, ``SamplingParams`` and ``OutputOptions``. The
service checks the limits."""

import re

from starlette.datastructures import Headers

import penstock.v1 as pb
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.field_names import Names
from penstock.clients.gateway.requests.resumption import fill_resumption
from penstock.clients.gateway.requests.truncation import fill_truncation
from penstock.clients.gateway.schemas.common import GenerationBody
from penstock.clients.gateway.schemas.unsupported import model_not_found, shown
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.tracing import traceparent
from penstock.clients.gateway.upstream.caller_headers import fill_routing, idempotency_key
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.requests import timeout_ms

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
)
_MAX_ID_BYTES = 128
_MAX_TOKENS = 2**32 - 1
"""The contract's limit, more than any context."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def new_start(body: GenerationBody, headers: Headers, settings: GatewaySettings) -> pb.GenerationStart:
    """Returns a request without its prompt: deadline, priority, targets, the stream that it continues, and the
    caller's ids and key. Raises GatewayError."""
    timeout_s = settings.request_timeout_s
    start = pb.GenerationStart(
        timeout_ms=None if timeout_s is None else timeout_ms(timeout_s),
        priority=body.priority,
        max_draft_tokens=body.max_draft_tokens,
        traceparent=traceparent(),
        client_request_id=client_request_id(body.request_id, headers.get("x-request-id")),
        idempotency_key=idempotency_key(headers),
    )
    fill_truncation(start, body)
    fill_resumption(start, body)
    fill_routing(start, headers, settings)
    return start


def check_model(name: str | None, caller: UpstreamCaller) -> None:
    """Raises GatewayError for a model that is not served. If the service has LoRA adapters, another name is taken for
    one of them, and the service refuses unknown ones."""
    if name is None or name == caller.model.name:
        return
    if "lora" not in caller.model.features:
        raise model_not_found(name, caller.model.name)
    caller.adapter = name


def fill_sampling(sampling: pb.SamplingParams, body: GenerationBody, max_tokens: int | None) -> None:
    """Fills the sampling options. Raises GatewayError."""
    sampling.MergeFrom(pb.SamplingParams(**{name: getattr(body, name) for name in _SAME_NAME}))
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.seed is not None:
        sampling.seed = body.seed % 2**63  # OpenAI allows negative seeds
    if body.n is not None:
        if body.n == 0:
            raise invalid("n", "must be at least 1")
        sampling.n = body.n
    if max_tokens is not None:
        sampling.max_tokens = min(max_tokens, _MAX_TOKENS)
    sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    for key, bias in (body.logit_bias or {}).items():
        if not (_TOKEN_ID.fullmatch(key) and int(key) < 2**32):
            raise invalid("logit_bias", f'the keys must be token ids, such as "42"; there is {shown(key)!r}')
        sampling.logit_bias[int(key)] = bias


def fill_output(
    output: pb.OutputOptions, body: GenerationBody, logprobs: int | None, prompt_logprobs: int | None
) -> None:
    """Fills the output options; requests token ids only if the answer needs them."""
    needs_ids = logprobs is not None or body.return_token_ids or body.includes_usage_so_far
    output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS if needs_ids else pb.OUTPUT_FORMAT_TEXT
    if logprobs is not None:
        output.logprobs = logprobs
    if prompt_logprobs is not None:
        output.prompt_logprobs = prompt_logprobs
    output.include_token_texts = logprobs is not None or prompt_logprobs is not None
    output.include_special_tokens = body.skip_special_tokens is False


def check_stream_fields(body: GenerationBody) -> None:
    """Raises GatewayError for fields that exclude each other."""
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise invalid("stream_options", "only with stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "not with stream: true")
    if body.resume_from is not None and not body.stream:
        raise invalid("resume_from", "only with stream: true")


def sampling_names(body: GenerationBody) -> Names:
    """The caller's names for the contract's ``SamplingParams``, where they depend on what the caller sent."""
    return ((r"sampling\.stop\[0\]", "stop"),) if isinstance(body.stop, str) else ()


def client_request_id(named: str | None, header: str | None) -> str:
    """Returns the caller's id of its request, if the contract accepts it."""
    name = named or header or ""
    return name if len(name) <= _MAX_ID_BYTES and name.isascii() and name.isprintable() else ""
