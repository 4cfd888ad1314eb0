"""Translates a ModelInferRequest to a request of penstock.v1. Unknown tensors and parameters are refused by name."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import penstock.v1 as pb
from penstock.service.config.text_size import utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.rpc.foreign.caller_ids import check_caller_id
from penstock.service.rpc.kserve.parameters import SAMPLING_INPUT, fill_embed_request, fill_start
from penstock.service.rpc.kserve.tensors import Datatype, read_inputs, shown, unknown

MODEL_VERSION = "1"
"""The only version of the model."""
MAX_ECHOED_BYTES = 256 << 10
"""Limit on the copies of the prompt that are in a response."""
TEXT_INPUT, EXCLUDE_INPUT, STREAM = "text_input", "exclude_input_in_output", "stream"
_STREAM_NAMES = (STREAM, "streaming")
"""Triton's name and Dynamo's."""
TEXT, FINISH_REASON, EMBEDDING = "text_output", "finish_reason", "embedding"
CUMULATIVE_LOGPROB, NUM_INPUT_TOKENS = "cumulative_logprob", "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"
ANY_SIZE = -1
"""The size of a dimension that has an element for each choice, in metadata."""
OUTPUTS: Mapping[str, tuple[Datatype, Sequence[int]]] = {
    TEXT: (Datatype.BYTES, [ANY_SIZE]),
    FINISH_REASON: (Datatype.BYTES, [ANY_SIZE]),
    CUMULATIVE_LOGPROB: (Datatype.FP32, [ANY_SIZE]),
    NUM_INPUT_TOKENS: (Datatype.UINT32, [1]),
    NUM_OUTPUT_TOKENS: (Datatype.UINT32, [ANY_SIZE]),
}
"""The outputs of a model that generates text, in their order, with their types and shapes."""
_RETURN = "return_"
"""The beginning of the inputs that add an output, or omit it."""
INPUTS: Mapping[str, Datatype] = {
    TEXT_INPUT: Datatype.BYTES,
    **dict.fromkeys(_STREAM_NAMES, Datatype.BOOL),
    SAMPLING_INPUT: Datatype.BYTES,
    EXCLUDE_INPUT: Datatype.BOOL,
    **{f"{_RETURN}{output}": Datatype.BOOL for output in OUTPUTS if output != TEXT},
}
"""The inputs of a model that generates text. Only the first one is required."""
EMBEDDING_INPUTS: Mapping[str, Datatype] = {TEXT_INPUT: Datatype.BYTES}
_DEFAULT_OUTPUTS = (TEXT, FINISH_REASON)
_OWN_NAMES: Mapping[str, str] = {
    "client_request_id": "id",
    "constraint": "structured_outputs",
    "inputs[0]": TEXT_INPUT,
    "inputs[0].text": TEXT_INPUT,
    "model": "model_name",
    "output.logprobs": f"{_RETURN}{CUMULATIVE_LOGPROB}",
    "prompt": TEXT_INPUT,
    "sampling": "parameters",
    "text": TEXT_INPUT,
}
"""The contract's names for fields of penstock.v1 that are no parameters, for errors."""


class InferOptions(NamedTuple):
    """What the response to a request needs to know of it."""

    request_id: str
    """The caller's."""
    streams: bool
    outputs: frozenset[str]
    """The names of the wanted outputs."""
    prefix: str
    """The text before each output."""
    field_names: Mapping[str, str]
    """The request's names for fields of penstock.v1, for errors."""


def fill_generation(start: pb.GenerationStart, request: Any, *, may_stream: bool) -> InferOptions:
    """Sets the fields of a GenerationStart. Raises ServiceError; values are checked as in any other request.
    ``may_stream``: whether a response may come in parts."""
    _check_head(request)
    inputs = read_inputs(request, INPUTS)
    start.model, start.client_request_id = request.model_name, request.id
    start.text = _prompt(inputs)
    field_names = {**_OWN_NAMES, **fill_start(start, request, _text(inputs, SAMPLING_INPUT))}
    streams = _streams(inputs, may_stream)
    outputs = _wanted_outputs(request, inputs)
    if CUMULATIVE_LOGPROB in outputs:
        start.output.logprobs = 0
    if NUM_OUTPUT_TOKENS in outputs:
        start.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    prefix = _prefix(inputs, streams, start.text, start.sampling.n or 1)
    return InferOptions(request.id, streams, outputs, prefix, field_names)


