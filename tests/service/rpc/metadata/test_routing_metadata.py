"""Metadata from gateways reaches the scheduler. Each test fails if its key is ignored."""

import time

import grpc
import pytest
from letters import begin, paced
from waiting import until
from wire.routing import ADMITTED, KEY, PLAIN, write_keys

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.service.requests.return_times import NUM_NEEDED, UNKNOWN_S


@pytest.fixture
def submitted(monkeypatch):
    """The requests that reach an engine."""
    seen = []
    submit = Engine.submit

    def note(self, request):
        seen.append(request)
        submit(self, request)

    monkeypatch.setattr(Engine, "submit", note)
    return seen


@pytest.fixture
async def service(start_service, tmp_path, load_keys):
    return await start_service(authenticator=load_keys(write_keys(tmp_path)), objectives={"batch": 10})


def metadata(key=KEY, **headers):
    return [("authorization", f"Bearer {key}"), *((name.replace("_", "-"), value) for name, value in headers.items())]


async def complete(service, given, **fields):
    return await service.generation.Complete(pb.CompleteRequest(start=begin(**fields).start), metadata=given)


@pytest.mark.parametrize("name", ADMITTED)
async def test_each_key_reaches_the_scheduler(service, submitted, name):
    value, is_there = ADMITTED[name]
    given = metadata(**{name: value})
    await complete(service, given)
    call = service.generation.GenerateOne(pb.GenerateOneRequest(start=begin().start), metadata=given)
    assert [message async for message in call][-1].finished.reason == pb.FINISH_REASON_LENGTH
    stream = service.generation.Generate(metadata=given)
    await stream.write(begin())
    await stream.done_writing()
    assert (await stream.read()).accepted
    stream.cancel()
    assert [bool(is_there(request)) for request in submitted] == [True] * 3


async def test_a_field_of_the_message_wins(service, submitted):
    await complete(service, metadata(x_llm_d_inference_fairness_id="acme", x_slo_tpot_ms="40"), tenant="bolt")
    assert submitted[0].tenant == "bolt"
    assert submitted[0].target_itl_s == 0.04


async def test_a_caller_that_may_not_act_for_others_stays_itself(service, submitted):
    await complete(service, metadata(PLAIN, x_llm_d_inference_fairness_id="acme"))
    assert submitted[0].tenant == "plain"


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-inference-fairness-id"])
async def test_an_invalid_value_is_refused_by_its_name(service, details_of, name):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(service, metadata(**{name: "no such thing"}))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error.value)["BadRequest"].field_violations[0].field == name


async def test_prefetch_and_embeddings_have_their_tenant_too(service, submitted):
    given = metadata(x_llm_d_inference_fairness_id="acme", x_llm_d_inference_objective="batch")
    await service.generation.Prefetch(pb.PrefetchRequest(start=begin().start), metadata=given)
    call = service.embedding.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")]), metadata=given)
    assert [message async for message in call]
    assert [request.tenant for request in submitted] == ["acme"] * 2
    assert submitted[1].priority == 10


async def test_a_first_token_that_would_be_late_is_refused(start_service, details_of):
    service = await start_service(paced(0.05))
    await complete(service, (), max_tokens=8)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(service, [("x-slo-ttft-ms", "1")])
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(error.value)["ErrorInfo"].reason == "OVERLOADED"
    assert "its first token would come in" in (error.value.details() or "")
    await complete(service, [("x-slo-ttft-ms", "60000")])


async def test_the_target_of_an_open_prompt_counts_from_its_commit(service, submitted):
    stream = service.generation.Generate(metadata=metadata(x_slo_ttft_ms="9000"))
    await stream.write(begin(open=True))
    await stream.write(pb.GenerateRequest(append=pb.GenerationAppend(ref=1, text="x" * 100)))
    await until(lambda: service.engine.counters.prefill_tokens)
    committed = time.monotonic()
    await stream.write(pb.GenerateRequest(commit=pb.GenerationCommit(ref=1)))
    await stream.done_writing()
    while not (await stream.read()).finished:
        pass
    request = next(request for request in submitted if not request.is_warm_up)
    assert request.first_token_target >= committed + 9
    stream.cancel()


async def test_a_session_is_retained_for_as_long_as_its_turns_take(service, submitted):
    await complete(service, metadata())
    assert submitted.pop().retain_s == 0
    for turn in range(NUM_NEEDED + 1):
        await complete(service, metadata(x_session_id="talk"))
        assert (submitted[turn].retain_s == UNKNOWN_S) == (turn < NUM_NEEDED), "then the turns have shown how soon"
    await complete(service, metadata(x_session_id="talk"), retain_ms=7000)
    assert submitted[-1].retain_s == 7


async def test_a_session_is_logged(service, caplog):
    caplog.set_level("INFO", logger="penstock")
    await complete(service, metadata(x_session_id="talk"))
    [record] = [record for record in caplog.records if record.name == "penstock.service.telemetry.request_end"]
    assert record.data["session_id"] == "talk"
    assert "session 'talk'" in record.getMessage()
