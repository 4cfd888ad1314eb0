"""Translates a GenerateRequest and its metadata to a GenerationStart, and the fields' names in its errors back.
Unsupported fields are refused by name."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from openengine.v1 import generation_pb2 as oe

import penstock.v1 as pb
from penstock.clients.host.routing_headers import MAX_PRIORITY
from penstock.service.config.limits import MAX_STOP_IDS, MAX_STOPS
from penstock.service.errors import invalid
from penstock.service.rpc.foreign.caller_ids import check_caller_id
from penstock.service.rpc.foreign.grammars import set_grammar

PRIORITY, ROUTING_KEY, TARGET_RANK = "openengine-priority", "openengine-routing-key", "openengine-target-dp-rank"
"""The contract's metadata. The routing key is for routers."""
_MAX_CONDITIONS = MAX_STOPS + MAX_STOP_IDS
"""Limit of penstock.v1 on stop strings and stop tokens, checked here too: each is a message that is translated on the
event loop."""
_MAX_SEED = 2**63
"""Seeds are taken modulo this."""
_INT32 = re.compile(r"[+-]?[0-9]{1,10}")
_UINT32 = re.compile(r"[0-9]{1,10}")
_BACKEND = "llguidance"
"""The only grammar backend."""
_FIELD_NAMES: Mapping[str, str] = {
    "client_request_id": "request_id",
    "constraint": "guided",
    "constraint.choices": "guided.choice",
    "constraint.choices.values": "guided.choice.choices",
    "constraint.gbnf": "guided.ebnf_grammar",
    "constraint.lark": "guided.ebnf_grammar",
    "constraint.structural_tag_json": "guided.structural_tag",
    "output": "response",
    "output.logprobs": "response.output_candidates.top_n",
    "output.prompt_logprobs": "response.prompt_candidates.top_n",
    "priority": PRIORITY,
    "prompt": "input",
    "sampling.ignore_eos": "stopping.ignore_eos",
    "sampling.max_tokens": "stopping.max_tokens",
    "sampling.min_tokens": "stopping.min_tokens",
    "sampling.n": "sampling.num_sequences",
    "sampling.stop": "stopping.conditions",
    "sampling.stop_token_ids": "stopping.conditions",
    "text": "prompt",
}
"""Fields of penstock.v1 with the contract's names for them, for errors. Other fields have the same names."""
_SAMPLING = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields that are the same in both."""
_GUIDES = {
    "json_schema": "json_schema",
    "regex": "regex",
    "structural_tag": "structural_tag_json",
}
"""Guides that are texts, with the fields of a Constraint."""


def generation_start(request: oe.GenerateRequest, metadata: Iterable[tuple[str, Any]]) -> pb.GenerationStart:
    """Translates the request. Raises ServiceError for what is not supported; everything else is checked as in any
    other request."""
    check_caller_id("request_id", request.request_id)
    _check_supported(request)
    start = pb.GenerationStart(client_request_id=request.request_id, model=request.lora_name or request.model)
    match request.WhichOneof("input"):
        case "token_ids":
            start.token_ids.ids.extend(request.token_ids.ids)
        case "prompt":
            start.text = request.prompt
        case _:
            raise invalid("input", "is required; set prompt or token_ids")
    _fill_sampling(start.sampling, request.sampling)
    _fill_stopping(start.sampling, request.stopping)
    _fill_output(start.output, request.response)
    if request.guided.WhichOneof("guide") is not None:
        _fill_constraint(start.constraint, request.guided)
    _read_metadata(start, metadata)
    return start


def field_names(request: oe.GenerateRequest) -> Mapping[str, str]:
    """Returns the contract's names of fields, by those of penstock.v1."""
    model = {"model": "lora_name"} if request.lora_name else {}
    return {**_FIELD_NAMES, **_condition_names(request.stopping), **model}


def stop_token_ids(stopping: oe.StoppingOptions) -> frozenset[int]:
    """Returns the stop tokens that the caller requested."""
    return frozenset(each.stop_token_id for each in stopping.conditions if each.HasField("stop_token_id"))


def _check_supported(request: oe.GenerateRequest) -> None:
    if request.media:
        raise invalid("media", "is not supported: the model takes only text; omit it")
    if request.kv.HasField("session"):
        raise invalid("kv.session", "is not supported: this service neither sends nor receives KV; omit it")
    if request.kv.bypass_prefix_cache:
        raise invalid("kv.bypass_prefix_cache", "is not supported; omit it")
    if request.kv.cache_salt:
        raise invalid("kv.cache_salt", "is not supported: each tenant has a prefix cache of its own; omit it")
    if request.response.prompt_logprob_start:
        raise invalid("response.prompt_logprob_start", "must be 0: log-probabilities begin at the second token")
    if request.guided.backend not in ("", _BACKEND):
        raise invalid("guided.backend", f"must be {_BACKEND}, the only one; omit it")