def fill_embedding(embed: pb.EmbedRequest, request: Any) -> Mapping[str, str]:
    """Sets the fields of an EmbedRequest. Returns the request's names for fields of penstock.v1, for errors. Raises
    ServiceError."""
    _check_head(request)
    _check_outputs(request.outputs, (EMBEDDING,))
    embed.model, embed.client_request_id = request.model_name, request.id
    embed.inputs.add().text = _prompt(read_inputs(request, EMBEDDING_INPUTS))
    return {**_OWN_NAMES, **fill_embed_request(embed, request)}


def is_embedding(request: Any, generates: bool) -> bool:
    """Returns whether a request is for an embedding: the model does not generate text, or it is the only output that
    the request names."""
    return not generates or (len(request.outputs) == 1 and request.outputs[0].name == EMBEDDING)


def check_version(field: str, version: str) -> None:
    """Raises ServiceError for another version of the model than the only one."""
    if version not in ("", MODEL_VERSION):
        problem = f"{field}: must be {MODEL_VERSION}, or empty; it is {shown(version)}"
        raise ServiceError(Reason.MODEL_NOT_FOUND, problem, field=field)


def _check_head(request: Any) -> None:
    check_version("model_version", request.model_version)
    check_caller_id("id", request.id)


def _prompt(inputs: Mapping[str, str | bool]) -> str:
    text = _text(inputs, TEXT_INPUT)
    if text is None:
        raise invalid(TEXT_INPUT, "is required; send a tensor of this name with the datatype BYTES and the shape [1]")
    return text


def _text(inputs: Mapping[str, str | bool], name: str) -> str | None:
    text = inputs.get(name)
    return text if isinstance(text, str) else None


def _streams(inputs: Mapping[str, str | bool], may_stream: bool) -> bool:
    given = [name for name in _STREAM_NAMES if name in inputs]
    if len(given) > 1:
        raise invalid(given[1], f"means the same as {given[0]}; send one of the two")
    streams = bool(given and inputs[given[0]])
    if streams and not may_stream:
        raise invalid(given[0], "ModelInfer has one response; send false, or call ModelStreamInfer")
    return streams


def _wanted_outputs(request: Any, inputs: Mapping[str, str | bool]) -> frozenset[str]:
    _check_outputs(request.outputs, OUTPUTS)
    wanted = {output.name for output in request.outputs} or set(_DEFAULT_OUTPUTS)
    for output in OUTPUTS:
        is_wanted = inputs.get(f"{_RETURN}{output}")
        if is_wanted is not None:
            (wanted.add if is_wanted else wanted.discard)(output)
    return frozenset(wanted)


def _check_outputs(outputs: Iterable[Any], known: Collection[str]) -> None:
    found = set()
    for output in outputs:
        if output.name not in known:
            raise unknown("outputs", "output", output.name, known)
        if output.name in found:
            raise invalid("outputs", f"{output.name} is there twice; name it once")
        found.add(output.name)
        for key in output.parameters:
            raise invalid(output.name, f"the parameter {shown(key)} of this output is not supported; omit it")


def _prefix(inputs: Mapping[str, str | bool], streams: bool, prompt: str, num_choices: int) -> str:
    if inputs.get(EXCLUDE_INPUT, True):
        return ""
    if streams:
        raise invalid(EXCLUDE_INPUT, "must be true for an output that streams; or omit it")
    num_bytes = num_choices * utf8_bytes(prompt)
    if num_bytes > MAX_ECHOED_BYTES:
        problem = (
            f"the response would repeat {num_bytes:,} bytes of the prompt, at most {MAX_ECHOED_BYTES:,}; send true"
        )
        raise invalid(EXCLUDE_INPUT, problem, Reason.TOO_EXPENSIVE)
    return prompt
