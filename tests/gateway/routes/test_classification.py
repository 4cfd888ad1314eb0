"""POST /v1/classify, /v1/score and /v1/rerank: over a stub that gives known values, and over the service with a fake
model."""

import asyncio
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

import penstock.v1 as pb
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.schemas.classification import ClassifyAnswer, RerankAnswer, ScoreAnswer
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.settings import GatewaySettings
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.models.checkpoint.info import HeadActivation
from penstock.v1 import Usage, classification_pb2_grpc, model_pb2_grpc

SCORES = [0.25, 0.75, -1.5, 0.75, 0.5]
VALUES = [0.125, 0.625, 0.25]


class Classifier(classification_pb2_grpc.ClassificationServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """Gives the same scores, whatever the texts are."""

    def __init__(self):
        self.target = ""
        self.requests = []

    async def ListModels(self, request, context):
        raise NotImplementedError

    async def GetModel(self, request, context):
        return pb.GetModelResponse(model=pb.Model(name="reranker", max_model_len=64))

    async def Classify(self, request, context):
        self.requests.append(request)
        found = [pb.Classification(values=VALUES[index:] + VALUES[:index]) for index in range(len(request.inputs))]
        return pb.ClassifyResponse(
            request_id="R1", classifications=found, labels=["bad", "fine", "good"], usage=Usage(prompt_tokens=7)
        )

    async def Score(self, request, context):
        self.requests.append(request)
        return pb.ScoreResponse(
            request_id="R1", scores=SCORES[: len(request.documents)], usage=Usage(prompt_tokens=9, cached_tokens=3)
        )


@pytest.fixture
async def service():
    classifier, server = Classifier(), grpc.aio.server()
    classification_pb2_grpc.add_ClassificationServiceServicer_to_server(classifier, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(classifier, server)
    classifier.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield classifier
    await server.stop(None)


@pytest.fixture
async def http(service):
    app = create_app(GatewaySettings(service=ConnectionOptions(service.target), tenant_header="x-tenant"))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield http


DOCUMENTS = ["a", {"text": "b", "title": "ignored"}, "c", "d", "e"]


class TestRerank:
    @pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
    async def test_documents_come_by_relevance(self, http, service, path):
        answer = (await http.post(path, json={"model": "reranker", "query": "q", "documents": DOCUMENTS})).json()
        RerankAnswer.model_validate(answer)
        assert [(each["index"], each["relevance_score"], each["document"]) for each in answer["results"]] == [
            (1, 0.75, {"text": "b"}),
            (3, 0.75, {"text": "d"}),
            (4, 0.5, {"text": "e"}),
            (0, 0.25, {"text": "a"}),
            (2, -1.5, {"text": "c"}),
        ]
        assert (answer["id"], answer["model"]) == ("rerank-R1", "reranker")
        assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
        [request] = service.requests
        assert (list(request.queries), list(request.documents)) == (["q"], ["a", "b", "c", "d", "e"])
        assert not request.HasField("use_activation")
        assert not request.HasField("instruction")

    @pytest.mark.parametrize(("top_n", "indices"), [(2, [1, 3]), (0, [1, 3, 4, 0, 2]), (99, [1, 3, 4, 0, 2])])
    async def test_only_the_best(self, http, top_n, indices):
        body = {"query": "q", "documents": DOCUMENTS, "top_n": top_n, "return_documents": False}
        results = (await http.post("/v1/rerank", json=body)).json()["results"]
        assert [each["index"] for each in results] == indices
        assert all(each.keys() == {"index", "relevance_score"} for each in results)

    async def test_options_reach_the_service(self, http, service):
        body = {
            "query": "q", "documents": ["a"], "instruction": "find", "activation": False, "priority": -3,
            "truncate_prompt_tokens": 40, "truncation_side": "left", "request_id": "mine", "user": "ignored",
        }  # fmt: skip
        await http.post("/v1/rerank", json=body, headers={"x-tenant": "acme"})
        [request] = service.requests
        assert (request.instruction, request.use_activation, request.priority) == ("find", False, -3)
        assert request.HasField("use_activation")
        assert (request.truncate_prompt_tokens, request.truncation_side) == (40, 1)
        assert (request.tenant, request.client_request_id) == ("acme", "mine")

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"documents": []}, "documents"),
            ({"documents": ["a"] * 2049}, "documents"),
            ({"documents": ["a", 7]}, "documents[1]"),
            ({"documents": ["a", {"title": "b"}]}, "documents[1].text"),
            ({"documents": "a"}, "documents"),
            ({"query": ["q"]}, "query"),
            ({"query": ...}, "query"),
            ({"top_n": -1}, "top_n"),
            ({"max_tokens_per_doc": 3}, "max_tokens_per_doc"),
            ({"truncation_side": "middle"}, "truncation_side"),
            ({"use_activation": "yes"}, "use_activation"),
        ],
        ids=str,
    )
    async def test_what_is_wrong_is_named_and_not_sent(self, http, service, changes, param):
        body = {"query": "q", "documents": ["a"]} | changes
        answer = await http.post("/v1/rerank", json={name: value for name, value in body.items() if value is not ...})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert service.requests == []


