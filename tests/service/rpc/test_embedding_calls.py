"""Calls of EmbeddingService: who may make them, what a tenant may have, and how they end."""

import asyncio
import time

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import Principal
from penstock.service.errors import Reason, ServiceError

NEVER = 60.0


def request(*inputs, **fields):
    """Of texts and lists of ids."""
    built = pb.EmbedRequest(**fields)
    for item in inputs:
        if isinstance(item, str):
            built.inputs.add(text=item)
        else:
            built.inputs.add(token_ids=pb.TokenIds(ids=item))
    return built


def paced(seconds_per_step=0.002, **options):
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def is_idle(service):
    stats = service.engine.stats()
    return not (stats.requests or stats.running or stats.waiting or stats.kv_usage)


class Keys:
    """Two callers, by what they send."""

    def authenticate(self, metadata):
        key = dict(metadata).get("authorization")
        if key not in ("acme", "gateway"):
            raise ServiceError(Reason.UNAUTHENTICATED)
        return Principal(key, may_act_for_others=key == "gateway")


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
        error = await failure(service.embedding.Embed(request("x", "y" * 51)))
        assert details_of(error)["ErrorInfo"].reason == "TENANT_CAP"
        assert is_idle(service)

    async def test_nothing_is_tokenized_for_a_tenant_that_has_used_up_its_rate(
        self, start_service, details_of, byte_tokenizer, monkeypatch
    ):
        scheduler = SchedulerConfig(default_tenant=TenantLimits(requests_per_second=0.001))
        service = await start_service(scheduler=scheduler)
        await service.embedding.Embed(request("x"))
        monkeypatch.setattr(type(byte_tokenizer), "encode", lambda self, text: pytest.fail("it was tokenized"))
        error = await failure(service.embedding.Embed(request("x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details["ErrorInfo"].reason == "TENANT_RATE"
        assert details["RetryInfo"].retry_delay.ToSeconds() > 900


async def test_a_call_keeps_only_the_requested_dimensions_of_its_vectors(start_service):
    """2,048 whole ones of a large model are 64 MiB, and many calls may wait for their last."""
    service = await start_service(paced(0.005, hidden_size=512), SchedulerConfig(max_num_seqs=4))
    inputs = request(*[[index] * 5 for index in range(100)], dimensions=3)
    call = asyncio.ensure_future(service.embedding.Embed(inputs))
    [live] = await until(lambda: service.server._running.pooled_calls._live)
    await until(lambda: len(live._vectors) > 10)
    assert {len(vector) for vector in live._vectors.values()} == {3 * 4}
    assert {len(embedding.values) for embedding in (await call).embeddings} == {3}


class TestEnds:
    async def test_a_deadline(self, start_service, details_of):
        service = await start_service(paced(0.05), SchedulerConfig(max_num_seqs=1))
        error = await failure(service.embedding.Embed(request(*["x"] * 50), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: is_idle(service))

    async def test_a_deadline_while_inputs_are_tokenized(self, start_service, byte_tokenizer, monkeypatch):
        service = await start_service()
        seen: list[object] = []

        def encode(self, text, *arguments):
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
        # It is taken, before there is no worker to take it.
        while not (service.engine.stats().requests or good.done()):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        error = await failure(service.embedding.Embed(request([13], [14])))
        assert details_of(error)["ErrorInfo"].reason == "KILLED_WORKER"
        assert len((await good).embeddings) == 26
