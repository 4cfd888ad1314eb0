"""What Explain tells of requests that waited, were preempted, lost their worker, were held, changed and cancelled."""

import asyncio
import random
import time
from collections import Counter

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.timeline_entry import EntryKind, HoldCause, PreemptionCause, WaitCause

BLOCK = 16


class RecordingExecutor(FakeExecutor):
    """Remembers every plan."""

    def __init__(self, **facts):
        super().__init__(vocab_size=258, next_token=lambda history, sampling: ord("a"), **facts)
        self.all_plans = []
        self.answers = asyncio.Event()
        """Until this is set none comes."""
        self.answers.set()

    def submit(self, plan):
        self.all_plans.append(plan)
        super().submit(plan)

    async def results(self):
        async for result in super().results():
            await self.answers.wait()
            yield result

    def steps_of(self, prompt):
        """What the plans had of a request: its chunks as (step, tokens), and the steps in which it was continued."""
        chunks, decodes, cached, row = [], [], [], None
        for plan in self.all_plans:
            if row in plan.dropped:
                row = None
            for added in plan.added:
                if bytes(added.token_ids[: len(prompt)]).decode() == prompt:
                    row = added.row
                    cached.append((plan.step, added.num_computed))
                elif added.row == row:  # of another worker
                    row = None
            chunks += [(plan.step, chunk.end - chunk.start) for chunk in plan.chunks if chunk.row == row]
            decodes += [plan.step for decode in plan.decodes if decode.row == row]
        return chunks, decodes, cached


def start(ref=1, text="x" * 20, max_tokens=4, **fields):
    return pb.GenerateRequest(
        start=pb.GenerationStart(
            ref=ref, text=text, sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields
        )
    )


def kinds(told):
    return [pb.TimelineKind.Name(entry.kind).removeprefix("TIMELINE_KIND_") for entry in told.timeline]


def of_kind(told, kind):
    return [entry for entry in told.timeline if entry.kind == getattr(pb, f"TIMELINE_KIND_{kind}")]


def end_us(entry):
    return entry.start_offset.ToMicroseconds() + entry.duration.ToMicroseconds()


