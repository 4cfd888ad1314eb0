"""ListRequests and CancelRequests over a socket: pages that are stable, tokens that are ours, and requests that end
with their output so far."""

import asyncio
import base64
import random
import time
from datetime import timedelta

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop import live_requests
from penstock.scheduler.loop.live_requests import LiveRequestScan, RequestStatus
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.admin.live_requests import MAX_CANCELS, MESSAGE
from penstock.service.auth.identity import Principal

LOGGER = "penstock.service.admin.operations"


class Keys:
    """A key is its tenant's name; an operator's begins with ``ops``."""

    def authenticate(self, metadata):
        key = dict(metadata).get("authorization", "default")
        return Principal(key, may_administer=key.startswith("ops"))


OPS = (("authorization", "ops"),)


STEPS = pytest.mark.parametrize("service", [0.02], indirect=True)
"""For tests that need output."""


@pytest.fixture
async def service(start_service, request):
    """Its only row is that of the first request, whose first step takes an hour: nothing changes by itself."""
    seconds_per_step = getattr(request, "param", 3600.0)
    executor = FakeExecutor(
        vocab_size=258, seconds_per_step=seconds_per_step, next_token=lambda history, sampling: ord("a")
    )
    scheduler = SchedulerConfig(max_num_seqs=1)
    return await start_service(executor, scheduler, admin_listen="127.0.0.1:0", authenticator=Keys())


@pytest.fixture
def send(service):
    """Opens a stream with requests of a tenant, and waits until they are in the queue."""
    streams = []  # a stream that is no longer referred to is cancelled

    async def send(number, tenant="a", **fields):
        before = service.engine.stats().requests
        sampling = pb.SamplingParams(max_tokens=3000, ignore_eos=True)
        stream = service.generation.Generate(metadata=(("authorization", tenant),))
        streams.append(stream)
        for index in range(number):
            start = pb.GenerationStart(
                ref=index + 1, text="hi", sampling=sampling, client_request_id=f"{tenant}-{index}", **fields
            )
            await stream.write(pb.GenerateRequest(start=start))
        await until(lambda: service.engine.stats().requests == before + number)
        return stream

    return send


def wanted(**fields):
    return pb.RequestFilter(**fields)


async def page(service, **fields):
    return await service.admin.ListRequests(pb.ListRequestsRequest(**fields), metadata=OPS)


async def pages(service, **fields):
    """All pages, one after the other."""
    token = ""
    found: list[pb.ListRequestsResponse] = []
    while not found or token:
        found.append(await page(service, page_token=token, **fields))
        token = found[-1].next_page_token
    return found


def own_ids(answers):
    return [live.client_request_id for answer in answers for live in answer.requests]


async def cancel(service, *ids, **fields):
    target = {"ids": pb.RequestIds(request_ids=ids)} if ids else fields
    return await service.admin.CancelRequests(pb.CancelRequestsRequest(**target), metadata=OPS)