class TestScore:
    @pytest.mark.parametrize(
        ("body", "queries", "documents"),
        [
            ({"text_1": "q", "text_2": "a"}, ["q"], ["a"]),
            ({"text_1": "q", "text_2": ["a", "b"]}, ["q"], ["a", "b"]),
            ({"text_1": ["q", "r"], "text_2": ["a", "b"]}, ["q", "r"], ["a", "b"]),
            ({"queries": "q", "documents": ["a", "b"]}, ["q"], ["a", "b"]),
        ],
        ids=str,
    )
    async def test_every_form_of_pairs(self, http, service, body, queries, documents):
        answer = (await http.post("/score", json=body)).json()
        ScoreAnswer.model_validate(answer)
        assert answer["data"] == [
            {"index": index, "object": "score", "score": SCORES[index]} for index in range(len(documents))
        ]
        assert (answer["id"], answer["object"]) == ("score-R1", "list")
        [request] = service.requests
        assert (list(request.queries), list(request.documents)) == (queries, documents)

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"text_2": "a"}, "text_1"),
            ({"text_1": "q"}, "text_2"),
            ({"text_1": "q", "queries": "q", "text_2": "a"}, "text_1"),
            ({"text_1": "q", "text_2": []}, "text_2"),
            ({"text_1": "q", "text_2": ["a"] * 2049}, "text_2"),
            ({"text_1": 7, "text_2": "a"}, "text_1"),
        ],
        ids=str,
    )
    async def test_what_is_wrong_is_named_and_not_sent(self, http, service, body, param):
        answer = await http.post("/v1/score", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert service.requests == []


class TestClassify:
    async def test_labels_and_values(self, http, service):
        answer = (await http.post("/classify", json={"input": ["x", "y"], "use_activation": True})).json()
        ClassifyAnswer.model_validate(answer)
        assert answer["data"] == [
            {"index": 0, "label": "fine", "probs": [0.125, 0.625, 0.25], "num_classes": 3},
            {"index": 1, "label": "bad", "probs": [0.625, 0.25, 0.125], "num_classes": 3},
        ]
        assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        assert service.requests[0].use_activation

    @pytest.mark.parametrize("given", ["x", [1, 2], ["x", "y"], [[1], [2, 3]]], ids=str)
    async def test_every_form_of_input(self, http, service, given):
        assert (await http.post("/v1/classify", json={"input": given})).status_code == 200
        num_inputs = len(given) if isinstance(given[0], list) or given == ["x", "y"] else 1
        assert len(service.requests[0].inputs) == num_inputs

    async def test_another_model_is_not_found(self, http):
        assert (await http.post("/v1/classify", json={"input": "x", "model": "other"})).status_code == 404


HEAD = ClassificationHead(np.zeros((1, 8), np.float32), np.ones(1, np.float32), ("yes",), HeadActivation.SIGMOID)
PAIRS = ClassificationHead(np.zeros((2, 8), np.float32), np.ones(2, np.float32), ("a", "b"), HeadActivation.SOFTMAX)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a", "x" * 5000]}, "documents[1]"),
        ("/v1/rerank", {"query": "q" * 5000, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "instruction": "find"}, "instruction"),
        ("/v1/score", {"text_1": "q", "text_2": "x" * 5000}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": ["a", "x" * 5000]}, "text_2[1]"),
        ("/v1/score", {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"queries": ["q", "r"], "documents": ["a", ""]}, "documents[1]"),
        ("/v1/classify", {"input": ["a", "x" * 5000]}, "input[1]"),
        ("/v1/classify", {"input": [1, 300]}, "input[1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_the_service_refuses_is_named_as_the_caller_sent_it(start_gateway, path, body, param):
    answer = await (await start_gateway(service={"head": HEAD})).post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")


async def test_models_without_what_is_asked_of_them_say_so(start_gateway):
    plain, pairs = await asyncio.gather(start_gateway(), start_gateway(service={"head": PAIRS, "generates": False}))
    refused: list[tuple[Any, str, dict[str, Any], str]] = [
        (plain, "/v1/rerank", {"query": "q", "documents": ["a"]}, "no_classifier"),
        (plain, "/v1/score", {"text_1": "q", "text_2": "a"}, "no_classifier"),
        (plain, "/v1/classify", {"input": "q"}, "no_classifier"),
        (pairs, "/v1/rerank", {"query": "q", "documents": ["a"]}, "several_labels"),
        (pairs, "/v1/completions", {"prompt": "q"}, "no_generation"),
        (pairs, "/v1/chat/completions", {"messages": [{"role": "user", "content": "q"}]}, "no_generation"),
    ]
    for gateway, path, body, code in refused:
        answer = await gateway.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    answer = (await pairs.post("/v1/classify", input="q")).json()
    assert answer["data"][0]["probs"] == [0.5, 0.5]
