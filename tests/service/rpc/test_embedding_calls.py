"""Calls of EmbeddingService: who may make them, what a tenant may have, and how they end."""

import asyncio
import time

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.clients.embeddings import embed_at_once
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import Principal
from penstock.service.errors import Reason, ServiceError
from penstock.service.rpc import pooled_calls

NEVER = 60.0


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


def paced(seconds_per_step=0.002, **options):
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def rest(call):
    """The messages that have not been read."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


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
        error = await failure(embed(service, request("x")))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len((await embed(service, request("x"), metadata=(("authorization", "acme"),))).embeddings) == 1

    async def test_a_malformed_body_with_a_bad_key_is_unauthenticated(self, start_service):
        service = await start_service(authenticator=Keys())
        call = service.channel.unary_stream("/penstock.v1.EmbeddingService/Embed")
        error = await failure(call(b"\xff\xff\xff", metadata=(("authorization", "no key"),)).read())
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        error = await failure(call(b"\xff\xff\xff", metadata=(("authorization", "acme"),)).read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_gateway_names_the_tenant(self, start_service):
        service = await start_service(paced(), authenticator=Keys())
        metadata = (("authorization", "gateway"),)
        inputs = request(*[[i] * 100 for i in range(256)], tenant="others")
        call = asyncio.ensure_future(embed(service, inputs, metadata=metadata))
        await until(lambda: service.engine.busiest_tenants(2))
        assert [use.name for use in service.engine.busiest_tenants(2)] == ["others"]
        await call
        error = await failure(embed(service, request("x", tenant="b"), metadata=(("authorization", "acme"),)))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED

    async def test_one_request_is_one_whatever_its_inputs(self, start_service, details_of):
        limits = TenantLimits(max_live_requests=1, max_prompt_tokens=50)
        service = await start_service(
            paced(0.01), SchedulerConfig(max_num_seqs=4, max_queued_requests=1, default_tenant=limits)
        )
        call = asyncio.ensure_future(embed(service, request(*[[i] * 50 for i in range(100)])))
        await until(lambda: service.engine.stats().requests)
        error = await failure(embed(service, request("x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error)["ErrorInfo"].reason == "TENANT_BUSY"
        assert len((await call).embeddings) == 100
        error = await failure(embed(service, request("x", "y" * 51)))
        assert details_of(error)["ErrorInfo"].reason == "TENANT_CAP"
        assert is_idle(service)

    async def test_nothing_is_tokenized_for_a_tenant_that_has_used_up_its_rate(
        self, start_service, details_of, byte_tokenizer, monkeypatch
    ):
        scheduler = SchedulerConfig(default_tenant=TenantLimits(requests_per_second=0.001))
        service = await start_service(scheduler=scheduler)
        await embed(service, request("x"))
        monkeypatch.setattr(type(byte_tokenizer), "encode", lambda self, text: pytest.fail("it was tokenized"))
        error = await failure(embed(service, request("x")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details["ErrorInfo"].reason == "TENANT_RATE"
        assert details["RetryInfo"].retry_delay.ToSeconds() > 900


async def test_a_call_keeps_only_the_requested_dimensions_of_its_vectors(start_service):
    """2,048 whole ones of a large model are 64 MiB, and many calls may wait for their last."""
    service = await start_service(paced(0.005, hidden_size=512), SchedulerConfig(max_num_seqs=4))
    inputs = request(*[[index] * 5 for index in range(100)], dimensions=3)
    call = asyncio.ensure_future(embed(service, inputs))
    [live] = await until(lambda: service.server._running.pooled_calls._live)
    await until(lambda: len(live._vectors) > 10)
    assert {len(vector) for vector in live._vectors.values()} == {3 * 4}
    assert {len(embedding.values) for embedding in (await call).embeddings} == {3}


class TestSlowReaders:
    """Their vectors wait in memory, of which all calls together have so much."""

    async def test_the_largest_call_of_the_tenant_with_the_most_ends(self, start_service, monkeypatch):
        """And no other: 3 MiB of one tenant wait to be read, and then 19 MiB of another."""
        monkeypatch.setattr(pooled_calls, "MAX_KEPT_BYTES", 12 << 20)
        service = await start_service(paced(0, hidden_size=1 << 13), authenticator=Keys())
        calls = service.server._running.pooled_calls
        small = service.embedding.Embed(request(*[[1]] * 100), metadata=(("authorization", "gateway"),))
        first = await small.read()
        [kept] = calls._live
        large = service.embedding.Embed(request(*[[1]] * 600), metadata=(("authorization", "acme"),))
        # It may have ended before the test checks whether it has begun.
        await until(lambda: service.engine.stats().finished == 2 and calls._live == {kept})
        assert calls._kept_bytes == kept.kept_bytes <= 3 << 20
        error = await failure(rest(large))
        # The status cannot overtake a message that is not read.
        assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
        later = await rest(small)
        assert len(first.embeddings) + sum(len(message.embeddings) for message in later) == 100
        assert is_idle(service)

    async def test_what_is_kept_is_counted_to_the_byte(self, start_service):
        service = await start_service(paced(0, hidden_size=1 << 13))
        calls = service.server._running.pooled_calls
        for _ in range(3):
            await embed(service, request(*[[1]] * 100))
        call = service.embedding.Embed(request(*[[1]] * 100))
        await call.read()
        call.cancel()
        await until(lambda: not calls._live)
        assert calls._kept_bytes == 0


class TestEnds:
    async def test_a_deadline(self, start_service, details_of):
        service = await start_service(paced(0.05), SchedulerConfig(max_num_seqs=1))
        error = await failure(embed(service, request(*["x"] * 50), timeout=0.2))
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
        error = await failure(embed(service, request("x"), timeout=0.1))
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
        call = asyncio.ensure_future(embed(service, request(*["x"] * 1000)))
        await until(lambda: service.engine.stats().running)
        await service.server.stop(grace_s=0.01)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(error)["ErrorInfo"].reason == "SHUTDOWN"

    async def test_it_is_given_its_time_to_finish(self, start_service):
        service = await start_service(paced(0.01), SchedulerConfig(max_num_seqs=1))
        call = asyncio.ensure_future(embed(service, request(*["x"] * 10)))
        await until(lambda: service.engine.stats().running)
        await service.server.stop(grace_s=NEVER)
        assert len((await call).embeddings) == 10

    async def test_a_request_that_kills_workers_is_refused(self, start_service, details_of):
        executor = FakeExecutor(vocab_size=258, kills=lambda row: row.history[0] == 13)
        service = await start_service(executor)
        good = asyncio.ensure_future(embed(service, request(*[[i] * 30 for i in range(14, 40)])))
        # It is taken, before there is no worker to take it.
        while not (service.engine.stats().requests or good.done()):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        error = await failure(embed(service, request([13], [14])))
        assert details_of(error)["ErrorInfo"].reason == "KILLED_WORKER"
        assert len((await good).embeddings) == 26

    async def test_a_failure_after_some_vectors_is_the_status(self, start_service, details_of):
        executor = paced(0.01, hidden_size=1 << 15, kills=lambda row: row.history[0] == 13)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=1))
        call = service.embedding.Embed(request(*[[1]] * 20, [13], [1]))
        assert len((await call.read()).embeddings) == 7
        error = await failure(rest(call))
        assert details_of(error)["ErrorInfo"].reason == "KILLED_WORKER"
        await until(lambda: is_idle(service))
