"""Settings that change while the service runs: each is told, each is bounded, all or none, and no request is lost."""

import asyncio
import itertools
import re
import socket
from datetime import timedelta
from typing import Any

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.models.errors import ModelError
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.policy import Policy
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.prepare import prepare
from penstock.service.config.addresses import ListenError
from penstock.service.config.command_line import parse_config

ANY_PORT = "127.0.0.1:0"


@pytest.fixture
async def service(start_service):
    """With limits of its own, below what its worker can do."""
    config = SchedulerConfig(max_num_seqs=32, max_queued_requests=200, tenants={"acme": TenantLimits(weight=2)})
    return await start_service(scheduler=config, admin_listen=ANY_PORT)


async def settings_of(service):
    return (await service.admin.GetSettings(pb.GetSettingsRequest())).settings


async def update(service, forget_tenants=(), mask=None, **changes):
    """Changes settings, and returns all. ``mask``: the paths of the update mask."""
    request = pb.UpdateSettingsRequest(settings=pb.Settings(**changes), forget_tenants=forget_tenants)
    if mask is not None:
        request.update_mask.paths.extend(mask)
    return (await service.admin.UpdateSettings(request)).settings


def without_etag(settings):
    """All settings but the name of them together."""
    assert re.fullmatch("[0-9a-f]{32}", settings.etag)
    settings.ClearField("etag")
    return settings


def itl(milliseconds):
    return timedelta(milliseconds=milliseconds)


