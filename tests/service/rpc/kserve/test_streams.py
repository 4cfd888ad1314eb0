"""Clients that misbehave, and ends of all kinds: they cost no other client anything."""

import asyncio
import hashlib

import grpc
import numpy as np
import pytest
from letters import letters, paced
from waiting import until
from wire.inference_calls import PROMPT, Answer, message, outputs_of, read_answers
from wire.raw_http2 import WINDOW_UPDATE, frame, raw_client

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.service.streaming import buffer_budget
from penstock.v1.kserve import SERVICE, ModelInferRequest

KEYS = {"acme": "a" * 40, "zenith": "z" * 40}


@pytest.fixture
def keys(tmp_path, load_keys):
    path = tmp_path / "keys"
    lines = (f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {tenant}\n" for tenant, key in KEYS.items())
    path.write_text("".join(lines))
    return load_keys(path)


def of(tenant):
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


def request(request_id="", max_tokens=3000, **inputs):
    return message(request_id, {"max_tokens": max_tokens}, text_input=PROMPT, **({"stream": True} | inputs))


async def whole_text(inference, num_tokens, metadata=None):
    """The output of a client that does everything right."""
    response = await inference.call("ModelInfer", request(max_tokens=num_tokens, stream=False), metadata=metadata)
    [text] = outputs_of(response)["text_output"]
    return text


async def test_a_live_id_is_refused_and_a_free_one_is_not(start_inference):
    inference = await start_inference(paced())
    stream = inference.stream()
    await stream.write(request("mine", 400))
    await until(lambda: inference.live() == 1)
    await stream.write(request("mine", 400))
    first, refused = Answer(), Answer()
    while not refused.finals:
        response = await stream.read()
        (refused if response.error_message else first).add(response)
    assert refused.error == "id: a live request of this stream has the same id; choose another, or leave it empty"
    while not any(first.finals):
        first.add(await stream.read())
    assert first.text == letters(len(PROMPT), 400)
    await stream.write(request("mine", 3))
    await stream.write(request("", 3))
    await stream.write(request("", 3))
    await stream.done_writing()
    answers = await read_answers(stream)
    assert answers["mine"].text == letters(len(PROMPT), 3)
    assert len(answers[""].text) == 6, "requests without an id share their output here"


async def test_a_reader_that_stops_is_paused_and_holds_nobody_up(start_inference, monkeypatch):
    monkeypatch.setattr(buffer_budget, "MAX_STREAM_BYTES", 20_000)
    inference = await start_inference()
    sent = [request(f"r{number}", 1000).SerializeToString() for number in range(4)]
    async with raw_client(inference.target, window=100) as client:  # a client that takes only 100 bytes
        stream = client.begin(f"/{SERVICE}/ModelStreamInfer")
        await client.put(stream, b"".join(b"\0" + len(raw).to_bytes(4) + raw for raw in sent), ends=True)
        await until(lambda: inference.service.engine.stats().stalled == 4)
        assert client.num_bytes <= 100
        assert await whole_text(inference, 20) == letters(len(PROMPT), 20)
        client.send(frame(WINDOW_UPDATE, (1 << 30).to_bytes(4), stream))
        assert await client.end(stream) == "0", "it continues where it was paused"
        assert client.num_bytes > 4 * 1000
    assert inference.service.engine.stats().output_tokens >= 4 * 1000


async def test_garbage_ends_only_its_own_stream(start_inference):
    inference = await start_inference(paced())
    other, broken = inference.stream(), inference.stream()
    await other.write(request("other", 400))
    await broken.write(request("mine"))
    await until(lambda: inference.live() == 2)
    await broken.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_answers(broken)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await other.done_writing()
    assert (await read_answers(other))["other"].text == letters(len(PROMPT), 400)
    await until(lambda: not inference.live())


async def test_messages_of_very_many_parts_are_refused_and_the_stream_lives_on(inference):
    stream = inference.stream()
    many_inputs = ModelInferRequest(inputs=[{}] * 50_000)
    many_parameters = message(text_input=PROMPT, parameters={f"p{number}": True for number in range(3000)})
    for given, expected in (
        (many_inputs, "a message has at most 40,000 fields, including those of inner messages"),
        (many_parameters, "parameters: at most 2,048 entries; it has more than 2,048"),
    ):
        await stream.write(given)
        assert (await stream.read()).error_message.startswith(expected)
        with pytest.raises(grpc.aio.AioRpcError, match=expected) as error:
            await inference.call("ModelInfer", given)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await stream.write(request("mine", 3))
    await stream.done_writing()
    answers = await read_answers(stream)
    assert answers["mine"].text == await inference.own_text(max_tokens=3)


async def test_a_reset_and_a_deadline_leave_no_row_running(start_inference):
    inference = await start_inference(paced())
    call, stream = inference.call("ModelInfer", request(stream=False)), inference.stream()
    await stream.write(request("one"))
    await stream.write(request("two", stream=False))
    await until(lambda: inference.service.engine.stats().running == 3)
    call.cancel()
    stream.cancel()
    await until(lambda: not inference.live())
    late = inference.stream()
    timed = request("late")
    timed.parameters["timeout"].int64_param = 50_000  # microseconds
    await late.write(timed)
    await late.write(request("other", 5))
    await late.done_writing()
    answers = await read_answers(late)
    assert "deadline" in answers["late"].error
    assert answers["late"].finals[-1]
    assert letters(len(PROMPT), 3000).startswith(answers["late"].text)
    assert answers["other"].text == letters(len(PROMPT), 5)


async def test_heartbeats_are_not_sent(start_inference):
    inference = await start_inference(paced(0.05), heartbeat_s=0.01)
    stream = inference.stream()
    await stream.write(request("mine", 5))
    await stream.done_writing()
    answer = (await read_answers(stream))["mine"]
    assert answer.text == letters(len(PROMPT), 5)
    assert len(answer.outputs) == len(answer.finals) <= 5


async def test_a_worker_that_dies_changes_no_token(start_inference):
    executor = paced(0.001)
    inference = await start_inference(executor)
    stream = inference.stream()
    await stream.write(request("mine", 60))
    await until(lambda: inference.service.engine.stats().output_tokens > 5)
    executor.die()
    await stream.done_writing()
    assert (await read_answers(stream))["mine"].text == letters(len(PROMPT), 60)
    assert executor.num_starts == 2


async def test_a_drain_refuses_new_requests_and_a_shutdown_ends_the_stream(start_inference):
    inference = await start_inference(paced())
    stream = inference.stream()
    await stream.write(request("live"))
    await until(lambda: inference.live() == 1)
    inference.service.engine.drain()
    await stream.write(request("new"))
    answers = {"live": Answer()}
    while "new" not in answers:
        response = await stream.read()
        answers.setdefault(response.infer_response.id, Answer()).add(response)
    assert answers["new"].error == "the service accepts no new requests; try another"
    assert not (await inference.call("ServerReady")).ready
    index = await inference.call("RepositoryIndex")
    assert [(model.state, model.reason) for model in index.models] == [("UNAVAILABLE", "draining")]
    assert not (await inference.call("RepositoryIndex", ready=True)).models
    stopping = asyncio.create_task(inference.service.server.stop())
    while not answers["live"].error:
        response = await stream.read()
        answers[response.infer_response.id].add(response)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_answers(stream)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert answers["live"].error.startswith("the service shut down before the request finished")
    await stopping


async def test_keys_tenants_and_probes(start_inference, keys):
    inference = await start_inference(paced(), of("acme"), authenticator=keys)
    for name, fields in (("ServerLive", {}), ("ServerReady", {}), ("ModelReady", {"name": "bytes"})):
        response = await inference.call(name, metadata=(), **fields)
        assert response.live if name == "ServerLive" else response.ready
    for name in ("ServerMetadata", "ModelMetadata", "ModelConfig", "RepositoryIndex"):
        await inference.call(name)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await inference.call(name, metadata=())
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    stranger = inference.stream(metadata=())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_answers(stranger)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    stream = inference.stream()
    await stream.write(request("mine"))
    await until(lambda: inference.live() == 1)
    assert await whole_text(inference, 5, metadata=of("zenith")) == letters(len(PROMPT), 5)
    stream.cancel()


async def test_refused_requests_count_against_the_tenants_rate(start_inference):
    tenants = {"default": TenantLimits(requests_per_second=0.01)}
    inference = await start_inference(scheduler=SchedulerConfig(tenants=tenants))
    stream = inference.stream()
    errors = []
    for _ in range(3):
        await stream.write(message(text_input=PROMPT, parameters={"max_token": 1}))
        errors.append((await stream.read()).error_message)
    assert errors[0].startswith("parameters: there is no parameter 'max_token'")
    assert "rate" in errors[-1]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await inference.call("ModelInfer", message(parameters={"max_token": 1}))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stream.done_writing()
    assert not await read_answers(stream)


class TestEmbeddings:
    """The vectors of a model."""

    async def test_an_embedding_is_the_services_own(self, inference):
        own = pb.EmbedRequest(inputs=[pb.EmbedInput(text=PROMPT)])
        [expected] = [each.embeddings[0] async for each in inference.service.embedding.Embed(own)]
        given = message("mine", text_input=PROMPT)
        given.outputs.add(name="embedding")
        response = await inference.call("ModelInfer", given)
        [output] = response.outputs
        size = len(expected.values)
        assert (output.name, output.datatype, list(output.shape)) == ("embedding", "FP32", [1, size])
        assert np.frombuffer(response.raw_output_contents[0], dtype="<f4").tolist() == list(expected.values)
        given.parameters["dimensions"].int64_param = size + 1
        with pytest.raises(grpc.aio.AioRpcError, match=r"parameters\.dimensions: at most"):
            await inference.call("ModelInfer", given)

    async def test_a_model_without_text_is_described_by_its_embedding(self, start_inference):
        inference = await start_inference(generates=False)
        metadata = await inference.call("ModelMetadata", name="bytes")
        assert [each.name for each in metadata.inputs] == ["text_input"]
        assert [(each.name, each.datatype) for each in metadata.outputs] == [("embedding", "FP32")]
        config = (await inference.call("ModelConfig", name="bytes")).config
        assert not config.model_transaction_policy.decoupled
        assert list(config.output[0].dims) == list(metadata.outputs[0].shape)
        response = await inference.call("ModelInfer", message(text_input=PROMPT))
        assert list(response.outputs[0].shape) == list(metadata.outputs[0].shape)
        stream = inference.stream()
        await stream.write(message("mine", text_input=PROMPT))
        refused = "outputs: an embedding has one response; call ModelInfer"
        assert (await stream.read()).error_message == refused
        stream.cancel()