def chunks_of(told):
    """Each chunk as (step, tokens)."""
    found = []
    for entry in of_kind(told, "PREFILLED"):
        num_chunks = entry.last_step - entry.first_step + 1
        assert entry.num_tokens % num_chunks == 0
        found += [(entry.first_step + index, entry.num_tokens // num_chunks) for index in range(num_chunks)]
    return found


def decodes_of(told):
    """The steps after the first of each stretch, which computed the last chunk and chose its first token."""
    return [step for e in of_kind(told, "DECODED") for step in range(e.first_step + 1, e.last_step + 1)]


@pytest.fixture
def explain(start_service):
    """Starts a service, and explains what is asked of it."""

    async def begin(executor=None, **config):
        scheduler = SchedulerConfig(**config)
        executor = executor or RecordingExecutor()
        service = await start_service(executor, scheduler, admin_listen="127.0.0.1:0")

        async def ask(request_id):
            return await service.admin.Explain(pb.ExplainRequest(request_id=request_id))

        return service, ask

    return begin


async def run_together(service, frames, new_reading):
    """No step is answered before all of them are there; returns what became of each."""
    service.executor.answers.clear()
    reading = asyncio.create_task(new_reading().read(service.generation.Generate(iter(frames))))
    await until(lambda: service.engine.stats().requests == len(frames))
    service.executor.answers.set()
    return (await reading).outcomes


async def test_an_ordinary_request(explain, new_reading):
    service, ask = await explain(max_num_batched_tokens=64)
    prompt = "p" * 150
    call = service.generation.Generate(iter([start(text=prompt, max_tokens=5, client_request_id="mine")]))
    reading = await new_reading().read(call)
    told = await ask(reading.outcomes[1].accepted[0].request_id)
    assert kinds(told)[0] == "ACCEPTED"
    assert [kind for kind in kinds(told) if kind != "WAITED"] == [
        *("ACCEPTED", "BEGAN", "PREFILLED", "PREFILLED", "DECODED", "ENDED")
    ]
    assert chunks_of(told) == [(0, 64), (1, 64), (2, 22)]
    (decoded,) = of_kind(told, "DECODED")
    assert (decoded.first_step, decoded.last_step, decoded.num_tokens) == (2, 6, 5)
    assert (told.tenant, told.client_request_id, told.end) == ("default", "mine", pb.REQUEST_END_LENGTH)
    assert (told.prompt_tokens, told.max_tokens, told.num_choices) == (150, 5, 1)
    timings = reading.outcomes[1].finished[0].timings
    assert told.time_to_first_token.ToMicroseconds() == round(timings.first_token_ms * 1000)
    assert abs(told.arrive_time.ToSeconds() - time.time()) < 3600
    (ended,) = of_kind(told, "ENDED")
    assert ended.start_offset.ToMicroseconds() >= timings.first_token_ms * 1000
    assert ended.end == told.end
    assert not told.omitted_entries


async def test_steps_and_chunks_are_those_of_the_plans(explain, new_reading):
    """Of many requests, with too few blocks for all of them, and a worker that dies twice."""
    executor = RecordingExecutor(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=48)
    service, ask = await explain(executor, max_num_seqs=8, max_num_batched_tokens=48)
    rng = random.Random(5)
    shared = "s" * 40
    prompts = [f"{chr(65 + ref)}{shared if ref % 3 else ''}{'y' * rng.randint(5, 90)}" for ref in range(1, 21)]
    frames = [start(ref=ref, text=text, max_tokens=rng.randint(1, 120)) for ref, text in enumerate(prompts, 1)]
    executor.answers.clear()
    reading = asyncio.create_task(new_reading().read(service.generation.Generate(iter(frames))))
    await until(lambda: service.engine.stats().requests == len(frames))
    executor.answers.set()
    for num_plans in (40, 150):
        await until(lambda num_plans=num_plans: len(executor.all_plans) >= num_plans)
        executor.die()
    outcomes = (await reading).outcomes
    seen: Counter[str] = Counter()
    for ref, prompt in enumerate(prompts, 1):
        told = await ask(outcomes[ref].accepted[0].request_id)
        chunks, decodes, begun = executor.steps_of(prompt)
        assert chunks_of(told) == chunks
        assert decodes_of(told) == decodes
        assert [(entry.first_step, entry.num_tokens) for entry in of_kind(told, "BEGAN")] == begun
        usage = outcomes[ref].finished[0].usage
        assert (
            sum(entry.num_tokens for entry in of_kind(told, "DECODED"))
            == usage.output_tokens
            == frames[ref - 1].start.sampling.max_tokens
        )
        timings = outcomes[ref].finished[0].timings
        assert len(of_kind(told, "PREEMPTED")) == timings.preemptions
        assert len(of_kind(told, "RESTARTED")) == timings.restarts
        seen.update(kinds(told))
        accepted = outcomes[ref].accepted[0]
        assert told.HasField("predicted_ttft") == accepted.HasField("predicted_ttft_ms")
        assert abs(told.predicted_ttft.ToMilliseconds() - accepted.predicted_ttft_ms) <= 1  # two readings of a clock
    assert seen["PREEMPTED"], "blocks were not short"
    assert seen["RESTARTED"] >= 2


async def test_a_prefix_from_the_cache(explain, new_reading):
    service, ask = await explain()
    for ref in (1, 2):
        call = service.generation.Generate(iter([start(ref=ref, text="s" * 200 + str(ref), max_tokens=2)]))
        reading = await new_reading().read(call)
    told = await ask(reading.outcomes[2].accepted[0].request_id)
    (began,) = of_kind(told, "BEGAN")
    assert began.num_tokens == reading.outcomes[2].finished[0].usage.cached_tokens == 192
    assert chunks_of(told) == [(began.first_step, 9)]


async def test_waiting_for_blocks(explain, new_reading):
    executor = RecordingExecutor(num_blocks=10, seconds_per_step=0.001)
    service, ask = await explain(executor)
    frames = [start(ref=ref, text=str(ref) * 90, max_tokens=40) for ref in (1, 2)]
    outcomes = await run_together(service, frames, new_reading)
    both = [await ask(outcomes[ref].accepted[0].request_id) for ref in (1, 2)]
    waits = [entry for told in both for entry in of_kind(told, "WAITED") if entry.wait.cause == pb.WAIT_CAUSE_BLOCKS]
    assert [entry.wait for entry in waits] == [
        pb.WaitDetail(cause=pb.WAIT_CAUSE_BLOCKS, free_blocks=4, needed_blocks=6)
    ]
    assert waits[0].duration.ToMicroseconds() > 10_000


async def test_preempted_by_another(explain, new_reading):
    executor = RecordingExecutor(num_blocks=8, max_num_seqs=4)
    service, ask = await explain(executor)
    frames = [start(ref=ref, text=str(ref) * 40, max_tokens=60) for ref in (1, 2)]
    outcomes = await run_together(service, frames, new_reading)
    both = [await ask(outcomes[ref].accepted[0].request_id) for ref in (1, 2)]
    (told,) = (each for each in both if of_kind(each, "PREEMPTED"))
    (first,) = (each.request_id for each in both if each.request_id != told.request_id)
    assert [entry.preemption for entry in of_kind(told, "PREEMPTED")] == [
        pb.PreemptionDetail(cause=pb.PREEMPTION_CAUSE_BLOCKS, for_request_id=first, needed_blocks=1)
    ]
    order = [kind for kind in kinds(told) if kind != "WAITED"]
    assert order[order.index("DECODED") :] == ["DECODED", "PREEMPTED", "BEGAN", "PREFILLED", "DECODED", "ENDED"]


async def test_a_worker_that_died(explain, new_reading):
    executor = RecordingExecutor(seconds_per_step=0.001)
    service, ask = await explain(executor)
    call = service.generation.Generate(iter([start(max_tokens=60)]))
    reading = asyncio.create_task(new_reading().read(call))
    await until(lambda: len(executor.all_plans) > 20)
    executor.die()
    outcome = (await reading).outcomes[1]
    told = await ask(outcome.accepted[0].request_id)
    order = [kind for kind in kinds(told) if kind != "WAITED"]
    assert order == [
        *("ACCEPTED", "BEGAN", "PREFILLED", "DECODED"),
        *("RESTARTED", "BEGAN", "PREFILLED", "DECODED", "ENDED"),
    ]
    assert sum(entry.num_tokens for entry in of_kind(told, "DECODED")) == 60


async def test_held_and_released(explain, new_reading):
    executor = RecordingExecutor(seconds_per_step=0.001)
    service, ask = await explain(executor)
    call = service.generation.Generate(iter([start(max_tokens=60)]))
    reading = new_reading()
    await reading.read_until(call, lambda reading: reading.outcomes[1].deltas > 5)
    request_id = reading.outcomes[1].accepted[0].request_id
    service.engine.hold(request_id, True)
    told = await ask(request_id)
    (held,) = of_kind(told, "HELD")
    assert held.hold_cause == pb.HOLD_CAUSE_UNREAD
    service.engine.hold(request_id, False)
    await reading.read(call)
    told = await ask(request_id)
    assert [kind for kind in kinds(told) if kind != "WAITED"][3:] == ["DECODED", "HELD", "DECODED", "ENDED"]
    before, held, after = (
        entry for entry in told.timeline if entry.kind in (pb.TIMELINE_KIND_DECODED, pb.TIMELINE_KIND_HELD)
    )
    assert end_us(before) <= held.start_offset.ToMicroseconds()
    assert end_us(held) <= after.start_offset.ToMicroseconds() + 1000
    assert before.num_tokens + after.num_tokens == 60
    _, decodes, _ = executor.steps_of("x" * 20)
    assert set(decodes) <= {
        *range(before.first_step, before.last_step + 1),
        *range(after.first_step, after.last_step + 1),
    }


async def test_changed_and_cancelled_by_its_caller(explain, new_reading):
    executor = RecordingExecutor(seconds_per_step=0.001)
    service, ask = await explain(executor)
    call = service.generation.Generate()
    await call.write(start(max_tokens=3000))
    reading = new_reading()
    await reading.read_until(call, lambda reading: reading.outcomes[1].deltas > 2)
    request_id = reading.outcomes[1].accepted[0].request_id
    living = await ask(request_id)
    assert living.end == pb.REQUEST_END_UNSPECIFIED
    (decoded,) = of_kind(living, "DECODED")
    assert decoded.num_tokens >= 3
    assert decoded.last_step - decoded.first_step >= 2
    await call.write(pb.GenerateRequest(update=pb.GenerationUpdate(ref=1, priority=2, max_tokens=2000)))
    await until(lambda: EntryKind.UPDATED in [entry.kind for entry in service.engine.explain(request_id).entries()])
    await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
    await call.done_writing()
    await reading.read(call)
    told = await ask(request_id)
    assert kinds(told)[-1] == "ENDED"
    assert told.end == of_kind(told, "ENDED")[0].end == pb.REQUEST_END_CANCELLED
    assert of_kind(told, "UPDATED")[0].update == pb.UpdateDetail(priority=2, max_tokens=2000)
    usage = reading.outcomes[1].finished[0].usage
    assert of_kind(told, "DECODED")[0].num_tokens == usage.output_tokens


async def test_injections(explain, new_reading):
    service, ask = await explain(RecordingExecutor(seconds_per_step=0.001))
    call = service.generation.Generate()
    await call.write(start(max_tokens=200))
    reading = new_reading()
    await reading.read_until(call, lambda reading: reading.outcomes[1].deltas > 2)
    await call.write(pb.GenerateRequest(append=pb.GenerationAppend(ref=1, text="42")))
    await call.done_writing()
    await reading.read(call)
    told = await ask(reading.outcomes[1].accepted[0].request_id)
    [entry] = of_kind(told, "INJECTED")
    assert entry.num_tokens == 2
    assert kinds(told).index("INJECTED") < len(kinds(told)) - 2
    decoded = of_kind(told, "DECODED")
    assert sum(each.num_tokens for each in decoded) == reading.outcomes[1].finished[0].usage.output_tokens


async def test_each_choice_has_its_own_entries(explain, new_reading):
    service, ask = await explain()
    frame = start(text="c" * 40, max_tokens=6)
    frame.start.sampling.n = 3
    outcomes = (await new_reading().read(service.generation.Generate(iter([frame])))).outcomes
    told = await ask(outcomes[1].accepted[0].request_id)
    assert told.num_choices == 3
    assert {entry.choice: entry.num_tokens for entry in of_kind(told, "DECODED")} == {0: 6, 1: 6, 2: 6}
    assert {entry.choice: entry.num_tokens for entry in of_kind(told, "BEGAN")} == {0: 0, 1: 32, 2: 32}


async def test_what_is_not_known_any_more(explain, new_reading):
    service, ask = await explain(explain_requests=2)
    frames = [start(ref=ref, max_tokens=ref) for ref in (1, 2, 3)]
    outcomes = (await new_reading().read(service.generation.Generate(iter(frames)))).outcomes
    for ref in (2, 3):
        assert (await ask(outcomes[ref].accepted[0].request_id)).end == pb.REQUEST_END_LENGTH
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ask(outcomes[1].accepted[0].request_id)
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert "the last 2 that ended" in str(failure.value.details())
    assert "--explain-requests" in str(failure.value.details())


@pytest.mark.parametrize("request_id", ["", "x" * 65])
async def test_an_id_that_can_be_none(explain, request_id):
    _, ask = await explain()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await ask(request_id)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in str(failure.value.details())


@pytest.mark.parametrize(
    ("ours", "on_the_wire", "prefix"),
    [
        (EntryKind, pb.TimelineKind, "TIMELINE_KIND_"),
        (WaitCause, pb.WaitCause, "WAIT_CAUSE_"),
        (HoldCause, pb.HoldCause, "HOLD_CAUSE_"),
        (PreemptionCause, pb.PreemptionCause, "PREEMPTION_CAUSE_"),
        (EngineFinishReason, pb.RequestEnd, "REQUEST_END_"),
    ],
)
def test_every_kind_and_cause_is_on_the_wire(ours, on_the_wire, prefix):
    names = {name.removeprefix(prefix) for name in on_the_wire.keys()}  # noqa: SIM118 - an enum
    assert names == {each.name for each in ours} | {"UNSPECIFIED"}


async def test_a_prediction_of_months_has_room(explain):
    service, ask = await explain()
    request = pb.CompleteRequest(start=pb.GenerationStart(text="x", sampling=pb.SamplingParams(max_tokens=1)))
    answer = await service.generation.Complete(request)
    service.engine.explain(answer.request_id).predicted_ttft_s = 1e7
    assert (await ask(answer.request_id)).predicted_ttft.ToSeconds() == 10_000_000


async def test_tokens_that_are_computed_again_for_lack_of_a_state(explain):
    service, ask = await explain(RecordingExecutor(num_state_slots=9))
    for text in ("x" * 64 + "y" * 40, "x" * 100):
        request = pb.CompleteRequest(start=pb.GenerationStart(text=text, sampling=pb.SamplingParams(max_tokens=1)))
        answer = await service.generation.Complete(request)
    [began] = of_kind(await ask(answer.request_id), "BEGAN")
    assert (began.num_tokens, began.missed_tokens) == (0, 64)
