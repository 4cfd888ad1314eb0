"""Settings that change while the service runs: each is told, each is bounded, all or none, and no request is lost."""

import asyncio
import itertools

import grpc
import pytest

from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.fake_executor import FakeExecutor
from penstock.v1 import admin_pb2, generation_pb2 as pb, model_pb2

ANY_PORT = "127.0.0.1:0"


@pytest.fixture
async def service(start_service):
    """With limits of its own, below what its worker can do."""
    config = SchedulerConfig(max_num_seqs=32, max_queued_requests=200, tenants={"acme": TenantLimits(weight=2)})
    return await start_service(scheduler=config, admin_listen=ANY_PORT)


async def settings_of(service):
    return (await service.admin.GetSettings(admin_pb2.GetSettingsRequest())).settings


async def update(service, **changes):
    return (await service.admin.UpdateSettings(admin_pb2.UpdateSettingsRequest(**changes))).settings


async def refusal(service, details_of, **changes):
    """The field that an update is refused for, and the message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await update(service, **changes)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details_of(error.value)["BadRequest"].field_violations
    return violation.field, violation.description


def tenant(name="", **settings):
    return admin_pb2.TenantSettings(tenant=name, **settings)


class TestTelling:
    """GetSettings."""

    async def test_what_the_service_was_started_with(self, start_service):
        config = SchedulerConfig(
            max_num_seqs=32,
            max_num_batched_tokens=512,
            max_queued_requests=9,
            max_queued_tokens=99,
            target_itl_s=0.0205,
            default_tenant=TenantLimits(max_tokens=5),
            tenants={"b": TenantLimits(2.5, max_live_requests=3), "a": TenantLimits(max_prompt_tokens=7)},
        )
        service = await start_service(scheduler=config, admin_listen=ANY_PORT)
        assert await settings_of(service) == admin_pb2.Settings(
            policy=admin_pb2.SCHEDULING_POLICY_FCFS,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            max_queued_requests=9,
            max_queued_tokens=99,
            target_itl_ms=20.5,
            default_tenant=tenant(weight=1, max_tokens=5),
            tenants=[tenant("a", weight=1, max_prompt_tokens=7), tenant("b", weight=2.5, max_live_requests=3)],
        )

    async def test_limits_are_those_that_hold_on_this_worker(self, start_service):
        """Not those that were asked for, so that what is told may be sent back."""
        config = SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=100)
        service = await start_service(FakeExecutor(vocab_size=258, max_num_seqs=64), config, admin_listen=ANY_PORT)
        told = await settings_of(service)
        assert (told.max_num_seqs, told.max_num_batched_tokens) == (64, 100)
        assert await update(service, max_num_seqs=64, max_num_batched_tokens=100) == told


class TestChanging:
    """UpdateSettings."""

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"policy": admin_pb2.SCHEDULING_POLICY_FAIR}, {"policy": admin_pb2.SCHEDULING_POLICY_FAIR}),
            ({"max_num_seqs": 1}, {"max_num_seqs": 1}),
            ({"max_num_seqs": 256}, {"max_num_seqs": 256}),
            ({"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 32}),
            ({"max_queued_requests": 1 << 20}, {"max_queued_requests": 1 << 20}),
            ({"max_queued_tokens": 1 << 32}, {"max_queued_tokens": 1 << 32}),
            ({"target_itl_ms": 12.5}, {"target_itl_ms": 12.5}),
            ({"target_itl_ms": 60_000}, {"target_itl_ms": 60_000}),
            ({"target_itl_ms": 0}, {"target_itl_ms": 0}),
            ({"default_tenant": tenant(max_tokens=3)}, {"default_tenant": tenant(weight=1, max_tokens=3)}),
            ({"tenants": [tenant("acme", max_tokens=3)]}, {"tenants": [tenant("acme", weight=1, max_tokens=3)]}),
            ({"tenants": [tenant("b")]}, {"tenants": [tenant("acme", weight=2), tenant("b", weight=1)]}),
            ({"forget_tenants": ["acme", "nobody"]}, {"tenants": []}),
            ({}, {}),
        ],
    )
    async def test_what_is_given_holds_and_the_rest_stays(self, service, changes, expected):
        settings = await settings_of(service)
        for name in expected:
            settings.ClearField(name)
        settings.MergeFrom(admin_pb2.Settings(**expected))
        assert await update(service, **changes) == settings == await settings_of(service)

    async def test_clients_are_told_the_new_limits(self, service):
        await update(service, max_num_seqs=7, max_queued_requests=8, policy=admin_pb2.SCHEDULING_POLICY_PRIORITY)
        model = await service.model.GetModel(model_pb2.GetModelRequest())
        assert (model.limits.max_num_seqs, model.limits.max_queued_requests) == (7, 8)
        assert "priority" in model.features
        assert model.name == "bytes"

    @pytest.mark.parametrize(
        ("changes", "field", "remedy"),
        [
            ({"max_num_seqs": 257}, "max_num_seqs", "at most 256, which the worker was started with; to have more, restart"),
            ({"max_num_batched_tokens": 2049}, "max_num_batched_tokens", "restart with --max-num-batched-tokens"),
            ({"max_num_batched_tokens": 31}, "max_num_batched_tokens", "at least max_num_seqs, 32, .* lower max_num_seqs"),
            ({"max_num_seqs": 0}, "max_num_seqs", "must be at least 1"),
            ({"policy": 9}, "policy", "must be one of the enum's values"),
            ({"target_itl_ms": 60_001}, "target_itl_ms", "must be at least 0 and at most 60,000"),
            ({"target_itl_ms": 5e-324}, "target_itl_ms", "must be above 0"),
            ({"default_tenant": tenant("acme")}, "default_tenant.tenant", "must be empty"),
            ({"default_tenant": tenant(weight=0)}, "default_tenant.weight", "must be at least 0.001"),
            ({"tenants": [tenant("a"), tenant(weight=2)]}, "tenants[1].tenant", "is required"),
            ({"tenants": [tenant("a"), tenant("a")]}, "tenants[1].tenant", "name it once"),
            ({"tenants": [tenant("a")], "forget_tenants": ["a"]}, "tenants[0].tenant", "name it once"),
            ({"tenants": [tenant("a/b")]}, "tenants[0].tenant", "must be letters, digits"),
        ],
    )
    async def test_all_or_nothing(self, service, details_of, changes, field, remedy):
        before = await settings_of(service)
        others = {"max_queued_requests": 5, "max_queued_tokens": 6}
        named, text = await refusal(service, details_of, **others, **changes)
        assert named == field
        pytest.fail(text) if not __import__("re").search(remedy, text) else None
        assert await settings_of(service) == before

    async def test_tenants_are_bounded_in_all_and_not_in_each_request_alone(self, service, details_of):
        for batch in itertools.batched(range(16_383), 1024) if hasattr(itertools, "batched") else _batches(16_383, 1024):
            await update(service, tenants=[tenant(f"t{number}") for number in batch])
        field, text = await refusal(service, details_of, tenants=[tenant("one-more")])
        assert field == "tenants"
        assert "at most 16,384 tenants" in text
        assert len((await settings_of(service)).tenants) == 16_384


class TestWhatTheyDo:
    """A change is felt by the requests that come after it."""

    async def test_a_shorter_queue_refuses(self, start_service):
        service = await start_service(SLOW(), SchedulerConfig(max_num_seqs=1), admin_listen=ANY_PORT)
        running = [complete(service, 200) for _ in range(3)]
        while service.engine.stats().requests < 3:
            await asyncio.sleep(0.005)
        await update(service, max_queued_requests=1)
        assert (await asyncio.gather(complete(service, 1), return_exceptions=True))[0].code() is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        assert [len(answer.choices[0].token_ids) for answer in await asyncio.gather(*running)] == [200] * 3
