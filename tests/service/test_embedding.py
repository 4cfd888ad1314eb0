"""EmbeddingService over a real socket: vectors in order, and how requests are refused, end and fail."""

import asyncio
import logging
import math
import time

import grpc
import pytest

from penstock.clients import AsyncClient, Client, InvalidOption, RequestFailed
from penstock.clients.embeddings import build_embed_request
from penstock.models.checkpoint import resolve_model
from penstock.models.pooling_config import Embedding
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.fake_executor import FakeExecutor
from penstock.scheduler.fake_worker import vector_of
from penstock.scheduler.plan import Pooling
from penstock.scheduler.request import RefusalKind, Refused
from penstock.service import embed_inputs
from penstock.service.config import parse_config
from penstock.service.errors import Reason, ServiceError
from penstock.service.flags import ConfigError
from penstock.service.identity import Caller
from penstock.service.serve import prepare
from penstock.v1 import admin_pb2, embedding_pb2 as pb, generation_pb2, model_pb2

HIDDEN_SIZE = 8
NEVER = 60.0


def request(*inputs, **fields):
    """Of texts and lists of ids."""
    built = pb.EmbedRequest(**fields)
    for item in inputs:
        if isinstance(item, str):
            built.inputs.add(text=item)
        else:
            built.inputs.add(token_ids=generation_pb2.TokenIds(ids=item))
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


def refuse(tenant):
    raise Refused(RefusalKind.TENANT_RATE, "too fast", 1000)


async def until(condition):
    give_up = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < give_up, "it did not come to be"
        await asyncio.sleep(0.001)


def is_idle(service):
    stats = service.engine.stats()
    return not (stats.requests or stats.running or stats.waiting or stats.kv_usage)


