"""EmbeddingService over a real socket: vectors in order, what is out of bounds, and what is told of a request."""

import asyncio
import logging
import math

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.clients.embeddings import embed_at_once
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import Pooling
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import vector_of
from penstock.service.requests.pooled import inputs as pooled

HIDDEN_SIZE = 8


async def embed(service, message, **options):
    """All messages of a call as one."""
    return await embed_at_once(service.embedding, message, **options)


def request(*inputs, **fields):
    """Of texts and lists of ids."""
    built = pb.EmbedRequest(**fields)
    for item in inputs:
        if isinstance(item, str):
            built.inputs.add(text=item)
        else:
            built.inputs.add(token_ids=pb.TokenIds(ids=item))
    return built


def raw(values, pooling):
    """The vector of a list of ids before it is scaled."""
    return list(memoryview(vector_of([values[at] for at in pooling.positions(len(values))], HIDDEN_SIZE)).cast("f"))


def scaled(values):
    length = math.hypot(*values)
    return [value / length for value in values]


def vectors(response):
    return [list(embedding.values) for embedding in response.embeddings]


def paced(seconds_per_step=0.002, **options):
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def is_idle(service):
    stats = service.engine.stats()
    return not (stats.requests or stats.running or stats.waiting or stats.kv_usage)


class TestVectors:
    @pytest.mark.parametrize("pooling", list(Pooling), ids=lambda pooling: pooling.value)
    async def test_come_in_the_order_of_the_inputs(self, start_service, pooling):
        service = await start_service(embedding=PoolingConfig(pooling))
        inputs = ["hello", list(range(100)), "x", "hello", "y" * 300]
        response = await embed(service, request(*inputs))
        ids = [list(item.encode()) if isinstance(item, str) else item for item in inputs]
        for vector, values in zip(vectors(response), ids, strict=True):
            assert vector == pytest.approx(scaled(raw(values, pooling)), rel=1e-6)
        assert len(response.request_id) == 26
        assert response.usage == pb.Usage(prompt_tokens=sum(map(len, ids)))
        assert is_idle(service)

    async def test_as_they_are(self, start_service):
        service = await start_service()
        response = await embed(service, request("ab", normalize=False))
        assert vectors(response) == [raw(list(b"ab"), Pooling.LAST)]

    async def test_the_models_files_decide_whether_embeddings_are_scaled(self, start_service):
        service = await start_service(embedding=PoolingConfig(Pooling.MEAN, normalize=False))
        plain = raw(list(b"ab"), Pooling.MEAN)
        assert vectors(await embed(service, request("ab"))) == [plain]
        [vector] = vectors(await embed(service, request("ab", normalize=True)))
        assert vector == pytest.approx(scaled(plain), rel=1e-6)

    async def test_truncated_vectors_are_rescaled_to_length_1(self, start_service):
        service = await start_service()
        plain = raw(list(b"ab"), Pooling.LAST)[:3]
        [vector] = vectors(await embed(service, request("ab", dimensions=3)))
        assert vector == pytest.approx(scaled(plain), rel=1e-6)
        assert math.hypot(*vector) == pytest.approx(1.0, rel=1e-6)
        assert vectors(await embed(service, request("ab", dimensions=3, normalize=False))) == [plain]

    async def test_of_nothing_but_zeros_stay_what_they_are(self, start_service, monkeypatch):
        monkeypatch.setattr("penstock.scheduler.testing.fake_worker.vector_of", lambda ids, size: bytes(4 * size))
        service = await start_service()
        assert vectors(await embed(service, request("ab"))) == [[0.0] * HIDDEN_SIZE]

    async def test_the_last_tokens_read_the_prefix_cache_of_generation(self, start_service):
        """And the other way round; the other poolings want every hidden state."""
        text = "a prompt of more than two blocks, to be sure"
        for pooling, cached in ((Pooling.LAST, 32), (Pooling.MEAN, 0), (Pooling.CLS, 0)):
            service = await start_service(embedding=PoolingConfig(pooling))
            start = pb.GenerationStart(text=text, sampling=pb.SamplingParams(max_tokens=1))
            await service.generation.Complete(pb.CompleteRequest(start=start))
            response = await embed(service, request(text, text + "!"))
            assert response.usage.cached_tokens == 2 * cached
            assert vectors(response)[0] == pytest.approx(scaled(raw(list(text.encode()), pooling)), rel=1e-6)
            answer = await service.generation.Complete(pb.CompleteRequest(start=start))
            assert answer.finished.usage.cached_tokens == 32

    async def test_2048_inputs_share_steps_with_each_other_and_with_generation(self, start_service, monkeypatch):
        executor = paced()
        plans, take = [], executor.submit

        def submit_and_note(plan):
            plans.append(plan)
            take(plan)

        monkeypatch.setattr(executor, "submit", submit_and_note)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=64))
        sampling = pb.SamplingParams(max_tokens=600, ignore_eos=True)
        complete = pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=sampling))
        generating = [asyncio.ensure_future(service.generation.Complete(complete)) for _ in range(4)]
        await until(lambda: service.engine.stats().running == 4)
        inputs = [[index % 256] * (1 + index % 20) for index in range(2048)]
        response = await embed(service, request(*inputs, normalize=False))
        assert vectors(response) == [raw(values, Pooling.LAST) for values in inputs]
        answers = await asyncio.gather(*generating)
        assert {answer.finished.usage.output_tokens for answer in answers} == {600}
        num_pooled = [sum(added.pooling is not None for added in plan.added) for plan in plans]
        assert max(num_pooled) >= 32
        assert any(plan.decodes and number for plan, number in zip(plans, num_pooled, strict=True))
        assert is_idle(service)

    async def test_survive_the_worker(self, start_service):
        """What is computed stays computed; the rest begins again."""
        executor = paced(0.005)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=8), embedding=PoolingConfig(Pooling.MEAN))
        inputs = [[index] * 40 for index in range(100)]
        call = asyncio.ensure_future(embed(service, request(*inputs, normalize=False)))
        for _ in range(2):
            steps = service.engine.stats().steps
            await until(lambda steps=steps: service.engine.stats().steps > steps + 3)
            executor.die()
            await until(lambda: service.engine.stats().restarts)
        assert vectors(await call) == [raw(values, Pooling.MEAN) for values in inputs]

    async def test_the_model_description_lists_embeddings(self, start_service):
        service = await start_service()
        model = (await service.model.GetModel(pb.GetModelRequest())).model
        assert "embeddings" in model.features
        assert model.embedding_size == HIDDEN_SIZE


