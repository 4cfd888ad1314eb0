"""ClassificationService over a real socket: the order of results, bounds, and which models offer which calls."""

import asyncio
import json
import math
import threading

import grpc
import numpy as np
import pytest
from letters import paced
from waiting import until

import penstock.v1 as pb
from penstock.models.checkpoint import classification_head
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.models.checkpoint.info import HeadActivation
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.plan import Pooling
from penstock.scheduler.testing.fake_worker import vector_of
from penstock.service.auth.identity import Principal
from penstock.service.requests.pooled import inputs as pooled, score
from penstock.service.rpc import pooled_calls
from penstock.service.text.tokenizer import Tokenizer

HIDDEN_SIZE = 8
QWENS_TEMPLATE = (
    "<|turn|>{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Judge') }}"
    "{% for m in messages if m.role != 'system' %}<|end|>{{ m.role == 'query' and 'Q' or 'D' }}:{{ m.content }}"
    "{% endfor %}<|end|>"
    "{% if messages | selectattr('role', 'in', ['query', 'document']) | list %}!{% endif %}"
)
"""As rerankers have it: a role for each text, and one for the instruction."""


def head(*labels, activation=None, pad=None):
    """Logits of a few thousandths, whatever the fake model's vectors are."""
    numbers = np.linspace(-1, 1, len(labels) * HIDDEN_SIZE) / 4096
    weight = numbers.astype(np.float32).reshape(len(labels), HIDDEN_SIZE)
    if activation is None:
        activation = HeadActivation.SIGMOID if len(labels) == 1 else HeadActivation.SOFTMAX
    return ClassificationHead(weight, np.arange(len(labels), dtype=np.float32), labels, activation, pad)


RERANKER, CLASSIFIER = head("relevant"), head("bad", "fine", "good")


def logits(model, ids):
    return (model.weight @ np.frombuffer(vector_of(ids[-1:], HIDDEN_SIZE), np.float32) + model.bias).tolist()


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def texts(*inputs, **fields):
    given = [
        pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
        for each in inputs
    ]
    return pb.ClassifyRequest(inputs=given, **fields)


def pairs(queries, documents, **fields):
    return pb.ScoreRequest(queries=queries, documents=documents, **fields)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