class TestListing:
    """What is listed, and in which pages."""

    async def test_without_requests_the_page_is_empty_and_the_last(self, service):
        assert await page(service) == pb.ListRequestsResponse()

    @STEPS
    async def test_what_is_known_of_a_request(self, service, send):
        await send(1, priority=-2)
        await until(lambda: service.engine.stats().output_tokens > 3)
        [live] = (await page(service)).requests
        assert (live.client_request_id, live.tenant) == ("a-0", "a")
        assert (live.prompt_tokens, live.max_tokens, live.num_choices, live.priority) == (2, 3000, 1, -2)
        assert live.state == pb.REQUEST_STATE_DECODING
        assert live.output_tokens > 3
        assert live.preemptions == 0
        explained = await service.admin.Explain(pb.ExplainRequest(request_id=live.request_id), metadata=OPS)
        assert abs(time.time() - live.age.ToSeconds() - explained.arrive_time.ToSeconds()) < 60

    async def test_inputs_to_embed_are_listed_too(self, start_service):
        executor = FakeExecutor(vocab_size=258, seconds_per_step=3600)
        service = await start_service(executor, admin_listen="127.0.0.1:0", authenticator=Keys())
        inputs = [pb.EmbedInput(text=text) for text in ("a", "bcd")]
        call = service.embedding.Embed(pb.EmbedRequest(inputs=inputs, client_request_id="mine"))
        await until(lambda: service.engine.stats().requests)
        [live] = (await page(service)).requests
        assert (live.client_request_id, live.num_choices, live.max_tokens, live.prompt_tokens) == ("mine", 2, 0, 4)
        call.cancel()

    async def test_pages_have_every_request_once_in_order(self, service, send):
        await send(25)
        expected = [f"a-{index}" for index in range(25)]
        for page_size, sizes in (
            (10, [10, 10, 5]),
            (24, [24, 1]),
            (25, [25]),
            (1000, [25]),
            (2**32 - 1, [25]),
            (0, [25]),
        ):
            answers = await pages(service, page_size=page_size)
            assert [len(answer.requests) for answer in answers] == sizes
            assert own_ids(answers) == expected

    async def test_a_page_has_100_requests_by_default(self, service, send):
        await send(101)
        assert [len(answer.requests) for answer in await pages(service)] == [100, 1]

    async def test_requests_that_come_and_go_between_pages_move_no_other(self, service, send):
        await send(30)
        lasting = {live.request_id for live in (await page(service)).requests}
        rng = random.Random(1)
        seen: list[str] = []
        token, num_sent = "", 0
        while token or not seen:
            answer = await page(service, page_size=4, page_token=token)
            seen += [live.request_id for live in answer.requests]
            token = answer.next_page_token
            ended = rng.choice(sorted(lasting))
            lasting.remove(ended)
            assert (await cancel(service, ended)).cancelled_requests == 1
            if num_sent < 5:
                num_sent += 1
                await send(1, tenant="b")
        assert len(seen) == len(set(seen))
        assert lasting < set(seen)

    async def test_filters(self, service, send):
        await send(4)
        await send(3, tenant="b")
        decoding, waiting = pb.REQUEST_STATE_DECODING, pb.REQUEST_STATE_WAITING

        async def ids(**fields):
            return own_ids(await pages(service, page_size=2, filter=wanted(**fields)))

        assert await ids(tenant="b") == ["b-0", "b-1", "b-2"]
        assert await ids(tenant="nobody") == []
        assert await ids(states=[decoding]) == ["a-0"]
        assert await ids(states=[waiting], tenant="a") == ["a-1", "a-2", "a-3"]
        assert len(await ids(states=[decoding, waiting])) == 7
        assert await ids(min_age=timedelta(hours=1)) == []
        assert await ids(min_age=timedelta(days=3_652_500)) == []
        assert len(await ids(min_age=timedelta(milliseconds=1))) == 7

    async def test_more_than_a_page_may_have_is_the_most_that_it_may(self, service, send, monkeypatch):
        monkeypatch.setattr("penstock.service.admin.live_requests.MAX_PAGE_SIZE", 3)
        await send(4)
        assert [len(each.requests) for each in await pages(service, page_size=1001)] == [3, 1]

    async def test_the_event_loop_runs_while_many_are_listed(self, service, send, monkeypatch):
        """A large page is read in parts."""
        monkeypatch.setattr(live_requests, "MAX_EXAMINED", 16)
        await send(100)
        reads = []
        read = LiveRequestScan.read

        def counted(self, max_requests):
            found = read(self, max_requests)
            reads.append(len(found))
            return found

        monkeypatch.setattr(LiveRequestScan, "read", counted)
        answer = await page(service, page_size=1000)
        assert len(answer.requests) == sum(reads) == 100
        assert max(reads) == 8

    def test_every_state_is_on_the_wire(self):
        names = {name.removeprefix("REQUEST_STATE_") for name in pb.RequestState.keys()}  # noqa: SIM118
        assert names == {status.name for status in RequestStatus} | {"UNSPECIFIED"}


class TestPageTokens:
    """They are opaque, and only ours are accepted."""

    @staticmethod
    async def refusal(service, details_of, **fields):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await page(service, **fields)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        [violation] = details_of(error.value)["BadRequest"].field_violations
        assert violation.field == "page_token"
        return violation.description

    @pytest.fixture
    async def token(self, service, send):
        await send(3)
        return (await page(service, page_size=1)).next_page_token

    async def test_anything_else_is_refused_by_its_field_with_the_remedy(self, service, token, details_of):
        raw = base64.urlsafe_b64decode(token)
        flipped = base64.urlsafe_b64encode(bytes([raw[0] ^ 1]) + raw[1:]).decode()
        cut = base64.urlsafe_b64encode(raw[:8]).decode()
        for bad in ("x", "0", "=", "\u00e9", "x" * 64, token[:-1], token + "\n", f"!{token}", flipped, cut, raw.hex()):
            assert "begin again without it" in await self.refusal(service, details_of, page_token=bad), bad
        assert "1 to 64 bytes" in await self.refusal(service, details_of, page_token="x" * 65)

    async def test_the_filter_must_stay_the_same(self, service, token, details_of):
        assert "same filter" in await self.refusal(service, details_of, page_token=token, filter=wanted(tenant="a"))
        assert own_ids([await page(service, page_token=token)]) == ["a-1", "a-2"]
        assert own_ids([await page(service, page_token=token, page_size=1)]) == ["a-1"]

    async def test_another_process_does_not_know_it(self, service, token, start_service, details_of):
        other = await start_service(admin_listen="127.0.0.1:0", authenticator=Keys())
        assert "from this process" in await self.refusal(other, details_of, page_token=token)