def _fill_sampling(sampling: pb.SamplingParams, params: oe.SamplingParams) -> None:
    for name in _SAMPLING:
        if params.HasField(name):
            setattr(sampling, name, getattr(params, name))
    if params.HasField("top_k"):
        if params.top_k < -1:
            raise invalid("sampling.top_k", f"must be at least 1, or 0 or -1 for all tokens; it is {params.top_k}")
        sampling.top_k = max(0, params.top_k)
    if params.HasField("seed"):
        sampling.seed = params.seed % _MAX_SEED
    if params.HasField("num_sequences"):
        sampling.n = params.num_sequences


def _fill_stopping(sampling: pb.SamplingParams, stopping: oe.StoppingOptions) -> None:
    if stopping.HasField("max_tokens"):
        sampling.max_tokens = stopping.max_tokens
    if stopping.HasField("min_tokens"):
        sampling.min_tokens = stopping.min_tokens
    sampling.ignore_eos = stopping.ignore_eos
    if len(stopping.conditions) > _MAX_CONDITIONS:
        raise invalid("stopping.conditions", f"at most {_MAX_CONDITIONS:,}; there are {len(stopping.conditions):,}")
    for index, condition in enumerate(stopping.conditions):
        match condition.WhichOneof("condition"):
            case "stop_text":
                sampling.stop.append(condition.stop_text)
            case "stop_token_id":
                sampling.stop_token_ids.append(condition.stop_token_id)
            case _:
                raise invalid(f"stopping.conditions[{index}]", "is empty; set stop_text or stop_token_id")


def _condition_names(stopping: oe.StoppingOptions) -> dict[str, str]:
    """Returns the contract's names of the stop strings and stop tokens, by those of penstock.v1."""
    names: dict[str, str] = {}
    num_texts = num_ids = 0
    for index, condition in enumerate(stopping.conditions):
        if condition.HasField("stop_text"):
            names[f"sampling.stop[{num_texts}]"] = f"stopping.conditions[{index}].stop_text"
            num_texts += 1
        else:
            names[f"sampling.stop_token_ids[{num_ids}]"] = f"stopping.conditions[{index}].stop_token_id"
            num_ids += 1
    return names


def _fill_output(output: pb.OutputOptions, options: oe.ResponseOptions) -> None:
    output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    for kind, name in (("output", "logprobs"), ("prompt", "prompt_logprobs")):
        candidates = getattr(options, f"{kind}_candidates")
        selection = candidates.WhichOneof("selection")
        if selection not in (None, "top_n"):
            raise invalid(f"response.{kind}_candidates.{selection}", "is not supported; use top_n")
        if selection is not None or getattr(options, f"return_{kind}_logprobs"):
            setattr(output, name, candidates.top_n)


def _fill_constraint(constraint: pb.Constraint, guided: oe.GuidedDecoding) -> None:
    match guided.WhichOneof("guide"):
        case "json_schema" | "regex" | "structural_tag" as guide:
            setattr(constraint, _GUIDES[guide], getattr(guided, guide))
        case "ebnf_grammar":
            set_grammar(constraint, guided.ebnf_grammar)
        case "choice":
            constraint.choices.values.extend(guided.choice.choices)
            constraint.choices.SetInParent()
        case "json_object":
            constraint.any_json.SetInParent()


def _read_metadata(start: pb.GenerationStart, metadata: Iterable[tuple[str, Any]]) -> None:
    given: dict[str, str] = {}
    for name, value in metadata:
        if name in (PRIORITY, ROUTING_KEY, TARGET_RANK):
            if name in given:
                raise invalid(name, "has several values; send one")
            given[name] = str(value)
    if ROUTING_KEY in given and not given[ROUTING_KEY]:
        raise invalid(ROUTING_KEY, "must not be empty; omit it, or send a key")
    if TARGET_RANK in given:
        rank = given[TARGET_RANK]
        if not _UINT32.fullmatch(rank) or int(rank):
            raise invalid(TARGET_RANK, f"must be 0, the only rank; it is {rank[:32]!r}")
    if PRIORITY in given:
        priority = given[PRIORITY]
        if not _INT32.fullmatch(priority) or abs(int(priority)) > MAX_PRIORITY:
            raise invalid(
                PRIORITY,
                f"must be a whole number from {-MAX_PRIORITY:,} to {MAX_PRIORITY:,}, where higher runs first; it is "
                f"{priority[:32]!r}",
            )
        start.priority = -int(priority)  # in penstock.v1, lower runs first