@pytest.fixture
def template_tokenizer(tmp_path, byte_tokenizer_path):
    """Its ids are bytes, and its template has the roles of pairs."""
    (tmp_path / "tokenizer.json").write_bytes((byte_tokenizer_path / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|end|>", "chat_template": QWENS_TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(tmp_path)


@pytest.fixture
def prompts_of(monkeypatch):
    """The prompts that a service's engine gets."""

    def watch(service):
        seen, submit = [], service.engine.submit

        def submit_and_note(request):
            seen.extend([request.prompt_token_ids, *(each.token_ids for each in request.more_prompts)])
            submit(request)

        monkeypatch.setattr(service.engine, "submit", submit_and_note)
        return seen

    return watch


class TestClassify:
    async def test_classes_come_in_the_order_of_the_inputs(self, start_service):
        service = await start_service(head=CLASSIFIER)
        inputs = ["hello", list(range(100)), "x", "y" * 300]
        ids = [list(each.encode()) if isinstance(each, str) else each for each in inputs]
        response = await service.classification.Classify(texts(*inputs))
        assert response.labels == ["bad", "fine", "good"]
        assert response.usage == pb.Usage(prompt_tokens=sum(map(len, ids)))
        assert len(response.request_id) == 26
        plain = await service.classification.Classify(texts(*inputs, use_activation=False))
        for each, bare, tokens in zip(response.classifications, plain.classifications, ids, strict=True):
            expected = logits(CLASSIFIER, tokens)
            assert list(bare.values) == pytest.approx(expected, rel=1e-5)
            total = sum(map(math.exp, expected))
            assert list(each.values) == pytest.approx([math.exp(value) / total for value in expected], rel=1e-5)

    async def test_the_last_token_counts_whatever_embeddings_are(self, start_service):
        service = await start_service(head=CLASSIFIER, embedding=PoolingConfig(Pooling.MEAN))
        response = await service.classification.Classify(texts("abc", use_activation=False))
        assert list(response.classifications[0].values) == pytest.approx(logits(CLASSIFIER, list(b"abc")), rel=1e-5)
        assert (await service.embedding.Embed(pb.EmbedRequest(inputs=texts("abc").inputs)).read()).embeddings

    async def test_padding_at_the_end_does_not_count(self, start_service):
        service = await start_service(head=head("a", "b", pad=7))
        response = await service.classification.Classify(texts([1, 2, 7, 7], [1, 2], [7, 7]))
        one, other, _ = response.classifications
        assert one == other
        assert response.usage.prompt_tokens == 5

    async def test_inputs_are_truncated(self, start_service, prompts_of):
        service = await start_service(head=CLASSIFIER)
        seen = prompts_of(service)
        await service.classification.Classify(texts("abcdef", truncate_prompt_tokens=2))
        side = pb.TRUNCATION_SIDE_LEFT
        await service.classification.Classify(texts("abcdef", truncate_prompt_tokens=2, truncation_side=side))
        assert [bytes(prompt) for prompt in seen] == [b"ab", b"ef"]

    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (texts(), "inputs"),
            (texts("x", ""), "inputs[1].text"),
            (texts("x", [0, 258]), "inputs[1].token_ids.ids[1]"),
            (pb.ClassifyRequest(inputs=[pb.EmbedInput()]), "inputs[0].input"),
            (texts("x" * 4097), "inputs[0].text"),
            (texts(*["x"] * 2049), "inputs"),
        ],
        ids=["none", "empty", "foreign id", "unset", "long", "many"],
    )
    async def test_what_is_out_of_bounds_is_named(self, start_service, details_of, bad, field):
        service = await start_service(head=CLASSIFIER)
        error = await failure(service.classification.Classify(bad))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error)["BadRequest"].field_violations[0].field == field
        assert service.engine.stats().steps == 0

    async def test_all_inputs_together(self, start_service, details_of, monkeypatch):
        service = await start_service(head=CLASSIFIER)
        monkeypatch.setattr(pooled, "MAX_VALUES", 8)
        error = await failure(service.classification.Classify(texts("a", "b", "c")))
        assert details_of(error)["ErrorInfo"].reason == "TOO_EXPENSIVE"
        assert "inputs x labels must be at most 8; it is 9" in error.details()
        assert len((await service.classification.Classify(texts("a", "b"))).classifications) == 2

    async def test_a_call_keeps_only_logits(self, start_service):
        """2,048 hidden states of a large model are 64 MiB."""
        service = await start_service(paced(0.005), SchedulerConfig(max_num_seqs=4), head=CLASSIFIER)
        call = asyncio.ensure_future(service.classification.Classify(texts(*[[index] * 5 for index in range(100)])))
        [live] = await until(lambda: service.server._running.pooled_calls._live)
        await until(lambda: len(live._vectors) > 10)
        assert {len(kept) for kept in live._vectors.values()} == {3 * 4}
        assert len((await call).classifications) == 100

    async def test_a_large_head_multiplies_in_a_thread(self, start_service, monkeypatch):
        service = await start_service(head=CLASSIFIER)
        monkeypatch.setattr(classification_head, "_MAX_PRODUCTS", 0)
        monkeypatch.setattr(pooled_calls, "_MAX_VALUES_ON_LOOP", 0)
        threads, multiply = [], ClassificationHead.logits

        def multiply_and_note(self, hidden):
            threads.append(threading.get_ident())
            return multiply(self, hidden)

        monkeypatch.setattr(ClassificationHead, "logits", multiply_and_note)
        response = await service.classification.Classify(texts("abc", use_activation=False))
        assert list(response.classifications[0].values) == pytest.approx(logits(CLASSIFIER, list(b"abc")), rel=1e-5)
        assert threads
        assert threading.get_ident() not in threads


