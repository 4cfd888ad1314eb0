"""What a request may contain: both forms of tensors, all parameters, and a refusal by name of everything else."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from wire.inference_calls import PROMPT, message, outputs_of, read_answers

import penstock.v1 as pb
from penstock.service.errors import ServiceError
from penstock.service.rpc.kserve.parameters import GENERATION_PARAMETERS, MAX_JSON_BYTES
from penstock.service.rpc.kserve.request import INPUTS, MAX_ECHOED_BYTES, OUTPUTS, fill_generation


def raw_bytes(text):
    return len(text).to_bytes(4, "little") + text


def raw(*elements, names=("text_input", "stream"), datatypes=("BYTES", "BOOL")):
    """A request with elements in raw_input_contents."""
    request = message()
    for name, datatype in list(zip(names, datatypes, strict=True))[: len(elements)]:
        request.inputs.add(name=name, datatype=datatype, shape=[1])
    request.raw_input_contents.extend(elements)
    return request


def changed(request=None, **fields):
    """A request whose first input has other fields."""
    request = request or message(text_input="hi")
    first = request.inputs[0]
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(first, name)[:]
            getattr(first, name).extend(value)
        else:
            setattr(first, name, value)
    return request


def with_contents(**contents):
    request = message()
    added = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    added.contents.SetInParent()
    for name, values in contents.items():
        getattr(added.contents, name).extend(values)
    return request


def with_parameter(name, where="inputs", **value):
    request = message(text_input="hi")
    if where == "outputs":
        request.outputs.add(name="text_output")
    target = request if where == "" else getattr(request, where)[0]
    target.parameters[name].SetInParent()
    for kind, given in value.items():
        setattr(target.parameters[name], kind, given)
    return request


def with_outputs(*names):
    request = message(text_input="hi")
    for name in names:
        request.outputs.add(name=name)
    return request


def with_json(**values):
    return message(text_input="hi", sampling_parameters=json.dumps(values))


def with_field(**fields):
    request = message(text_input="hi")
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def both_forms():
    request = raw(raw_bytes(b"hi"))
    request.inputs[0].contents.bytes_contents.append(b"hi")
    return request


def without_item():
    request = raw(raw_bytes(b"hi"))
    request.inputs.add(name="stream", datatype="BOOL", shape=[1])
    return request


REFUSED = {
    "no input": (message(), "text_input: is required; send a tensor of this name with"),
    "an empty prompt": (message(text_input=""), "text_input: "),
    "an unknown input": (message(txt_input="hi"), "inputs: there is no input 'txt_input'; did you mean text_input?"),
    "an input twice": (
        raw(raw_bytes(b"a"), raw_bytes(b"b"), names=("text_input",) * 2, datatypes=("BYTES",) * 2),
        "text_input: is there twice; send it once",
    ),
    "another type": (changed(datatype="FP32"), "text_input: must have the datatype BYTES; it has 'FP32'"),
    "two elements": (changed(shape=[2]), "text_input: must have the shape [1], one element; it has [2]"),
    "no shape": (changed(shape=[]), "text_input: must have the shape [1], one element; it has []"),
    "many dimensions": (
        changed(shape=[1] * 9),
        f"text_input: must have the shape [1], one element; it has {[1] * 8}...",
    ),
    "no contents": (with_contents(), "text_input: must have one element in bytes_contents, as in its shape; it has"),
    "more contents": (
        with_contents(bytes_contents=[b"a", b"b"]),
        "text_input: must have one element in bytes_contents, as in its shape; it has 2",
    ),
    "another field": (with_contents(int_contents=[1]), "text_input: must be in bytes_contents; it has int_contents"),
    "two fields": (
        with_contents(bytes_contents=[b"a"], fp32_contents=[1.0]),
        "text_input: must be in bytes_contents; it has fp32_contents",
    ),
    "no UTF-8": (with_contents(bytes_contents=[b"ab\xff"]), "text_input: must be UTF-8; the byte at 2 is not"),
    "no UTF-8, raw": (raw(raw_bytes(b"\xc3")), "text_input: must be UTF-8; the byte at 0 is not"),
    "a short length": (
        raw(b"\x01\x00\x00\x00ab"),
        "text_input: must have one element in raw_input_contents; its length is 1, and 2 bytes follow",
    ),
    "a long length": (
        raw(b"\xff\xff\xff\xffab"),
        "text_input: must have one element in raw_input_contents; its length is 4,294,967,295, and 2 bytes follow",
    ),
    "two raw elements": (
        raw(raw_bytes(b"a") + raw_bytes(b"b")),
        "text_input: must have one element in raw_input_contents; its length is 1, and 6 bytes follow",
    ),
    "no length": (raw(b"ab"), "text_input: must begin with its length in 4 bytes in raw_input_contents; it has 2 "),
    "no bool": (
        raw(raw_bytes(b"hi"), b"\x02"),
        "stream: must be one byte in raw_input_contents, 0 or 1; it has 1 bytes",
    ),
    "a raw item too few": (
        raw(raw_bytes(b"hi"), b"\x00", b"\x00", names=("text_input", "stream"), datatypes=("BYTES", "BOOL")),
        "raw_input_contents: must have one item for each of the 2 inputs, or none; it has 3",
    ),
    "an input without its item": (
        without_item(),
        "raw_input_contents: must have one item for each of the 2 inputs, or none; it has 1",
    ),
    "both forms": (both_forms(), "text_input: must be in contents or in raw_input_contents, not in both"),
    "shared memory": (
        with_parameter("shared_memory_region", string_param="r"),
        "text_input: shared memory is not supported; send the element in the request",
    ),
    "an input's parameter": (
        with_parameter("content_type", string_param="np"),
        "text_input: the parameter 'content_type' of this input is not supported; omit it",
    ),
    "an output twice": (with_outputs("text_output", "text_output"), "outputs: text_output is there twice"),
    "an output's parameter": (
        with_parameter("classification", "outputs", int64_param=3),
        "text_output: the parameter 'classification' of this output is not supported; omit it",
    ),
    "an unknown output": (with_outputs("text_out"), "outputs: there is no output 'text_out'; did you mean text_o"),
    "an embedding and a text": (with_outputs("embedding", "text_output"), "outputs: there is no output 'embedding'; "),
    "both names": (message(text_input="hi", stream=True, streaming=True), "streaming: means the same as stream; send"),
    "a prompt in a stream": (
        message(text_input="hi", stream=True, exclude_input_in_output=False),
        "exclude_input_in_output: must be true for an output that streams; or omit it",
    ),
    "a long prompt repeated": (
        message(text_input="x" * (MAX_ECHOED_BYTES + 1), exclude_input_in_output=False),
        "exclude_input_in_output: the response would repeat 262,145 bytes of the prompt, at most 262,144; send true",
    ),
    "another version": (with_field(model_version="2"), "model_version: must be 1, or empty; it is '2'"),
    "a long id": (with_field(id="é" * 129), "id: at most 128 bytes; it has 258"),
    "an unprintable id": (with_field(id="a\n"), "id: must be printable ASCII"),
    "another model": (with_field(model_name="other"), "model_name: no model of this name is served here; "),
    "an unset parameter": (with_parameter("top_p", ""), "parameters.top_p: must be a number; it is not set"),
    "an unknown parameter": (
        message(text_input="hi", parameters={"temprature": 1.0}),
        "parameters: there is no parameter 'temprature'; did you mean temperature?",
    ),
    "an unsupported parameter": (
        message(text_input="hi", parameters={"sequence_id": 4}),
        "parameters.sequence_id: is not supported: requests do not belong to a sequence; omit it",
    ),
    "a parameter twice": (
        message(text_input="hi", parameters={"n": 1}, sampling_parameters='{"n": 1}'),
        "sampling_parameters.n: is in parameters.n too; send it once",
    ),
    "text for a number": (
        message(text_input="hi", parameters={"top_p": "high"}),
        "parameters.top_p: must be a number; it is 'high'",
    ),
    "a bool for a number": (
        message(text_input="hi", parameters={"max_tokens": True}),
        "parameters.max_tokens: must be an integer; it is 'True'",
    ),
    "a fraction": (
        message(text_input="hi", parameters={"max_tokens": 1.5}),
        "parameters.max_tokens: must be an integer; it is '1.5'",
    ),
    "not a number": (message(text_input="hi", parameters={"top_p": float("nan")}), "parameters.top_p: must be "),
    "a negative limit": (
        message(text_input="hi", parameters={"max_tokens": -1}),
        "parameters.max_tokens: is out of range; it is '-1'",
    ),
    "no tokens": (message(text_input="hi", parameters={"max_tokens": 0}), "parameters.max_tokens: must be at least 1"),
    "a list in the map": (
        message(text_input="hi", parameters={"stop_token_ids": "[1]"}),
        "parameters.stop_token_ids: must be a list of token ids, in the JSON text of the input sampling_parameters; ",
    ),
    "a bias in the map": (
        message(text_input="hi", parameters={"logit_bias": "{}"}),
        "parameters.logit_bias: must be an object of numbers by token id, in the JSON text of the input",
    ),
    "no JSON": (
        message(text_input="hi", sampling_parameters="{"),
        'sampling_parameters: must be the JSON text of an object, such as {"max_tokens": 16}',
    ),
    "deep JSON": (
        message(text_input="hi", sampling_parameters="[" * 100_000),
        'sampling_parameters: must be the JSON text of an object, such as {"max_tokens": 16}',
    ),
    "a huge number": (
        message(text_input="hi", sampling_parameters=f'{{"n": {"9" * 5000}}}'),
        'sampling_parameters: must be the JSON text of an object, such as {"max_tokens": 16}',
    ),
    "much JSON": (
        message(text_input="hi", sampling_parameters=" " * (MAX_JSON_BYTES + 1)),
        "sampling_parameters: at most 524,288 bytes; it has 524,289",
    ),
    "a number among texts": (with_json(stop=["a", 1]), "sampling_parameters.stop: contains a value of the wrong type"),
    "half a surrogate": (with_json(stop="\ud800"), "sampling_parameters.stop: contains half of a surrogate pair"),
    "too many stops": (with_json(stop=["a"] * 65), "sampling_parameters.stop: at most 64"),
    "a foreign token": (with_json(logit_bias={"258": 1}), "sampling_parameters.logit_bias"),
    "many biases": (
        with_json(logit_bias={str(number): 1 for number in range(1025)}),
        "sampling_parameters.logit_bias: at most 1,024 entries; it is an object",
    ),
    "a text among ids": (
        with_json(stop_token_ids=[1, "2"]),
        "sampling_parameters.stop_token_ids: contains a value of the wrong type",
    ),
    "a list of limits": (with_json(max_tokens=[1]), "sampling_parameters.max_tokens: must be an integer; it is a list"),
    "too many choices": (with_json(n=4_000_000_000), "sampling_parameters.n: must be at least 1 and at most 64"),
    "no constraint": (
        with_json(structured_outputs={"yaml": "x"}),
        "sampling_parameters.structured_outputs: must be an object with one of json, regex, choice, json_object, ",
    ),
    "a bad constraint": (with_json(structured_outputs={"regex": "("}), "sampling_parameters.structured_outputs"),
    "a long prompt": (message(text_input="x" * 5000), "text_input: "),
}  # fmt: skip


async def test_what_is_wrong_is_refused_by_its_name_and_the_stream_lives_on(inference, details_of):
    stream = inference.stream()
    for number, (case, (request, expected)) in enumerate(REFUSED.items()):
        request.id = request.id or f"r{number}"
        await stream.write(request)
        response = await stream.read()
        assert response.error_message.startswith(expected), (case, response.error_message)
        infer = response.infer_response
        assert infer.id == (request.id if len(request.id) <= 128 else ""), case
        assert infer.parameters["triton_final_response"].bool_param
        if any(each.name.startswith("stream") for each in request.inputs):
            continue  # a call of ModelInfer may have no such input, or not as true
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await inference.call("ModelInfer", request)
        assert error.value.details() == response.error_message, case
        code = grpc.StatusCode.NOT_FOUND if case in ("another model", "another version") else None
        assert error.value.code() is (code or grpc.StatusCode.INVALID_ARGUMENT), case
        [violation] = details_of(error.value)["BadRequest"].field_violations
        assert response.error_message.startswith(f"{violation.field}: "), case
    await stream.write(message("last", text_input=PROMPT, parameters={"max_tokens": 2}))
    await stream.done_writing()
    answers = await read_answers(stream)
    assert answers["last"].text == await inference.own_text(max_tokens=2)


@pytest.mark.parametrize("shape", [[1], [1, 1]])
async def test_both_forms_of_tensors_mean_the_same(inference, shape):
    requests = [message(text_input=PROMPT, stream=False), raw(raw_bytes(PROMPT.encode()), b"\0")]
    for request in requests:
        request.parameters["max_tokens"].int64_param = 6
        request.inputs[0].parameters["content_type"].string_param = "str"
        for given in request.inputs:
            del given.shape[:]
            given.shape.extend(shape)
        response = await inference.call("ModelInfer", request)
        outputs = outputs_of(response)
        assert outputs == {"text_output": [await inference.own_text(max_tokens=6)], "finish_reason": ["length"]}


def start_of(request):
    start = pb.GenerationStart()
    fill_generation(start, request, may_stream=True)
    return start


ALL: dict[str, Any] = {
    "allowed_token_ids": [97, 98], "bad_words": ["x"], "frequency_penalty": 0.5, "ignore_eos": True,
    "logit_bias": {7: 1.5}, "max_tokens": 9, "min_p": 0.125, "min_tokens": 2, "n": 2, "presence_penalty": -0.5,
    "repetition_penalty": 1.5, "seed": 5, "stop": ["x", "y"], "stop_token_ids": [4], "temperature": 0.5,
    "thinking_token_budget": 3, "top_k": 3, "top_p": 0.25,
}  # fmt: skip
"""Fields of SamplingParams that have the same name in a request."""
OTHERS: dict[str, Any] = {
    "priority": 3, "skip_special_tokens": False, "structured_outputs": {"regex": "a+"}, "timeout": 1500,
    "triton_enable_empty_final_response": True, "truncate_prompt_tokens": 8,
}  # fmt: skip


def test_the_documentation_names_all_of_it():
    text = (Path(__file__).parents[4] / "docs/kserve.md").read_text()
    for name in (*GENERATION_PARAMETERS, *INPUTS, *OUTPUTS):
        assert f"`{name}`" in text, name


class TestTranslation:
    """The translation of parameters."""

    def test_every_parameter_sets_its_field(self):
        assert set(ALL) | set(OTHERS) == set(GENERATION_PARAMETERS)
        start = start_of(with_json(**ALL, **OTHERS))
        assert start.sampling == pb.SamplingParams(**ALL)
        assert start.constraint == pb.Constraint(regex="a+")
        assert (start.priority, start.timeout_ms, start.truncate_prompt_tokens) == (3, 2, 8)
        assert start.output == pb.OutputOptions(include_special_tokens=True)
        assert start.text == "hi"

    def test_the_map_and_texts_of_numbers_mean_the_same(self):
        scalars = {name: value for name, value in (ALL | OTHERS).items() if not isinstance(value, list | dict)}
        by_map = start_of(message(text_input="hi", parameters={**scalars, "stop": "x"}))
        by_json = start_of(with_json(**scalars, stop="x"))
        by_texts = start_of(with_json(**{name: str(value) for name, value in scalars.items()}, stop=["x"]))
        assert by_map == by_json == by_texts
        unsigned = message(text_input="hi")
        unsigned.parameters["priority"].uint64_param = 3  # as tritonclient sends it
        assert start_of(unsigned).priority == 3

    def test_values_that_mean_none(self):
        start = start_of(with_json(seed=-1, top_k=-1, timeout=0, temperature=None))
        assert start.sampling == pb.SamplingParams()
        assert not start.HasField("timeout_ms")
        assert start_of(with_json(seed=-2)).sampling.seed == 2**32 - 2

    def test_constraints(self):
        for given, expected in (
            ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
            ({"json": "{}", "regex": None}, {"json_schema": "{}"}),
            ({"choice": ["a", "b"]}, {"choices": pb.StringChoices(values=["a", "b"])}),
            ({"grammar": "start: /a/"}, {"lark": "start: /a/"}),
            ({"grammar": 'root ::= "a"'}, {"gbnf": 'root ::= "a"'}),
            ({"json_object": True}, {"any_json": pb.AnyJson()}),
        ):
            assert start_of(with_json(structured_outputs=given)).constraint == pb.Constraint(**expected)
        for wrong in ({"json_object": False}, {"choice": "ab"}, {"choice": [1]}, {"regex": 1}, {"grammar": 1}, "a", {}):
            with pytest.raises(ServiceError, match=r"^sampling_parameters\.structured_outputs: "):
                start_of(with_json(structured_outputs=wrong))
