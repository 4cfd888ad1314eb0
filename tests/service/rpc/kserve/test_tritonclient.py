"""tritonclient, Triton's own client, with threads and with coroutines: its output is that of penstock.v1."""

import asyncio
import json
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from letters import paced
from tritonclient.utils import InferenceServerException
from waiting import until
from wire.inference_calls import PROMPT, tensors


def text_of(result):
    [text] = result.as_numpy("text_output")
    return text.decode()


def is_final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


class Stream:
    """A stream of the client with threads."""

    def __init__(self, target):
        self.client = tritonclient.grpc.InferenceServerClient(target)
        self.found: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self.found.put((result, error)))

    def send(self, request_id="", parameters=None, outputs=None, **inputs):
        self.client.async_stream_infer(
            "bytes", tensors(**inputs), request_id=request_id, parameters=parameters, outputs=outputs,
            enable_empty_final_response=True,
        )  # fmt: skip

    def answers(self, num_final):
        """The results by id, until this number of requests has ended, and the errors."""
        results: dict[str, list[Any]] = {}
        errors: list[str] = []
        while num_final:
            result, error = self.found.get(timeout=60)
            if error is not None:
                errors.append(error.message())
            else:
                results.setdefault(result.get_response().id, []).append(result)
            num_final -= error is not None or is_final(result)
        return results, errors

    def close(self, cancel_requests=False):
        self.client.stop_stream(cancel_requests=cancel_requests)
        self.client.close()


async def test_a_whole_answer_with_threads(inference):
    expected = await inference.own_text(max_tokens=12, temperature=0)

    def infer():
        with tritonclient.grpc.InferenceServerClient(inference.target) as client:
            inputs = tensors(text_input=PROMPT, stream=False)
            parameters = {"max_tokens": 12, "temperature": 0.0}
            return client.infer("bytes", inputs, model_version="1", request_id="mine", parameters=parameters)

    result = await asyncio.to_thread(infer)
    assert text_of(result) == expected
    assert result.as_numpy("finish_reason").tolist() == [b"length"]
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("mine", "bytes", "1")
    assert [output.name for output in response.outputs] == ["text_output", "finish_reason"]


async def test_a_whole_answer_with_coroutines(inference, triton):
    sampling = json.dumps({"max_tokens": "12", "temperature": "0", "stop": None})
    given = tensors(text_input=PROMPT, sampling_parameters=sampling, exclude_input_in_output=False)
    result = await triton.infer("bytes", given)
    assert text_of(result) == PROMPT + await inference.own_text(max_tokens=12, temperature=0)


async def test_all_outputs(inference, triton):
    names = ("cumulative_logprob", "finish_reason", "num_input_tokens", "num_output_tokens")
    flags = {f"return_{name}": True for name in names}
    result = await triton.infer("bytes", tensors(text_input=PROMPT, **flags), parameters={"max_tokens": 3, "n": 2})
    assert [text.decode() for text in result.as_numpy("text_output")] == [await inference.own_text(max_tokens=3)] * 2
    assert result.as_numpy("num_output_tokens").tolist() == [3, 3]
    assert result.as_numpy("num_output_tokens").dtype == np.uint32
    assert result.as_numpy("num_input_tokens").tolist() == [len(PROMPT)]
    logprobs = result.as_numpy("cumulative_logprob")
    assert (logprobs.dtype, logprobs.shape) == (np.float32, (2,))
    limit = {"max_tokens": 3}
    wanted = [tritonclient.grpc.InferRequestedOutput("num_output_tokens")]
    only = await triton.infer("bytes", tensors(text_input=PROMPT), outputs=wanted, parameters=limit)
    assert [output.name for output in only.get_response().outputs] == ["num_output_tokens"]
    without = await triton.infer("bytes", tensors(text_input=PROMPT, return_finish_reason=False), parameters=limit)
    assert [output.name for output in without.get_response().outputs] == ["text_output"]