class TestScore:
    async def test_one_query_with_each_document(self, start_service, prompts_of):
        service = await start_service(head=RERANKER)
        seen = prompts_of(service)
        response = await service.classification.Score(pairs(["who"], ["me", "you", "x" * 50]))
        assert [bytes(prompt) for prompt in seen] == [b"whome", b"whoyou", b"who" + b"x" * 50]
        expected = [sigmoid(logits(RERANKER, prompt)[0]) for prompt in seen]
        assert list(response.scores) == pytest.approx(expected, rel=1e-5)
        assert response.usage.prompt_tokens == sum(map(len, seen))

    async def test_each_query_with_its_document(self, start_service, prompts_of):
        service = await start_service(head=RERANKER)
        seen = prompts_of(service)
        response = await service.classification.Score(pairs(["a", "b"], ["c", "d"], use_activation=False))
        assert [bytes(prompt) for prompt in seen] == [b"ac", b"bd"]
        assert list(response.scores) == pytest.approx([logits(RERANKER, prompt)[0] for prompt in seen], rel=1e-5)

    async def test_a_query_is_computed_once_for_later_requests(self, start_service):
        service = await start_service(head=RERANKER)
        query = "a query of more than two blocks of tokens, to be sure"
        first = await service.classification.Score(pairs([query], ["a"]))
        second = await service.classification.Score(pairs([query], ["b", "c"]))
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == 2 * 48

    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (pairs([], ["x"]), "queries"),
            (pairs(["x"], []), "documents"),
            (pairs(["x", "y"], ["a", "b", "c"]), "queries"),
            (pairs(["x"], ["a", ""]), "documents[1]"),
            (pairs(["x"], ["a"] * 2049), "documents"),
            (pairs(["x"], ["a", "b" * 4096]), "documents[1]"),
            (pairs(["x" * 4097], ["a"]), "queries[0]"),
            (pairs(["x"], ["a"], instruction="find"), "instruction"),
            (pairs(["x"], ["a"], truncate_prompt_tokens=0), "truncate_prompt_tokens"),
            (pairs(["x"], ["a"], priority=5000), "priority"),
        ],
        ids=[
            "no query",
            "no document",
            "numbers",
            "empty",
            "many",
            "long",
            "long query",
            "instruction",
            "0",
            "priority",
        ],
    )
    async def test_what_is_out_of_bounds_is_named(self, start_service, details_of, bad, field):
        service = await start_service(head=RERANKER)
        error = await failure(service.classification.Score(bad))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error)["BadRequest"].field_violations[0].field == field
        assert error.details().startswith(f"{field}: ")
        assert service.engine.stats().steps == 0

    async def test_all_pairs_together(self, start_service, details_of, monkeypatch):
        service = await start_service(head=RERANKER)
        monkeypatch.setattr(score, "MAX_PAIR_BYTES", 20)
        error = await failure(service.classification.Score(pairs(["12345"], ["a", "b", "c", "def"])))
        assert details_of(error)["ErrorInfo"].reason == "TOO_EXPENSIVE"
        assert details_of(error)["BadRequest"].field_violations[0].field == "documents"
        assert len((await service.classification.Score(pairs(["12345"], ["a", "b", "c"]))).scores) == 3

    async def test_tokens_of_all_pairs_together(self, start_service, details_of, monkeypatch):
        service = await start_service(head=RERANKER)
        monkeypatch.setattr(pooled, "MAX_TOKENS", 20)
        error = await failure(service.classification.Score(pairs(["12345"], ["abcdef"] * 2)))
        assert error.details().startswith("documents: the total number of tokens must be at most 20")


class TestTemplates:
    @pytest.fixture
    async def service(self, start_service, template_tokenizer):
        return await start_service(paced(0), tokenizer=template_tokenizer, head=RERANKER)

    @staticmethod
    def shown(prompts):
        named = {256: "<|end|>", 257: "<|turn|>"}
        return ["".join(named.get(each) or chr(each) for each in prompt) for prompt in prompts]

    async def test_a_pair_is_rendered(self, service, prompts_of):
        seen = prompts_of(service)
        await service.classification.Score(pairs(["q"], ["a", "b"]))
        await service.classification.Score(pairs(["q"], ["a"], instruction="Find"))
        assert self.shown(seen) == [
            "<|turn|>Judge<|end|>Q:q<|end|>D:a<|end|>!",
            "<|turn|>Judge<|end|>Q:q<|end|>D:b<|end|>!",
            "<|turn|>Find<|end|>Q:q<|end|>D:a<|end|>!",
        ]

    async def test_special_tokens_in_texts_are_text(self, service, prompts_of):
        seen = prompts_of(service)
        await service.classification.Score(pairs(["<|end|>"], ["<|turn|>"], instruction="<|end|>"))
        assert seen[0].count(256) == 3
        assert seen[0].count(257) == 1

    async def test_only_the_document_is_cut(self, service, prompts_of):
        seen = prompts_of(service)
        document, side = "the document", pb.TRUNCATION_SIDE_LEFT
        for fields in ({}, {"truncation_side": side}):
            await service.classification.Score(pairs(["query"], [document], truncate_prompt_tokens=24, **fields))
        assert [len(prompt) for prompt in seen] == [24, 24]
        assert self.shown(seen) == [
            "<|turn|>Judge<|end|>Q:query<|end|>D:the d<|end|>!",
            "<|turn|>Judge<|end|>Q:query<|end|>D:ument<|end|>!",
        ]

    async def test_a_query_that_leaves_no_room(self, service, details_of):
        error = await failure(service.classification.Score(pairs(["query"], ["a"], truncate_prompt_tokens=10)))
        assert details_of(error)["BadRequest"].field_violations[0].field == "documents[0]"
        assert "truncate_prompt_tokens is 10, and the pair has" in error.details()

    async def test_errors_name_the_document(self, service, details_of):
        error = await failure(service.classification.Score(pairs(["q"], ["a", "x" * 4090])))
        details = details_of(error)
        assert details["ErrorInfo"].reason == "CONTEXT_LENGTH"
        assert details["BadRequest"].field_violations[0].field == "documents[1]"