class TestVectors:
    @pytest.mark.parametrize("pooling", list(Pooling), ids=lambda pooling: pooling.value)
    async def test_come_in_the_order_of_the_inputs(self, start_service, pooling):
        service = await start_service(embedding=Embedding(pooling))
        inputs = ["hello", list(range(100)), "x", "hello", "y" * 300]
        response = await service.embedding.Embed(request(*inputs))
        ids = [list(item.encode()) if isinstance(item, str) else item for item in inputs]
        for vector, values in zip(vectors(response), ids, strict=True):
            assert vector == pytest.approx(scaled(raw(values, pooling)), rel=1e-6)
        assert len(response.request_id) == 26
        assert response.usage == generation_pb2.Usage(prompt_tokens=sum(map(len, ids)))
        assert is_idle(service)

    async def test_as_they_are(self, start_service):
        service = await start_service()
        response = await service.embedding.Embed(request("ab", normalize=False))
        assert vectors(response) == [raw(list(b"ab"), Pooling.LAST)]

    async def test_the_models_files_say_whether_they_are_scaled(self, start_service):
        service = await start_service(embedding=Embedding(Pooling.MEAN, normalize=False))
        plain = raw(list(b"ab"), Pooling.MEAN)
        assert vectors(await service.embedding.Embed(request("ab"))) == [plain]
        [vector] = vectors(await service.embedding.Embed(request("ab", normalize=True)))
        assert vector == pytest.approx(scaled(plain), rel=1e-6)

    async def test_the_first_values_alone_have_length_1_again(self, start_service):
        service = await start_service()
        plain = raw(list(b"ab"), Pooling.LAST)[:3]
        [vector] = vectors(await service.embedding.Embed(request("ab", dimensions=3)))
        assert vector == pytest.approx(scaled(plain), rel=1e-6)
        assert math.hypot(*vector) == pytest.approx(1.0, rel=1e-6)
        assert vectors(await service.embedding.Embed(request("ab", dimensions=3, normalize=False))) == [plain]

    async def test_of_nothing_but_zeros_stay_what_they_are(self, start_service, monkeypatch):
        monkeypatch.setattr("penstock.scheduler.fake_worker.vector_of", lambda ids, size: bytes(4 * size))
        service = await start_service()
        assert vectors(await service.embedding.Embed(request("ab"))) == [[0.0] * HIDDEN_SIZE]

    async def test_the_last_tokens_read_the_prefix_cache_of_generation(self, start_service):
        """And the other way round; the other poolings want every hidden state."""
        text = "a prompt of more than two blocks, to be sure"
        for pooling, cached in ((Pooling.LAST, 32), (Pooling.MEAN, 0), (Pooling.CLS, 0)):
            service = await start_service(embedding=Embedding(pooling))
            start = generation_pb2.Start(text=text, sampling=generation_pb2.Sampling(max_tokens=1))
            await service.generation.Complete(generation_pb2.CompleteRequest(start=start))
            response = await service.embedding.Embed(request(text, text + "!"))
            assert response.usage.cached_tokens == 2 * cached
            assert vectors(response)[0] == pytest.approx(scaled(raw(list(text.encode()), pooling)), rel=1e-6)
            answer = await service.generation.Complete(generation_pb2.CompleteRequest(start=start))
            assert answer.finished.usage.cached_tokens == 32

    async def test_2048_inputs_share_steps_with_each_other_and_with_generation(self, start_service):
        service = await start_service(paced(), SchedulerConfig(max_num_seqs=64))
        sampling = generation_pb2.Sampling(max_tokens=80, ignore_eos=True)
        complete = generation_pb2.CompleteRequest(start=generation_pb2.Start(text="hi", sampling=sampling))
        generating = [asyncio.ensure_future(service.generation.Complete(complete)) for _ in range(4)]
        inputs = [[index % 256] * (1 + index % 20) for index in range(2048)]
        response = await service.embedding.Embed(request(*inputs, normalize=False))
        assert vectors(response) == [raw(values, Pooling.LAST) for values in inputs]
        answers = await asyncio.gather(*generating)
        assert {answer.finished.usage.output_tokens for answer in answers} == {80}
        assert service.engine.stats().steps < 120
        assert is_idle(service)

    async def test_survive_the_worker(self, start_service):
        """What is computed stays computed; the rest begins again."""
        executor = paced(0.005)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=8), embedding=Embedding(Pooling.MEAN))
        inputs = [[index] * 40 for index in range(100)]
        call = asyncio.ensure_future(service.embedding.Embed(request(*inputs, normalize=False)))
        for _ in range(2):
            steps = service.engine.stats().steps
            await until(lambda steps=steps: service.engine.stats().steps > steps + 3)
            executor.die()
            await until(lambda: service.engine.stats().restarts)
        assert vectors(await call) == [raw(values, Pooling.MEAN) for values in inputs]

    async def test_the_model_tells_that_there_are_some(self, start_service):
        service = await start_service()
        model = await service.model.GetModel(model_pb2.GetModelRequest())
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
            (request([0] * 4097), "inputs[0].token_ids.ids"),
            (request("x" * 4097), "inputs[0].text"),
            (request("x" * (4 << 20), "y"), "inputs[0].text"),
            (request("x", dimensions=9), "dimensions"),
            (request("x", dimensions=0), "dimensions"),
            (request("x", priority=1001), "priority"),
            (request("x", tenant="no tenant"), "tenant"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    async def test_what_is_out_of_bounds_is_named(self, start_service, details_of, bad, field):
        service = await start_service()
        error = await failure(service.embedding.Embed(bad))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(error)
        assert details["BadRequest"].field_violations[0].field == field
        assert details["ErrorInfo"].reason == "INVALID_FIELD"
        assert service.engine.stats().steps == 0

    async def test_all_inputs_together(self, start_service, details_of, monkeypatch):
        service = await start_service()
        monkeypatch.setattr(embed_inputs, "MAX_VALUES", 79)
        monkeypatch.setattr(embed_inputs, "MAX_TOKENS", 20)
        for bad in (request(*["x"] * 10), request("y" * 10, "z" * 11)):
            error = await failure(service.embedding.Embed(bad))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(error)["ErrorInfo"].reason == "TOO_EXPENSIVE"
            assert "several requests" in error.details()
        assert len((await service.embedding.Embed(request(*["x"] * 10, dimensions=7))).embeddings) == 10
        assert len((await service.embedding.Embed(request("y" * 10, "z" * 10))).embeddings) == 2

    async def test_4_mib_of_text(self, start_service):
        service = await start_service(paced(0, max_model_len=1 << 23))
        error = await failure(service.embedding.Embed(request("x" * (3 << 20), "y" * (1 << 20), "z")))
        assert "together" in error.details()

    async def test_the_whole_context_may_be_an_input(self, start_service):
        service = await start_service()
        response = await service.embedding.Embed(request("x" * 4096, [7] * 4096, normalize=False))
        assert vectors(response) == [raw(values, Pooling.LAST) for values in ([ord("x")] * 4096, [7] * 4096)]

    async def test_the_largest_answer_is_below_4_mib(self, start_service):
        """Which every client takes."""
        service = await start_service(paced(0, hidden_size=439))
        response = await service.embedding.Embed(request(*[[index % 256] for index in range(2048)]))
        assert 3_500_000 < response.ByteSize() < 4 << 20
        assert math.hypot(*response.embeddings[77].values) == pytest.approx(1.0, rel=1e-5)


class Keys:
    """Two callers, by what they send."""

    def authenticate(self, metadata):
        key = dict(metadata).get("authorization")
        if key not in ("acme", "gateway"):
            raise ServiceError(Reason.UNAUTHENTICATED)
        return Caller(key, may_act_for_others=key == "gateway")


class TestCallers:
    async def test_have_keys(self, start_service):
        service = await start_service(authenticator=Keys())
        error = await failure(service.embedding.Embed(request("x")))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len((await service.embedding.Embed(request("x"), metadata=(("authorization", "acme"),))).embeddings) == 1

    async def test_a_malformed_body_with_a_bad_key_is_unauthenticated(self, start_service):
        service = await start_service(authenticator=Keys())
        call = service.channel.unary_unary("/penstock.v1.EmbeddingService/Embed")
        error = await failure(call(b"\xff\xff\xff", metadata=(("authorization", "no key"),)))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        error = await failure(call(b"\xff\xff\xff", metadata=(("authorization", "acme"),)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_gateway_names_the_tenant(self, start_service):
        service = await start_service(paced(), authenticator=Keys())
        metadata = (("authorization", "gateway"),)
        call = service.embedding.Embed(request(*[[i] * 100 for i in range(256)], tenant="others"), metadata=metadata)
        await until(lambda: service.engine.busiest_tenants(2))
        assert [use.name for use in service.engine.busiest_tenants(2)] == ["others"]
        await call
        error = await failure(service.embedding.Embed(request("x", tenant="b"), metadata=(("authorization", "acme"),)))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED

    async def test_one_request_is_one_whatever_its_inputs(self, start_service, details_of):
        limits = TenantLimits(max_live_requests=1, max_prompt_tokens=50)
        service = await start_service(
            paced(0.01), SchedulerConfig(max_num_seqs=4, max_queued_requests=1, default_tenant=limits)
        )
        call = asyncio.ensure_future(service.embedding.Embed(request(*[[i] * 50 for i in range(100)])))
        await until(lambda: service.engine.stats().requests)
        error = await failure(service.embedding.Embed(request("x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error)["ErrorInfo"].reason == "TENANT_BUSY"
        assert len((await call).embeddings) == 100
        with pytest.MonkeyPatch.context() as patch:  # nothing is tokenized for a tenant that has used up its rate
            patch.setattr(service.engine, "check_rates", refuse)
            error = await failure(service.embedding.Embed(request("x")))
            assert details_of(error)["ErrorInfo"].reason == "TENANT_RATE"
        error = await failure(service.embedding.Embed(request("x", "y" * 51)))
        assert details_of(error)["ErrorInfo"].reason == "TENANT_CAP"
        assert is_idle(service)


class TestEnds:
    async def test_a_deadline(self, start_service, details_of):
        service = await start_service(paced(0.05), SchedulerConfig(max_num_seqs=1))
        error = await failure(service.embedding.Embed(request(*["x"] * 50), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: is_idle(service))

    async def test_a_deadline_while_inputs_are_tokenized(self, start_service, byte_tokenizer, monkeypatch):
        service = await start_service()
        seen: list[object] = []

        def encode(self, text):
            time.sleep(0.3)
            return [1]

        monkeypatch.setattr(service.engine, "submit", seen.append)
        monkeypatch.setattr(type(byte_tokenizer), "encode", encode)
        error = await failure(service.embedding.Embed(request("x"), timeout=0.1))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(0.4)
        assert not seen

    async def test_a_cancelled_call_frees_its_blocks_within_two_steps(self, start_service):
        service = await start_service(paced(0.01))
        call = service.embedding.Embed(request(*[[i % 256] * 1000 for i in range(500)]))
        await until(lambda: service.engine.stats().running > 1)
        call.cancel()
        await until(lambda: not service.engine.stats().requests)
        steps = service.engine.stats().steps
        await until(lambda: is_idle(service))
        await asyncio.sleep(0.05)
        assert service.engine.stats().steps <= steps + 2

    async def test_the_service_goes_down(self, start_service, details_of):
        service = await start_service(paced(0.05), SchedulerConfig(max_num_seqs=1))
        call = asyncio.ensure_future(service.embedding.Embed(request(*["x"] * 1000)))
        await until(lambda: service.engine.stats().running)
        await service.server.stop(grace_s=0.01)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(error)["ErrorInfo"].reason == "SHUTDOWN"

    async def test_it_is_given_its_time_to_finish(self, start_service):
        service = await start_service(paced(0.01), SchedulerConfig(max_num_seqs=1))
        call = asyncio.ensure_future(service.embedding.Embed(request(*["x"] * 10)))
        await until(lambda: service.engine.stats().running)
        await service.server.stop(grace_s=NEVER)
        assert len((await call).embeddings) == 10

    async def test_a_request_that_kills_workers_is_refused(self, start_service, details_of):
        executor = FakeExecutor(vocab_size=258, kills=lambda row: row.history[0] == 13)
        service = await start_service(executor)
        good = asyncio.ensure_future(service.embedding.Embed(request(*[[i] * 30 for i in range(14, 40)])))
        error = await failure(service.embedding.Embed(request([13], [14])))
        assert details_of(error)["ErrorInfo"].reason == "KILLED_WORKER"
        assert len((await good).embeddings) == 26


async def test_it_can_be_explained(start_service):
    service = await start_service(paced(0.001), SchedulerConfig(max_num_seqs=1), admin_listen="127.0.0.1:0")
    response = await service.embedding.Embed(request("x" * 40, "y" * 50, client_request_id="mine"))
    told = await service.admin.Explain(admin_pb2.ExplainRequest(request_id=response.request_id))
    assert told.client_request_id == "mine"
    assert told.prompt_tokens == 90
    kinds = [admin_pb2.TimelineKind.Name(entry.kind).removeprefix("TIMELINE_KIND_") for entry in told.timeline]
    assert [kind for kind in kinds if kind != "WAITED"] == ["ACCEPTED", *["BEGAN", "PREFILLED"] * 2, "ENDED"]
    assert [entry.choice for entry in told.timeline if entry.kind == admin_pb2.TIMELINE_KIND_BEGAN] == [0, 1]


async def test_the_log_has_counts_and_no_text(start_service, caplog):
    service = await start_service()
    with caplog.at_level(logging.DEBUG):
        response = await service.embedding.Embed(request("canary", client_request_id="mine"))
        await failure(service.embedding.Embed(request("canary", dimensions=99)))
    assert "canary" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    [line] = [line for line in lines if response.request_id in line]
    assert "(tenant default, client id 'mine'): STOP, OK after" in line
    assert "prompt 6, cached 0, output 0" in line
    assert any("INVALID_FIELD at dimensions" in line for line in lines)


class TestClients:
    async def test_asynchronous(self, start_service):
        service = await start_service()
        async with AsyncClient(service.target) as client:
            answer = await client.embed(["ab", [1, 2, 3]], normalize=False, dimensions=2, timeout=30.0)
            assert answer.vectors == [raw(list(b"ab"), Pooling.LAST)[:2], raw([1, 2, 3], Pooling.LAST)[:2]]
            assert answer.usage.prompt_tokens == 5
            assert len(answer.request_id) == 26
            assert (await client.embed("ab")).vectors == [pytest.approx(scaled(raw(list(b"ab"), Pooling.LAST)))]
            with pytest.raises(RequestFailed, match="dimensions: at most 8") as failed:
                await client.embed("ab", dimensions=9)
            assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT

    async def test_synchronous(self, start_service):
        service = await start_service()
        with Client(service.target) as client:
            answer = await asyncio.to_thread(client.embed, ["ab", "c"], normalize=False)
        assert answer.vectors == [raw(list(b"ab"), Pooling.LAST), raw(list(b"c"), Pooling.LAST)]

    @pytest.mark.parametrize(
        ("inputs", "options", "field"),
        [
            (7, {}, "inputs"),
            (b"x", {}, "inputs"),
            ({"text": "x"}, {}, "inputs"),
            (["x", 7], {}, "inputs[1]"),
            (["x", [1, -1]], {}, "inputs[1]"),
            (["x", [True]], {}, "inputs[1]"),
            (["x", ["y"]], {}, "inputs[1]"),
            (["\ud800"], {}, "inputs[0]"),
            (["x" * (6 << 20)], {}, "inputs"),
            ("x", {"dimensions": "many"}, "dimensions"),
            ("x", {"normalise": True}, "normalise"),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, inputs, options, field):
        with pytest.raises(InvalidOption) as error:
            build_embed_request(inputs, options)
        assert error.value.field == field


class TestServe:
    @pytest.fixture
    def model(self, tmp_path):
        """The demo model, with files that say how it is to be embedded."""
        for file in resolve_model("demo").iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "some.place.Pooling"}]')
        return tmp_path

    def test_the_models_files_and_the_flag(self, model):
        def embedding(*flags):
            return prepare(parse_config([str(model), "--port=0", "--admin-listen=off", *flags])).server.embedding

        assert embedding() == Embedding(Pooling.MEAN, normalize=False)
        assert embedding("--pooling", "cls") == Embedding(Pooling.CLS, normalize=False)

    def test_the_flag_knows_three(self):
        with pytest.raises(ConfigError, match=r"--pooling: .*last.*mean.*cls"):
            parse_config(["--pooling", "max"])
