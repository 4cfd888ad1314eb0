"""POST /v1/embeddings, by the openai package, over a service that embeds as it is told to."""

import asyncio
import base64
import json
import math
import struct
from contextlib import asynccontextmanager

import grpc
import httpx
import msgspec
import openai
import pytest

import penstock.v1 as pb
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.responses.chunking import encoded
from penstock.clients.gateway.routes.embeddings import answer_of, as_base64
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.settings import GatewaySettings
from penstock.v1 import Usage, embedding_pb2_grpc, model_pb2_grpc

VALUES = [0.5, -0.25, 1 / 3, 1e-20]


class Embedder(embedding_pb2_grpc.EmbeddingServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """The n-th vector begins with n."""

    def __init__(self):
        self.target = ""
        self.requests = []
        self.metadata = {}
        self.hangs = False
        self.at_once = 2048
        self.fails_at = 2048
        self.cancelled = asyncio.Event()
        self.began = asyncio.Event()

    async def GetModel(self, request, context):
        return pb.GetModelResponse(model=pb.Model(name="embedder", max_model_len=64))

    async def Embed(self, request, context):
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.began.set()
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if request.dimensions > len(VALUES):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "dimensions: must be at most 4")
        vectors = [pb.Embedding(values=[float(i), *VALUES[1:]]) for i in range(len(request.inputs))]
        for first in range(0, len(vectors), self.at_once):
            if first >= self.fails_at:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed")
            some = vectors[first : first + self.at_once]
            usage = None if first + len(some) < len(vectors) else Usage(prompt_tokens=7)
            request_id = "" if first else "R1"
            yield pb.EmbedResponse(request_id=request_id, first_index=first, embeddings=some, usage=usage)

    async def ListModels(self, request, context):
        raise NotImplementedError


@pytest.fixture
async def service():
    embedder, server = Embedder(), grpc.aio.server()
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(embedder, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(embedder, server)
    embedder.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield embedder
    await server.stop(None)


@asynccontextmanager
async def gateway(service, **settings):
    app = create_app(GatewaySettings(service=ConnectionOptions(service.target), tenant_header="x-tenant", **settings))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def http(service):
    async with gateway(service) as app:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield http


@pytest.fixture
def client(http):
    return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0)


async def test_a_text_gets_its_vector(client, service):
    answer = await client.embeddings.create(model="embedder", input="hello")
    assert struct.pack("<4f", *answer.data[0].embedding) == struct.pack("<4f", 0.0, *VALUES[1:])
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "embedder", "embedding")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)
    assert [each.text for each in service.requests[0].inputs] == ["hello"]
    assert not service.requests[0].HasField("dimensions")
    assert not service.requests[0].HasField("normalize")


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        (["a", "", "c"], ["a", "", "c"], []),
        ([1, 2, 3], [], [[1, 2, 3]]),
        ([[1, 2], [3]], [], [[1, 2], [3]]),
    ],
)
async def test_every_form_of_input_reaches_the_service_in_order(client, service, given, texts, ids):
    answer = await client.embeddings.create(model="embedder", input=given)
    inputs = service.requests[0].inputs
    assert [each.text for each in inputs if each.WhichOneof("input") == "text"] == texts
    assert [list(each.token_ids.ids) for each in inputs if each.WhichOneof("input") == "token_ids"] == ids
    assert [(each.index, each.embedding[0]) for each in answer.data] == [(i, i) for i in range(len(inputs))]


@pytest.mark.parametrize("in_base64", [True, False])
async def test_a_streamed_response_is_the_same_as_a_whole_one(client, http, service, in_base64):
    body = {"input": [str(i) for i in range(7)], "encoding_format": "base64" if in_base64 else "float"}
    whole = await http.post("/v1/embeddings", json=body)
    service.at_once = 3
    streamed = await http.post("/v1/embeddings", json=body)
    assert "content-length" in whole.headers
    assert "content-length" not in streamed.headers
    assert streamed.headers["x-request-id"] == "R1"
    assert streamed.json() | {"created": 0} == whole.json() | {"created": 0}
    assert [each["index"] for each in streamed.json()["data"]] == list(range(7))
    assert len((await client.embeddings.create(model="embedder", input=body["input"])).data) == 7


async def test_a_failure_in_between_cuts_the_response(http, service, caplog):
    service.at_once, service.fails_at = 2, 4
    with pytest.raises(Exception, match=r"^$") as error:  # the server closes the connection for it
        await http.post("/v1/embeddings", json={"input": ["x"] * 7})
    assert type(error.value).__name__ == "_Cut"
    assert not caplog.records
    service.fails_at = 0
    answer = await http.post("/v1/embeddings", json={"input": ["x"] * 7})
    assert answer.status_code == 504