class TestModels:
    async def test_one_without_a_head(self, start_service, details_of):
        service = await start_service()
        for call in (service.classification.Classify(texts("x")), service.classification.Score(pairs(["x"], ["y"]))):
            error = await failure(call)
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert details_of(error)["ErrorInfo"].reason == "NO_CLASSIFIER"
            assert "ForSequenceClassification" in error.details()
        model = (await service.model.GetModel(pb.GetModelRequest())).model
        assert not model.labels
        assert {"generation", "embeddings"} <= {*model.features}
        assert not {"classification", "scoring"} & {*model.features}

    async def test_one_with_several_labels_does_not_score(self, start_service, details_of):
        service = await start_service(head=CLASSIFIER, generates=False)
        error = await failure(service.classification.Score(pairs(["x"], ["y"])))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details_of(error)["ErrorInfo"].reason == "SEVERAL_LABELS"
        assert "has 3 labels" in error.details()
        model = (await service.model.GetModel(pb.GetModelRequest())).model
        assert model.labels == ["bad", "fine", "good"]
        assert "classification" in model.features
        assert not {"chat", "generation", "scoring"} & {*model.features}

    async def test_one_without_an_output_head_generates_nothing(self, start_service, details_of):
        service = await start_service(head=RERANKER, generates=False)
        start = pb.GenerationStart(text="hi")
        error = await failure(service.generation.Complete(pb.CompleteRequest(start=start)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details_of(error)["ErrorInfo"].reason == "NO_GENERATION"
        assert "scoring" in (await service.model.GetModel(pb.GetModelRequest())).model.features

    async def test_a_head_of_tokens_leaves_generation_as_it_is(self, start_service):
        service = await start_service(head=RERANKER)
        start = pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=2))
        assert (await service.generation.Complete(pb.CompleteRequest(start=start))).finished.usage
        assert len((await service.classification.Score(pairs(["x"], ["y"]))).scores) == 1


class Keys:
    """A key is its tenant's name."""

    def authenticate(self, metadata):
        return Principal(dict(metadata)["authorization"])


class TestLimits:
    async def test_a_request_is_one_whatever_its_documents(self, start_service, details_of):
        limits = TenantLimits(max_live_requests=1, max_prompt_tokens=50)
        scheduler = SchedulerConfig(max_num_seqs=4, max_queued_requests=1, default_tenant=limits)
        service = await start_service(paced(0.04), scheduler, head=RERANKER, authenticator=Keys())
        mine = (("authorization", "acme"),)
        call = asyncio.ensure_future(service.classification.Score(pairs(["q" * 20], ["d"] * 100), metadata=mine))
        await until(lambda: service.engine.stats().requests)
        error = await failure(service.classification.Score(pairs(["q"], ["d"]), metadata=mine))
        assert details_of(error)["ErrorInfo"].reason == "TENANT_BUSY"
        assert len((await call).scores) == 100
        error = await failure(service.classification.Score(pairs(["q"], ["d" * 50]), metadata=mine))
        assert details_of(error)["ErrorInfo"].reason == "TENANT_CAP"

    async def test_a_cancelled_call_ends_its_request(self, start_service):
        service = await start_service(paced(0.01), head=RERANKER)
        call = service.classification.Score(pairs(["q"], ["d" * 1000] * 100))
        await until(lambda: service.engine.stats().running > 1)
        call.cancel()
        await until(lambda: not service.engine.stats().requests)
        await until(lambda: not service.blocks_in_use)

    async def test_a_deadline(self, start_service):
        service = await start_service(paced(0.05), SchedulerConfig(max_num_seqs=1), head=RERANKER)
        error = await failure(service.classification.Score(pairs(["q"], ["d"] * 50), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not service.engine.stats().requests)

    async def test_they_are_counted_by_their_operation(self, start_service):
        service = await start_service(head=RERANKER)
        await service.classification.Score(pairs(["q"], ["d"]))
        await service.classification.Classify(texts("x"))
        assert service.server._running._metrics.operations.keys() == {"score", "classification"}