class TestCancelling:
    """Requests that an operator ends."""

    @STEPS
    async def test_by_id_a_caller_keeps_the_output_so_far(self, service, send, new_reading, details_of):
        stream = await send(2)
        reading = await new_reading().read_until(stream, lambda reading: reading.outcomes[1].deltas > 5)
        request_id = reading.outcomes[1].accepted[0].request_id
        answer = await cancel(service, "nobody", request_id, request_id, "nothing")
        assert answer.cancelled_requests == 1
        assert answer.unknown_request_ids == ["nobody", "nothing"]
        await reading.read_until(stream, lambda reading: reading.outcomes[1].finished)
        [finished] = reading.outcomes[1].finished
        assert finished.reason == pb.FINISH_REASON_CANCELLED
        assert finished.status.code == grpc.StatusCode.CANCELLED.value[0]
        assert finished.status.message == MESSAGE
        assert details_of(finished.status)["ErrorInfo"].reason == "CANCELLED"
        assert finished.usage.output_tokens == len(reading.outcomes[1].text) > 5
        assert not reading.outcomes[2].finished
        assert own_ids([await page(service)]) == ["a-1"]
        assert (await cancel(service, request_id)).unknown_request_ids == [request_id]
        stream.cancel()

    async def test_by_filter(self, service, send):
        await send(5)
        await send(4, tenant="b")
        waiting = wanted(tenant="a", states=[pb.REQUEST_STATE_WAITING])
        assert (await cancel(service, filter=waiting)).cancelled_requests == 4
        assert own_ids([await page(service)]) == ["a-0", "b-0", "b-1", "b-2", "b-3"]
        assert (await cancel(service, filter=wanted(tenant="b"))).cancelled_requests == 4
        assert (await cancel(service, filter=wanted(min_age=timedelta(hours=1)))).cancelled_requests == 0
        assert (await cancel(service, all=pb.AllRequests())).cancelled_requests == 1
        assert service.engine.stats().requests == 0

    async def test_an_empty_filter_cancels_nothing(self, service, send, details_of):
        """It may be a filter whose fields the caller's program lost."""
        await send(2)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cancel(service, filter=pb.RequestFilter())
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        [violation] = details_of(error.value)["BadRequest"].field_violations
        assert violation.field == "filter"
        assert "set all in its place" in violation.description
        assert service.engine.stats().requests == 2

    @STEPS
    async def test_waiting_and_running_ones_free_all(self, service, send):
        await send(40)
        await until(lambda: service.engine.stats().output_tokens > 3)
        assert (await cancel(service, all=pb.AllRequests())).cancelled_requests == 40
        await until(lambda: service.blocks_in_use == 0)
        stats = service.engine.stats()
        assert (stats.requests, stats.running, stats.waiting, stats.finished) == (0, 0, 0, 40)

    async def test_a_call_with_one_answer_ends_with_the_status(self, service):
        start = pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=3000, ignore_eos=True))
        call = service.generation.Complete(pb.CompleteRequest(start=start))
        await until(lambda: service.engine.stats().running)
        assert (await cancel(service, all=pb.AllRequests())).cancelled_requests == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert (error.value.code(), error.value.details()) == (grpc.StatusCode.CANCELLED, MESSAGE)

    async def test_requests_that_arrive_meanwhile_are_not_cancelled(self, service, send, monkeypatch):
        await send(20)
        late = None
        read = LiveRequestScan.read

        def reading(self, max_requests):
            nonlocal late
            late = late or asyncio.create_task(send(3, tenant="b"))
            return read(self, max_requests)

        monkeypatch.setattr(LiveRequestScan, "read", reading)
        assert (await cancel(service, all=pb.AllRequests())).cancelled_requests == 20
        assert late is not None
        await until(lambda: service.engine.stats().requests == 3)
        late.cancel()
        assert own_ids([await page(service)]) == ["b-0", "b-1", "b-2"]

    async def test_a_request_without_a_target_is_refused(self, service, details_of):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cancel(service)
        [violation] = details_of(error.value)["BadRequest"].field_violations
        assert (violation.field, violation.description) == ("target", "target: is required; set ids, filter or all")

    async def test_cancellations_are_logged_with_who_did_it_and_how_many(self, service, send, caplog):
        with caplog.at_level("INFO", LOGGER):
            await cancel(service, "nobody")
            await send(3)
            await cancel(service, filter=wanted(tenant="a"))
            await send(1)
            [live] = (await page(service)).requests
            await cancel(service, live.request_id)
        assert [text for text in caplog.messages if text.startswith("by tenant")] == [
            'by tenant ops: requests cancelled: 3 of filter { tenant: "a" }',
            f'by tenant ops: requests cancelled: 1 of ids {{ request_ids: "{live.request_id}" }}',
        ]

    async def test_those_cancelled_before_the_operator_left_are_logged(self, service, send, caplog, monkeypatch):
        await send(20)
        abort = service.engine.abort

        def abort_and_leave(*arguments):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # as gRPC does it when the caller leaves
            return abort(*arguments)

        monkeypatch.setattr(service.engine, "abort", abort_and_leave)
        with caplog.at_level("INFO", LOGGER):
            request = pb.CancelRequestsRequest(all=pb.AllRequests())
            call = service.admin.CancelRequests(request, metadata=OPS)
            await until(lambda: "by tenant" in caplog.text)
            call.cancel()
        monkeypatch.undo()
        assert service.engine.stats().requests == 20 - MAX_CANCELS
        [text] = [text for text in caplog.messages if text.startswith("by tenant")]
        assert text == f"by tenant ops: requests cancelled: {MAX_CANCELS} of all {{ }}"