async def test_both_encodings_hold_the_same_floats(http):
    body = {"input": "x"}
    plain = (await http.post("/v1/embeddings", json=body)).json()
    packed = (await http.post("/v1/embeddings", json=body | {"encoding_format": "base64"})).json()
    assert (await http.post("/v1/embeddings", json=body | {"encoding_format": "float"})).json()["data"] == plain["data"]
    vector = packed["data"][0]["embedding"]
    assert list(struct.unpack("<4f", base64.b64decode(vector))) == plain["data"][0]["embedding"]


async def test_other_options_reach_the_service(client, service):
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await client.embeddings.create(
        model="embedder",
        input="x",
        dimensions=2,
        user="passed over",
        extra_body={"normalize": False, "priority": -3, "request_id": "mine"},
        extra_headers={"x-tenant": "acme", "traceparent": trace},
    )
    (request,) = service.requests
    assert (request.dimensions, request.normalize, request.priority) == (2, False, -3)
    assert request.HasField("normalize")
    assert (request.tenant, request.traceparent, request.client_request_id) == ("acme", trace, "mine")
    assert service.metadata["authorization"] == "Bearer none"


async def test_a_refusal_by_the_service_is_reported(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="embedder", input="x", dimensions=5)
    assert "must be at most 4" in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[1], [2, -3]]}, "input[1][1]"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": -1}, "dimensions"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
async def test_what_is_wrong_is_named_and_not_sent(http, service, body, param):
    answer = await http.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.requests == []


@pytest.mark.parametrize("empty", ["", []])
async def test_an_empty_input_is_called_empty(http, empty):
    answer = await http.post("/v1/embeddings", json={"input": empty})
    assert answer.json()["error"]["message"] == "input: must not be empty"


async def test_too_many_inputs_are_refused_before_each_is_looked_at(http, service):
    answer = await http.post("/v1/embeddings", json={"input": [[1], "x"] * 1500})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input")
    assert error["message"] == "input: at most 2,048 inputs; there are 3,000"
    assert service.requests == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("x" * 5000, "input"),
        (["a", "x" * 5000], "input[1]"),
        ([1, 300], "input[1]"),
        ([[1], [2, 300]], "input[1][1]"),
        ([[1], [2] * 5000], "input[1]"),
        (["a"] * 2049, "input"),
    ],
    ids=["text", "texts", "ids", "lists", "long list", "many"],
)
async def test_what_the_service_refuses_is_named_as_the_caller_sent_it(start_gateway, given, param):
    answer = await (await start_gateway()).post("/v1/embeddings", input=given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("given", ["x" * 5000, [1] * 5000], ids=["text", "ids"])
async def test_what_is_too_long_for_the_context_has_openais_code(start_gateway, given):
    answer = await (await start_gateway()).post("/v1/embeddings", input=given)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("in_base64", [True, False])
async def test_others_run_while_many_vectors_are_written(in_base64):
    turns = 0

    async def run():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    vectors = [pb.Embedding(values=[index / 7] * 512) for index in range(1000)]
    response = pb.EmbedResponse(request_id="R1", embeddings=vectors, usage=Usage(prompt_tokens=7))
    running = asyncio.create_task(run())
    answer = await answer_of(response, "embedder", in_base64)
    assert turns > 20
    before = turns
    body = await encoded(answer)
    assert turns - before > 5
    running.cancel()
    encode = as_base64 if in_base64 else list
    data = [
        {"object": "embedding", "index": index, "embedding": encode(each.values)} for index, each in enumerate(vectors)
    ]
    assert body == msgspec.json.encode(answer | {"data": data})


async def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="other", input="x")


async def test_a_caller_who_goes_away_cancels_the_work(service):
    service.hangs = True
    body = json.dumps({"input": "x"}).encode()

    async def receive():
        if not service.requests:
            await service.began.wait() if received else received.append(True)
        return {"type": "http.disconnect"} if service.requests else {"type": "http.request", "body": body}

    async def send(message):
        pass

    received = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "raw_path": b"/v1/embeddings",
        "query_string": b"",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
    }
    async with gateway(service) as app, asyncio.timeout(120):
        await app(scope, receive, send)
        await service.cancelled.wait()


def test_a_real_model_embeds(demo):
    with openai.OpenAI(base_url=demo.openai, api_key="none", max_retries=0, timeout=120) as client:
        one = client.embeddings.create(model="demo", input=["a cat on a mat", "a dog on a log"])
        cut = client.embeddings.create(model="demo", input="a cat on a mat", dimensions=8)
    vectors = [each.embedding for each in one.data]
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1, 1], rel=1e-5)
    assert vectors[0] != vectors[1]
    scale = math.hypot(*vectors[0][:8])
    assert cut.data[0].embedding == pytest.approx([value / scale for value in vectors[0][:8]], rel=1e-4, abs=1e-6)
    assert one.usage.prompt_tokens == one.usage.total_tokens > 2