class TestBounds:
    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (request(), "inputs"),
            (pb.EmbedRequest(inputs=[pb.EmbedInput(text="x"), pb.EmbedInput()]), "inputs[1].input"),
            (request("x", ""), "inputs[1].text"),
            (request([]), "inputs[0].token_ids.ids"),
            (request("x", [0, 258]), "inputs[1].token_ids.ids[1]"),
            (request("x", dimensions=9), "dimensions"),
            (request("x", dimensions=0), "dimensions"),
            (request("x", priority=1001), "priority"),
            (request("x", tenant="no tenant"), "tenant"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_what_is_out_of_bounds_is_named(self, start_service, details_of, bad, field):
        service = await start_service()
        error = await failure(embed(service, bad))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(error)
        assert details["BadRequest"].field_violations[0].field == field
        assert details["ErrorInfo"].reason == "INVALID_FIELD"
        assert service.engine.stats().steps == 0

    @pytest.mark.parametrize(
        ("long", "field"),
        [
            (request([0] * 4097), "inputs[0].token_ids.ids"),
            (request("x", [0] * 4097), "inputs[1].token_ids.ids"),
            (request("x" * 4097), "inputs[0].text"),
            (request("x" * (4 << 20), "y"), "inputs[0].text"),
        ],
        ids=["ids", "the second's ids", "text", "text that is not tokenized"],
    )
    async def test_input_too_long_for_the_context_is_refused_as_such(self, start_service, details_of, long, field):
        error = await failure(embed(await start_service(), long))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(error)
        assert details["BadRequest"].field_violations[0].field == field
        assert details["ErrorInfo"].reason == "CONTEXT_LENGTH"

    async def test_all_inputs_together(self, start_service, details_of, monkeypatch):
        service = await start_service()
        monkeypatch.setattr(pooled, "MAX_TOKENS", 20)
        error = await failure(embed(service, request("y" * 10, "z" * 11)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error)["ErrorInfo"].reason == "TOO_EXPENSIVE"
        assert "several requests" in error.details()
        assert len((await embed(service, request("y" * 10, "z" * 10))).embeddings) == 2

    async def test_4_mib_of_text(self, start_service):
        service = await start_service(paced(0, max_model_len=1 << 23))
        error = await failure(embed(service, request("x" * (3 << 20), "y" * (1 << 20), "z")))
        assert "in total" in error.details()

    async def test_the_whole_context_may_be_an_input(self, start_service):
        service = await start_service()
        response = await embed(service, request("x" * 4096, [7] * 4096, normalize=False))
        assert vectors(response) == [raw(values, Pooling.LAST) for values in ([ord("x")] * 4096, [7] * 4096)]


class TestMessages:
    async def test_have_at_most_1_mib_and_continue_each_other(self, start_service):
        """16 MiB of vectors."""
        service = await start_service(paced(0, hidden_size=2048), SchedulerConfig(max_num_seqs=64))
        inputs = [[index % 256] for index in range(2048)]
        call = service.embedding.Embed(request(*inputs, normalize=False))
        messages = [message async for message in call]
        assert all(900_000 < message.ByteSize() <= 1 << 20 for message in messages[:-1])
        sizes = [len(message.embeddings) for message in messages]
        assert [message.first_index for message in messages] == [sum(sizes[:i]) for i in range(len(sizes))]
        assert sum(sizes) == 2048
        first, *others = messages
        assert len(first.request_id) == 26
        assert not any(message.request_id for message in others)
        assert [message.HasField("usage") for message in messages] == [False] * len(others) + [True]
        assert messages[-1].usage == pb.Usage(prompt_tokens=2048)
        found = [list(embedding.values) for message in messages for embedding in message.embeddings]
        assert found == [list(memoryview(vector_of(ids, 2048)).cast("f")) for ids in inputs]

    async def test_of_a_small_request_are_one(self, start_service):
        service = await start_service()
        messages = [message async for message in service.embedding.Embed(request(*["x"] * 100))]
        assert [len(message.embeddings) for message in messages] == [100]
        assert messages[0].request_id
        assert messages[0].HasField("usage")

    async def test_arrive_while_later_vectors_are_computed(self, start_service):
        service = await start_service(paced(0.01, hidden_size=1 << 15), SchedulerConfig(max_num_seqs=1))
        call = service.embedding.Embed(request(*[[1]] * 40))
        assert len((await call.read()).embeddings) == 7
        assert service.engine.stats().requests == 1
        call.cancel()
        await until(lambda: is_idle(service))

    async def test_of_a_vector_of_more_than_1_mib_have_one_each(self, start_service):
        service = await start_service(paced(0, hidden_size=300_000))
        messages = [message async for message in service.embedding.Embed(request([1], [2]))]
        assert [(message.first_index, len(message.embeddings)) for message in messages] == [(0, 1), (1, 1)]


async def test_it_can_be_explained(start_service):
    service = await start_service(paced(0.001), SchedulerConfig(max_num_seqs=1), admin_listen="127.0.0.1:0")
    response = await embed(service, request("x" * 40, "y" * 50, client_request_id="mine"))
    told = await service.admin.Explain(pb.ExplainRequest(request_id=response.request_id))
    assert told.client_request_id == "mine"
    assert told.prompt_tokens == 90
    kinds = [pb.TimelineKind.Name(entry.kind).removeprefix("TIMELINE_KIND_") for entry in told.timeline]
    assert [kind for kind in kinds if kind != "WAITED"] == ["ACCEPTED", *["BEGAN", "PREFILLED"] * 2, "ENDED"]
    assert [entry.choice for entry in told.timeline if entry.kind == pb.TIMELINE_KIND_BEGAN] == [0, 1]


async def test_the_log_has_counts_and_no_text(start_service, caplog):
    service = await start_service()
    with caplog.at_level(logging.DEBUG):
        response = await embed(service, request("canary", client_request_id="mine"))
        await failure(embed(service, request("canary", dimensions=99)))
    assert "canary" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    [line] = [line for line in lines if response.request_id in line]
    assert "(tenant default, client id 'mine'): STOP, OK after" in line
    assert "prompt 6, cached 0, output 0" in line
    assert any("INVALID_FIELD at dimensions" in line for line in lines)