async def refusal(service, details_of, **changes):
    """The field that an update is refused for, and the message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await update(service, **changes)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details_of(error.value)["BadRequest"].field_violations
    return violation.field.removeprefix("settings."), violation.description.removeprefix("settings.")


def tenant(name="", **settings):
    return pb.TenantSettings(tenant=name, **settings)


class TestTheStart:
    """What `penstock serve` makes of its flags."""

    def test_flags_reach_the_scheduler(self, tmp_path):
        tenants = tmp_path / "tenants.yaml"
        tenants.write_text("default: {max-tokens: 9}\nacme: {weight: 2}\n")
        flags = ["--port=0", "--scheduling-policy=deadline", "--target-itl=20", "--explain-requests=5"]
        scheduler = prepare(parse_config([*flags, f"--tenants-file={tenants}"])).server.scheduler
        assert (scheduler.policy, scheduler.target_itl_s, scheduler.explain_requests) == (Policy.DEADLINE, 0.02, 5)
        assert scheduler.default_tenant == TenantLimits(max_tokens=9)
        assert scheduler.tenants == {"acme": TenantLimits(weight=2)}

    def test_flags_reach_the_worker(self):
        worker = prepare(parse_config(["--port=0", "--quantization=int4", "--kv-cache-dtype=int8"])).worker
        assert (worker.quantization, worker.kv_cache_dtype) == ("int4", "int8")

    def test_a_quantisation_that_the_checkpoint_has_not_is_refused_before_anything_is_loaded(self):
        with pytest.raises(ModelError, match="--quantization awq: the checkpoint is not quantised: leave the flag out"):
            prepare(parse_config(["--port=0", "--quantization=awq"]))

    def test_a_quantised_checkpoint_cannot_be_made_up(self):
        flags = ["--port=0", "--quantization=gptq", "--load-format=dummy"]
        with pytest.raises(ModelError, match=r"--quantization gptq: with --load-format dummy .* int8 or int4"):
            prepare(parse_config(flags))

    def test_what_is_made_up_can_be_quantised_at_load(self):
        worker = prepare(parse_config(["--port=0", "--quantization=fp8", "--load-format=dummy"])).worker
        assert (worker.quantization, worker.load_format) == ("fp8", "dummy")

    def test_defaults_are_the_schedulers_own(self):
        server = prepare(parse_config(["--port=0"])).server
        # Which sequences have drafts depends on the worker's drafter, which the service chooses.
        assert server.scheduler == SchedulerConfig(drafts_on_repetition=True)
        assert server.admin_listen == ANY_PORT

    def test_a_port_of_the_administration_that_is_taken_is_named_before_anything_is_loaded(self, monkeypatch):
        monkeypatch.setattr("penstock.service.app.prepare.resolve_model", None)  # it must not come to that
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ListenError) as error:
                prepare(parse_config(["--port=0", f"--admin-listen={address}"]))
        assert str(error.value) == (
            f"--admin-listen {address}: the port is in use; stop what uses it or choose another"
        )

    def test_the_administration_may_be_off(self):
        assert prepare(parse_config(["--port=0", "--admin-listen=off"])).server.admin_listen is None


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
        assert without_etag(await settings_of(service)) == pb.Settings(
            policy=pb.SCHEDULING_POLICY_FCFS,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            max_queued_requests=9,
            max_queued_tokens=99,
            target_itl=itl(20.5),
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
            ({"policy": pb.SCHEDULING_POLICY_FAIR}, {"policy": pb.SCHEDULING_POLICY_FAIR}),
            ({"max_num_seqs": 1}, {"max_num_seqs": 1}),
            ({"max_num_seqs": 256}, {"max_num_seqs": 256}),
            ({"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 32}),
            ({"max_queued_requests": 1 << 20}, {"max_queued_requests": 1 << 20}),
            ({"max_queued_tokens": 1 << 32}, {"max_queued_tokens": 1 << 32}),
            ({"target_itl": itl(12.5)}, {"target_itl": itl(12.5)}),
            ({"target_itl": itl(60_000)}, {"target_itl": itl(60_000)}),
            ({"target_itl": itl(0)}, {"target_itl": itl(0)}),
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
        settings.MergeFrom(pb.Settings(**expected))
        etag = settings.etag
        changed = await update(service, **changes)
        assert changed == await settings_of(service)
        assert (changed.etag != etag) == any(changes.values())
        assert without_etag(changed) == without_etag(settings)

    async def test_clients_see_the_new_limits(self, service):
        await update(service, max_num_seqs=7, max_queued_requests=8, policy=pb.SCHEDULING_POLICY_PRIORITY)
        model = (await service.model.GetModel(pb.GetModelRequest())).model
        assert (model.limits.max_num_seqs, model.limits.max_queued_requests) == (7, 8)
        assert "priority" in model.features
        assert model.name == "bytes"

    @pytest.mark.parametrize(
        ("changes", "field", "remedy"),
        [
            (
                {"max_num_seqs": 257},
                "max_num_seqs",
                "is 257; the worker was started with 256, and may not have more",
            ),
            ({"max_num_batched_tokens": 2049}, "max_num_batched_tokens", "the worker was started with 2048"),
            (
                {"max_num_batched_tokens": 31},
                "max_num_batched_tokens",
                "at least max_num_seqs, 32, .* 31; raise it, or lower max_num_seqs too$",
            ),
            (
                {"max_num_batched_tokens": 39, "max_num_seqs": 40},
                "max_num_batched_tokens",
                "at least max_num_seqs, 40, .* 39; raise it, or lower max_num_seqs$",
            ),
            (
                {"max_num_batched_tokens": 31, "max_num_seqs": 257},
                "max_num_seqs",
                "started with 256.*: lower it, or start the service again with a larger --max-num-seqs$",
            ),
            ({"max_num_seqs": 0}, "max_num_seqs", "must be at least 1"),
            ({"policy": 9}, "policy", "must be one of the enum's values"),
            ({"target_itl": itl(60_001)}, "target_itl", "must be at least 0 s and at most 60 s; it is 60.001 s"),
            ({"mask": ["policy", "etag"]}, "update_mask.paths[1]", "must be one of policy, .*, or \\*; it is 'etag'$"),
            ({"mask": ["max_num_seqs"] * 17}, "update_mask.paths", "at most 16 paths"),
            ({"mask": ["*"], "max_num_seqs": 257}, "max_num_seqs", "the worker was started with 256"),
            ({"default_tenant": tenant("acme")}, "default_tenant.tenant", "must be empty"),
            ({"default_tenant": tenant(weight=0)}, "default_tenant.weight", "must be at least 0.001"),
            ({"tenants": [tenant("a"), tenant(weight=2)]}, "tenants[1].tenant", "is required"),
            ({"tenants": [tenant("a"), tenant("a")]}, "tenants[1].tenant", "name it once"),
            (
                {"tenants": [tenant("a")], "forget_tenants": ["a"]},
                "tenants[0].tenant",
                "also in forget_tenants; name it",
            ),
            ({"tenants": [tenant("a/b")]}, "tenants[0].tenant", "must be letters, digits"),
        ],
    )
    async def test_all_or_nothing(self, service, details_of, changes, field, remedy):
        before = await settings_of(service)
        others = {} if "mask" in changes else {"max_queued_requests": 5, "max_queued_tokens": 6}
        named, text = await refusal(service, details_of, **others, **changes)
        assert named == field
        assert re.search(remedy, text), text
        assert await settings_of(service) == before

    @pytest.mark.parametrize(
        ("most_tokens", "remedy"),
        [(128, "lower it, or raise max_num_batched_tokens too"), (64, "lower it")],
    )
    async def test_the_limit_that_was_set_is_blamed(self, start_service, details_of, most_tokens, remedy):
        """Also where the worker has fewer tokens than rows, so that nothing else could be raised."""
        executor = FakeExecutor(vocab_size=258, max_num_seqs=256, max_num_batched_tokens=most_tokens)
        service = await start_service(executor, SchedulerConfig(max_num_batched_tokens=64), admin_listen=ANY_PORT)
        assert (await settings_of(service)).max_num_seqs == 64
        named, text = await refusal(service, details_of, max_num_seqs=65)
        assert named == "max_num_seqs"
        assert text == (
            "max_num_seqs: must be at most max_num_batched_tokens, 64, so that each row gets a token; it is 65; "
            + remedy
        )

    async def test_tenants_are_limited_in_total_and_not_only_per_request(self, service, details_of):
        for first in range(0, 16_384, 1024):  # with the one that there is already
            names = [f"t{number}" for number in range(first, min(first + 1024, 16_383))]
            await update(service, tenants=[tenant(name) for name in names])
        field, text = await refusal(service, details_of, tenants=[tenant("one-more")])
        assert field == "tenants"
        assert "at most 16,384 tenants" in text
        assert len((await settings_of(service)).tenants) == 16_384


NUM_REQUESTS, NUM_TOKENS = 40, 60
CHANGES: dict[str, list[dict[str, Any]]] = {
    "policy": [{"policy": policy} for policy in (4, 2, 3, 1)],
    "rows": [{"max_num_seqs": rows} for rows in (1, 256, 3)],
    "tokens": [{"max_num_seqs": 16, "max_num_batched_tokens": tokens} for tokens in (16, 2048, 40)],
    "queued requests": [{"max_queued_requests": most} for most in (1, 1000)],
    "queued tokens": [{"max_queued_tokens": most} for most in (1, 1000)],
    "target": [{"target_itl": itl(target)} for target in (0.1, 0, 1000)],
    "default tenant": [
        {"default_tenant": cap} for cap in (tenant(max_live_requests=1), tenant(max_tokens=1), tenant())
    ],
    "tenants": [
        {"tenants": [tenant("default", weight=0.001, max_prompt_tokens=1)]},
        {"forget_tenants": ["default"]},
        {"tenants": [tenant("default", weight=1000, max_live_requests=1, max_tokens=1)]},
    ],
}


class TestUnderLoad:
    """Shown by 8: each limit or policy changed live loses no request, and changes no output."""

    @pytest.mark.parametrize("what", CHANGES)
    async def test_no_request_is_lost_and_no_output_changes(self, start_service, new_reading, what):
        executor = FakeExecutor(vocab_size=258, num_blocks=100, next_token=by_length, seconds_per_step=0.0005)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=16), admin_listen=ANY_PORT)
        prompts = [f"{number:03}" * (1 + number % 30) for number in range(NUM_REQUESTS)]
        stream = service.generation.Generate()
        for ref, prompt in enumerate(prompts, 1):
            await stream.write(pb.GenerateRequest(start=start(ref, prompt)))
        reading = await new_reading().read_until(stream, lambda r: all_accepted(r, NUM_REQUESTS))
        await stream.done_writing()
        reader = asyncio.create_task(reading.read(stream))
        num_changes = 0
        for change in itertools.cycle(CHANGES[what]):
            if reader.done():
                break
            await update(service, **change)
            num_changes += 1
            await asyncio.sleep(0.005)
        await reader
        assert num_changes >= len(CHANGES[what])
        for ref, prompt in enumerate(prompts, 1):
            [finished] = reading.outcomes[ref].finished
            assert finished.status.code == 0, finished.status.message
            assert reading.outcomes[ref].text == expected(prompt)
        assert service.engine.stats().requests == 0
        assert service.blocks_in_use == 0

    async def test_nor_while_the_worker_is_replaced(self, start_service, new_reading):
        executor = FakeExecutor(vocab_size=258, next_token=by_length, seconds_per_step=0.0005)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=4), admin_listen=ANY_PORT)
        prompts = [f"{number:03}" for number in range(8)]
        frames = [pb.GenerateRequest(start=start(ref, prompt)) for ref, prompt in enumerate(prompts, 1)]
        stream = service.generation.Generate(iter(frames))
        reading = await new_reading().read_until(stream, lambda r: all_accepted(r, len(prompts)))
        executor.may_start.clear()
        executor.die()
        await until(lambda: service.engine.state is EngineState.RECOVERING)
        await update(service, max_num_seqs=2, policy=pb.SCHEDULING_POLICY_FAIR, max_queued_requests=1)
        executor.may_start.set()
        await reading.read(stream)
        assert [reading.outcomes[ref].text for ref in range(1, 9)] == [expected(prompt) for prompt in prompts]
        assert (await settings_of(service)).max_num_seqs == 2


def by_length(history, sampling):
    """a, b, c ... by the length of the history."""
    return ord("a") + len(history) % 26


def start(ref, prompt):
    return pb.GenerationStart(ref=ref, text=prompt, sampling=pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))


def all_accepted(reading, num_requests):
    return sum(bool(outcome.accepted) for outcome in reading.outcomes.values()) == num_requests


def expected(prompt):
    return "".join(chr(ord("a") + (len(prompt) + number) % 26) for number in range(NUM_TOKENS))


class TestWhatTheyDo:
    """A change is felt by the requests that come after it."""

    async def code_of(self, service, max_tokens=NUM_TOKENS):
        request = pb.CompleteRequest(start=start(1, "hi"))
        request.start.sampling.max_tokens = max_tokens
        return await service.generation.Complete(request).code()

    async def test_a_tenants_cap(self, service):
        await update(service, tenants=[tenant("default", max_tokens=5)])
        assert await self.code_of(service) is not grpc.StatusCode.OK
        assert await self.code_of(service, max_tokens=5) is grpc.StatusCode.OK
        await update(service, forget_tenants=["default"])
        assert await self.code_of(service) is grpc.StatusCode.OK

    async def test_a_queue_that_has_no_room(self, service):
        await update(service, max_queued_tokens=1)
        assert await self.code_of(service) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await update(service, max_queued_tokens=2)
        assert await self.code_of(service) is grpc.StatusCode.OK

    async def test_fewer_rows(self, start_service):
        executor = FakeExecutor(vocab_size=258, next_token=by_length, seconds_per_step=0.001)
        service = await start_service(executor, admin_listen=ANY_PORT)
        calls = [service.generation.Complete(pb.CompleteRequest(start=start(1, "hi"))) for _ in range(8)]
        await until(lambda: service.engine.stats().running == 8)
        await update(service, max_num_seqs=2)
        await until(lambda: service.engine.stats().running <= 2)
        assert service.engine.stats().requests > 2
        assert {await call.code() for call in calls} == {grpc.StatusCode.OK}

    async def test_another_policy_orders_what_waits_already(self, start_service, new_reading):
        executor = FakeExecutor(vocab_size=258, next_token=by_length, seconds_per_step=0.001)
        service = await start_service(executor, SchedulerConfig(max_num_seqs=1), admin_listen=ANY_PORT)
        stream = service.generation.Generate()
        for ref in range(1, 5):
            frame = pb.GenerateRequest(start=start(ref, "hi"))
            frame.start.priority = -ref
            await stream.write(frame)
        await until(lambda: service.engine.stats().waiting == 3)
        await update(service, policy=pb.SCHEDULING_POLICY_PRIORITY)
        await stream.done_writing()
        reading = await new_reading().read(stream)
        ended = [finished.ref for message in reading.messages for finished in message.finished]
        # Whether the first one goes on or makes room is the policy's own affair.
        assert [ref for ref in ended if ref != 1] == [4, 3, 2]
