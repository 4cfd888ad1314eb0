"""Translates a GenerateRequest to a GenerationStart. Unsupported fields are refused by name.

In the contract's SamplingParams, a field without presence is taken literally even if it is 0, except where 0 makes no
sense: there, 0 means that it is off.
"""

from collections.abc import Mapping

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

import penstock.v1 as pb
from penstock.service.config.limits import MAX_BIASES
from penstock.service.errors import invalid
from penstock.service.rpc.foreign.grammars import set_grammar

_TEXT_ONLY = "is not supported: the model takes only text; omit it"
_NO_TRANSFER = "is not supported: this service neither sends nor receives KV; omit it"
_UNSUPPORTED: Mapping[str, str] = {
    "mm_inputs": _TEXT_ONLY,
    "extra_mm_inputs": _TEXT_ONLY,
    "media_refs": _TEXT_ONLY,
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
}
"""Fields of a GenerateRequest that must not be set, each with the reason."""
_RANDOM_SEED = -1
"""vLLM's value for no seed."""
FIELD_NAMES: Mapping[str, str] = {
    "client_request_id": "request_id",
    "constraint": "sampling_params",
    "constraint.choices": "sampling_params.choice",
    "constraint.choices.values": "sampling_params.choice.choices",
    "constraint.gbnf": "sampling_params.grammar",
    "constraint.json_schema": "sampling_params.json_schema",
    "constraint.lark": "sampling_params.grammar",
    "constraint.regex": "sampling_params.regex",
    "inputs": "tokenized.input_ids",
    "inputs[0]": "tokenized",
    "inputs[0].token_ids": "tokenized",
    "inputs[0].token_ids.ids": "tokenized.input_ids",
    "output": "sampling_params",
    "prompt": "input",
    "sampling": "sampling_params",
    "token_ids": "tokenized",
    "token_ids.ids": "tokenized.input_ids",
    "truncate_prompt_tokens": "sampling_params.truncate_prompt_tokens",
}
"""Fields of penstock.v1 with the contract's names for them, for errors. The fields of these keep their names."""


def generation_start(request: vllm.GenerateRequest) -> pb.GenerationStart:
    """Translates the request. Raises ServiceError for unsupported fields; everything else is checked as in any other
    request."""
    for name, problem in _UNSUPPORTED.items():
        field = request.DESCRIPTOR.fields_by_name[name]
        if getattr(request, name) if field.is_repeated else request.HasField(name):
            raise invalid(name, problem)
    if request.data_parallel_rank:
        raise invalid("data_parallel_rank", f"must be 0, the only rank; it is {request.data_parallel_rank}")
    params = request.sampling_params
    start = pb.GenerationStart(client_request_id=request.request_id)
    match request.WhichOneof("input"):
        case "tokenized":
            start.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            start.text = request.text
        case _:
            raise invalid("input", "is required; set tokenized or text")
    _fill_sampling(start.sampling, params)
    output = start.output
    output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
    output.include_special_tokens = not params.skip_special_tokens  # for stop strings that contain one
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(output, name, _not_negative(f"sampling_params.{name}", getattr(params, name)))
    if params.HasField("truncate_prompt_tokens"):
        start.truncate_prompt_tokens = params.truncate_prompt_tokens
    if params.WhichOneof("constraint") is not None:
        _fill_constraint(start.constraint, params)
    return start


def _fill_sampling(sampling: pb.SamplingParams, params: vllm.SamplingParams) -> None:
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    sampling.top_p = params.top_p or 1.0
    sampling.top_k = params.top_k
    sampling.min_p = params.min_p
    sampling.frequency_penalty = params.frequency_penalty
    sampling.presence_penalty = params.presence_penalty
    sampling.repetition_penalty = params.repetition_penalty or 1.0
    if params.HasField("max_tokens"):
        sampling.max_tokens = params.max_tokens
    sampling.min_tokens = params.min_tokens
    sampling.stop.extend(params.stop)
    sampling.stop_token_ids.extend(params.stop_token_ids)
    sampling.ignore_eos = params.ignore_eos
    sampling.n = params.n or 1
    if params.HasField("seed") and params.seed != _RANDOM_SEED:
        sampling.seed = params.seed % (1 << 32)  # negative ones are allowed
    if len(params.logit_bias) > MAX_BIASES:  # here too: the entries are translated on the event loop
        num_entries = len(params.logit_bias)
        raise invalid("sampling_params.logit_bias", f"at most {MAX_BIASES:,} entries; it has {num_entries:,}")
    for token_id, bias in params.logit_bias.items():
        sampling.logit_bias[_not_negative("sampling_params.logit_bias", token_id)] = bias


def _fill_constraint(constraint: pb.Constraint, params: vllm.SamplingParams) -> None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            constraint.json_schema = params.json_schema
        case "regex":
            constraint.regex = params.regex
        case "grammar":
            set_grammar(constraint, params.grammar)
        case "choice":
            constraint.choices.values.extend(params.choice.choices)
        case "json_object" if params.json_object:
            constraint.any_json.SetInParent()
        case "structural_tag":
            raise invalid("sampling_params.structural_tag", "is not supported; use json_schema, regex or grammar")
    if params.grammar_from_first_token:
        constraint.start = pb.CONSTRAINT_START_FIRST_TOKEN


def _not_negative(field: str, value: int) -> int:
    if value < 0:
        raise invalid(field, f"must not be negative; it is {value}")
    return value