async def test_a_stream_with_two_requests_at_once_and_one_that_fails(inference):
    expected = await inference.own_text(max_tokens=40)
    stream = await asyncio.to_thread(Stream, inference.target)
    stream.send("first", {"max_tokens": 40}, text_input=PROMPT, stream=True, return_num_output_tokens=True)
    stream.send("second", {"max_tokens": 40}, text_input=PROMPT, streaming=True)
    stream.send("bad", {"max_token": 40}, text_input=PROMPT)
    stream.send("whole", {"max_tokens": 40}, text_input=PROMPT)
    results, errors = await asyncio.to_thread(stream.answers, 4)
    assert errors == ["parameters: there is no parameter 'max_token'; did you mean max_tokens?"]
    assert set(results) == {"first", "second", "whole"}
    for answers in results.values():
        assert "".join(map(text_of, answers)) == expected
        reasons = [answer.as_numpy("finish_reason").tolist() for answer in answers]
        assert reasons == [[b""]] * (len(answers) - 1) + [[b"length"]]
        assert [is_final(answer) for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert len(results["first"]) > 1
    assert sum(int(answer.as_numpy("num_output_tokens")[0]) for answer in results["first"]) == 40
    assert len(results["whole"]) == 1
    stream.send("after", {"max_tokens": 2}, text_input=PROMPT)
    results, errors = await asyncio.to_thread(stream.answers, 1)
    assert text_of(results["after"][0]) == expected[:2]
    await asyncio.to_thread(stream.close)


async def test_stop_stream_waits_for_what_was_sent(inference):
    stream = await asyncio.to_thread(Stream, inference.target)
    stream.send("mine", {"max_tokens": 30}, text_input=PROMPT, stream=True)
    await asyncio.to_thread(stream.close)
    results, errors = stream.answers(1)
    assert not errors
    assert "".join(map(text_of, results["mine"])) == await inference.own_text(max_tokens=30)


async def test_stop_stream_with_cancel_ends_the_rows(start_inference):
    inference = await start_inference(paced())
    stream = await asyncio.to_thread(Stream, inference.target)
    stream.send("one", {"max_tokens": 3000}, text_input=PROMPT, stream=True)
    stream.send("two", {"max_tokens": 3000}, text_input=PROMPT)
    await until(lambda: inference.service.engine.stats().running == 2)
    await asyncio.to_thread(stream.close, cancel_requests=True)
    await until(lambda: not inference.live())


async def test_a_stream_with_coroutines_and_its_cancel(start_inference):
    inference = await start_inference(paced())

    async def requests():
        yield {"model_name": "bytes", "inputs": tensors(text_input=PROMPT, stream=True), "request_id": "mine",
               "parameters": {"max_tokens": 3000}}  # fmt: skip
        await asyncio.Event().wait()

    async with tritonclient.grpc.aio.InferenceServerClient(inference.target) as client:
        answers = client.stream_infer(requests())
        text = ""
        async for result, error in answers:
            assert error is None
            text += text_of(result)
            if len(text) > 5:
                break
        assert inference.live() == 1
        answers.cancel()
        await until(lambda: not inference.live())
    assert text == (await inference.own_text(max_tokens=len(text)))


async def test_a_cancelled_call_ends_its_row(start_inference):
    inference = await start_inference(paced())
    with tritonclient.grpc.InferenceServerClient(inference.target) as client:
        found: queue.Queue[Any] = queue.Queue()
        call = client.async_infer(
            "bytes", tensors(text_input=PROMPT), lambda result, error: found.put(error), parameters={"max_tokens": 3000}
        )
        await until(lambda: inference.service.engine.stats().running == 1)
        call.cancel()
        await until(lambda: not inference.live())
        error = await asyncio.to_thread(found.get, timeout=60)
    assert error.status() == "StatusCode.CANCELLED"


async def test_errors_of_whole_answers_are_statuses(triton):
    async def error_of(model="bytes", parameters=None, **inputs):
        with pytest.raises(InferenceServerException) as error:
            await triton.infer(model, tensors(**inputs), parameters=parameters)
        return error.value.status(), error.value.message()

    invalid = "StatusCode.INVALID_ARGUMENT"
    assert await error_of(text_input=PROMPT, stream=True) == (
        invalid, "stream: ModelInfer has one response; send false, or call ModelStreamInfer",
    )  # fmt: skip
    assert await error_of(text_input=PROMPT, parameters={"temperature": 1000.0}) == (
        invalid, "parameters.temperature: must be at least 0 and at most 100; it is 1000",
    )  # fmt: skip
    status, text = await error_of(text_input=PROMPT, sampling_parameters='{"top_p": 2}')
    assert (status, text.partition(":")[0]) == (invalid, "sampling_parameters.top_p")
    status, text = await error_of("other", text_input=PROMPT)
    assert status == "StatusCode.NOT_FOUND"
    assert text == "model_name: no model of this name is served here; leave it empty, or send bytes"


async def test_what_clients_ask_before_they_send(triton):
    assert await triton.is_server_live()
    assert await triton.is_server_ready()
    assert await triton.is_model_ready("bytes")
    assert await triton.is_model_ready("bytes", "1")
    assert not await triton.is_model_ready("bytes", "2")
    assert not await triton.is_model_ready("other")
    server = await triton.get_server_metadata(as_json=True)
    assert (server["name"], server["extensions"]) == ("penstock", ["model_configuration"])
    metadata = await triton.get_model_metadata("bytes")
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("bytes", ["1"], "penstock")
    inputs = {each.name: (each.datatype, list(each.shape)) for each in metadata.inputs}
    outputs = {each.name: (each.datatype, list(each.shape)) for each in metadata.outputs}
    assert inputs["text_input"] == ("BYTES", [1])
    assert inputs["streaming"] == inputs["stream"] == ("BOOL", [1])
    assert outputs["text_output"] == outputs["finish_reason"] == ("BYTES", [-1])
    config = (await triton.get_model_config("bytes")).config
    assert config.model_transaction_policy.decoupled
    assert (config.name, config.backend, config.max_batch_size) == ("bytes", "penstock", 0)
    assert {each.name: each.optional for each in config.input} == {name: name != "text_input" for name in inputs}
    assert {each.name for each in config.output} == set(outputs)
    index = await triton.get_model_repository_index()
    assert [(model.name, model.version, model.state) for model in index.models] == [("bytes", "1", "READY")]


async def test_what_this_service_does_not_have_says_so(triton):
    for call in (
        triton.get_inference_statistics(),
        triton.load_model("bytes"),
        triton.unload_model("bytes"),
        triton.register_system_shared_memory("region", "/region", 64),
        triton.get_cuda_shared_memory_status(),
        triton.get_trace_settings(),
        triton.update_log_settings({}),
    ):
        with pytest.raises(InferenceServerException) as error:
            await call
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
        assert "; " in error.value.message(), "a remedy"
