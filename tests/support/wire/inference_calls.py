"""Calls of the Open Inference Protocol, by tritonclient or with messages of a test's own."""

from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc

import penstock.v1 as pb
from penstock.v1.kserve import METHODS, SERVICE, ModelInferRequest, message_class

PROMPT = "a prompt of more than two blocks of sixteen tokens"


def tensor(name: str, value: str | bool | bytes) -> Any:
    """An input of tritonclient with one element."""
    datatype, dtype = ("BOOL", np.bool_) if isinstance(value, bool) else ("BYTES", np.object_)
    encoded = value.encode() if isinstance(value, str) else value
    given = tritonclient.grpc.InferInput(name, [1], datatype)
    given.set_data_from_numpy(np.array([encoded], dtype=dtype))
    return given


def tensors(**values: str | bool | bytes) -> list[Any]:
    return [tensor(name, value) for name, value in values.items()]


def message(request_id: str = "", parameters: dict[str, Any] | None = None, **inputs: str | bool) -> Any:
    """A ModelInferRequest with the elements in ``contents``."""
    request = ModelInferRequest(model_name="bytes", id=request_id)
    for name, value in inputs.items():
        if isinstance(value, bool):
            request.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(value)
        else:
            added = request.inputs.add(name=name, datatype="BYTES", shape=[1])
            added.contents.bytes_contents.append(value.encode())
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in (parameters or {}).items():
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


@dataclass
class Answer:
    """The responses to one request."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    finals: list[bool] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def add(self, response: Any) -> None:
        """Adds a ModelStreamInferResponse."""
        infer, self.error = response.infer_response, response.error_message
        self.finals.append(infer.parameters["triton_final_response"].bool_param)
        if not self.error:
            outputs = outputs_of(infer)
            self.outputs.append(outputs)
            self.text += "".join(outputs.get("text_output", []))
            self.reasons += outputs.get("finish_reason", [])


def outputs_of(response: Any) -> dict[str, Any]:
    """The outputs of a ModelInferResponse, as tritonclient reads them."""
    result = tritonclient.grpc.InferResult(response)
    found = {output.name: result.as_numpy(output.name).tolist() for output in response.outputs}
    return {
        name: [each.decode() if isinstance(each, bytes) else each for each in values] for name, values in found.items()
    }


class Inference:
    """The contract of one service."""

    def __init__(self, service: Any, metadata: Any = ()) -> None:
        self.service = service
        self.target = service.target
        self._metadata = metadata
        self._methods = {method.name: method for method in METHODS}

    def call(self, method_name: str, request: Any = None, metadata: Any = None, **fields: Any) -> Any:
        """Calls a method with one message."""
        method = self._methods[method_name]
        kind, response = message_class(method.input_type.name), message_class(method.output_type.name)
        path, serialize = f"/{SERVICE}/{method_name}", kind.SerializeToString
        given = kind(**fields) if request is None else request
        metadata = self._metadata if metadata is None else metadata
        return self.service.channel.unary_unary(path, serialize, response.FromString)(given, metadata=metadata)

    def stream(self, metadata: Any = None) -> Any:
        """Begins a ModelStreamInfer, to be written and read."""
        method = self.service.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            lambda sent: sent if isinstance(sent, bytes) else sent.SerializeToString(),
            message_class("ModelStreamInferResponse").FromString,
        )
        return method(metadata=self._metadata if metadata is None else metadata)

    async def own_text(self, prompt: str = PROMPT, **sampling: Any) -> str:
        """The text of penstock.v1's own method."""
        start = pb.GenerationStart(text=prompt, sampling=pb.SamplingParams(**sampling))
        complete = await self.service.generation.Complete(pb.CompleteRequest(start=start), metadata=self._metadata)
        text: str = complete.choices[0].text
        return text

    def live(self) -> int:
        num_requests: int = self.service.engine.stats().requests
        return num_requests


async def read_answers(call: Any) -> dict[str, Answer]:
    """Reads a stream to its end: the answers by the ids of their requests."""
    answers: dict[str, Answer] = {}
    while (response := await call.read()) is not grpc.aio.EOF:
        answers.setdefault(response.infer_response.id, Answer()).add(response)
    return answers
