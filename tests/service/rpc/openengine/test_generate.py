"""Generate and Abort: the output is that of penstock.v1 for the same request, in the contract's messages."""

import asyncio
from typing import Any

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import ServiceError

pytest.importorskip("openengine.v1", reason="the bindings of OpenEngine are not installed (docs/openengine.md)")
from google.protobuf.struct_pb2 import Struct
from openengine.v1 import error_pb2, generation_pb2 as oe, kv_pb2, lifecycle_pb2

from penstock.service.rpc.openengine.generation_start import generation_start

PROMPT = list(b"a prompt of more than two blocks of sixteen tokens")


def letter(history, sampling):
    return ord("a") + len(history) % 26


def slow():
    return FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.002)


def limit(max_tokens, *stops, **options):
    conditions = [
        oe.StopCondition(**{"stop_text" if isinstance(stop, str) else "stop_token_id": stop}) for stop in stops
    ]
    return oe.StoppingOptions(max_tokens=max_tokens, conditions=conditions, **options)


ENDLESS = {"stopping": limit(3000)}


async def own_answer(engine, **sampling):
    """What penstock.v1's own method returns for the same prompt."""
    start = pb.GenerationStart(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(**sampling))
    start.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    return (await engine.service.generation.Complete(pb.CompleteRequest(start=start))).choices[0]


async def test_tokens_and_text_are_those_of_penstocks_own_method(start_engine):
    engine = await start_engine()
    own = await own_answer(engine, max_tokens=12, temperature=0)
    sampling = oe.SamplingParams(temperature=0)
    for prompt in (PROMPT, bytes(PROMPT).decode()):
        output = await engine.output(prompt, sampling=sampling, stopping=limit(12), model="bytes")
        assert output.num_messages > 2, "it streams"
        assert output.token_ids() == list(own.token_ids)
        assert output.texts[0] == own.text
        assert "".join(info.token for info in output.tokens[0]) == own.text
        assert output.finished[0].reason == oe.FINISH_REASON_LENGTH
        assert not output.finished[0].HasField("stop_match")
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(PROMPT), 12)
        assert (output.usage.total_tokens, output.usage.cached_prompt_tokens) == (len(PROMPT) + 12, 48)
        assert output.prompt is None


async def test_each_of_several_outputs_has_its_tokens_and_one_end(start_engine):
    engine = await start_engine()
    output = await engine.output(PROMPT, sampling=oe.SamplingParams(num_sequences=3, seed=7), stopping=limit(6))
    assert set(output.finished) == {0, 1, 2}
    assert [len(output.token_ids(index)) for index in range(3)] == [6, 6, 6]
    assert output.usage.completion_tokens == 18


async def test_log_probabilities_of_output_and_prompt(start_engine):
    engine = await start_engine()
    start = pb.GenerationStart(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=4))
    start.output.logprobs, start.output.prompt_logprobs = 2, 3
    own = await engine.service.generation.Complete(pb.CompleteRequest(start=start))
    response = oe.ResponseOptions(
        return_output_logprobs=True,
        output_candidates=oe.CandidateTokenSelection(top_n=2),
        return_prompt_logprobs=True,
        prompt_candidates=oe.CandidateTokenSelection(top_n=3),
    )
    output = await engine.output(PROMPT, response=response, stopping=limit(4))
    first, *rest = output.prompt.tokens
    assert not first.HasField("logprob")
    assert not first.candidates
    assert [info.token_id for info in (first, *rest)] == PROMPT
    for infos, expected in ((output.tokens[0], own.choices[0].logprobs), (rest, own.prompt_logprobs.logprobs)):
        assert [info.logprob for info in infos] == pytest.approx(list(expected.chosen), rel=1e-6)
        candidates = [each for info in infos for each in info.candidates]
        assert [each.token_id for each in candidates] == list(expected.top_token_ids)
        assert [each.logprob for each in candidates] == pytest.approx(list(expected.top), rel=1e-6)
        for info in infos:
            found = [each.rank for each in info.candidates if each.token_id == info.token_id]
            assert found == ([info.rank] if info.HasField("rank") else [])
    only_chosen = await engine.output(
        PROMPT, response=oe.ResponseOptions(return_output_logprobs=True), stopping=limit(2)
    )
    assert all(info.HasField("logprob") and not info.candidates for info in only_chosen.tokens[0])
    assert only_chosen.prompt is None


async def test_a_stop_is_reported_and_shown_if_requested(start_engine):
    engine = await start_engine()
    own = await own_answer(engine, max_tokens=8)
    ids, stop = list(own.token_ids), own.text[2:4]
    for shows in (False, True):
        by_text = await engine.output(PROMPT, stopping=limit(8, stop, include_stop_in_output=shows))
        assert by_text.finished[0].reason == oe.FINISH_REASON_STOP
        assert by_text.finished[0].stop_match.stop_text == stop
        assert by_text.texts[0] == own.text[: 4 if shows else 2]
        assert by_text.token_ids() == ids[:4]
        by_id = await engine.output(PROMPT, stopping=limit(8, "never", ids[3], include_stop_in_output=shows))
        assert by_id.finished[0].stop_match.stop_token_id == ids[3]
        assert by_id.texts[0] == own.text[: 4 if shows else 3]


async def test_the_models_own_end_is_reported_as_such(start_engine):
    engine = await start_engine(FakeExecutor(vocab_size=258, next_token=lambda history, sampling: 256))
    output = await engine.output(PROMPT, stopping=oe.StoppingOptions(include_stop_in_output=True))
    assert output.finished[0].stop_match.eos_token_id == 256
    assert (output.token_ids(), output.texts[0]) == ([256], "")
    beyond = await engine.output(PROMPT, stopping=limit(3, ignore_eos=True))
    assert beyond.finished[0].reason == oe.FINISH_REASON_LENGTH


def abort(engine, metadata=(), **target):
    return engine.control.Abort(lifecycle_pb2.AbortRequest(**target), metadata=metadata)


async def test_an_abort_ends_the_stream_by_itself(start_engine, new_output):
    engine = await start_engine(slow())
    sampling = oe.SamplingParams(num_sequences=2)
    call = engine.generate(PROMPT, request_id="mine", sampling=sampling, **ENDLESS)
    other = engine.generate(PROMPT, request_id="other", stopping=limit(200))
    await until(lambda: engine.service.engine.stats().running == 3)
    assert (await abort(engine, request_id="mine")).status == lifecycle_pb2.ABORT_STATUS_ABORTED
    output = await new_output().read(call)
    assert {each.reason for each in output.finished.values()} == {oe.FINISH_REASON_CANCELLED}
    assert set(output.finished) == {0, 1}
    assert output.error is None
    assert output.usage.prompt_tokens == len(PROMPT)
    assert (await abort(engine, request_id="mine")).status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await abort(engine, request_id="unknown")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    for wrong in ({}, {"request_id": ""}, {"kv_session": kv_pb2.KvSessionRef(session_id="x")}):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await abort(engine, **wrong)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len((await new_output().read(other)).token_ids()) == 200, "nothing of this cost the other request a token"


async def test_a_request_without_an_id_gets_one(start_engine, new_output):
    engine = await start_engine(slow())
    calls = [engine.generate(PROMPT, request_id="", **ENDLESS) for _ in range(2)]
    ids = [(await call.read()).request_id for call in calls]
    assert len(set(ids)) == 2
    await abort(engine, request_id=ids[0])
    assert (await new_output().read(calls[0])).finished[0].reason == oe.FINISH_REASON_CANCELLED
    assert engine.service.engine.stats().running == 1
    calls[1].cancel()


async def test_a_long_id_is_not_kept(start_engine):
    engine = await start_engine()
    with pytest.raises(grpc.aio.AioRpcError, match="request_id: at most 128 bytes") as refused:
        await engine.output(PROMPT, request_id="r" * 100_000)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await abort(engine, request_id="r" * 100_000)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND, "it takes no memory"


async def test_an_abort_ends_only_the_tenants_own_requests(start_engine, keys, metadata_of, new_output):
    engine = await start_engine(slow(), metadata_of("acme"), authenticator=keys)
    calls = [engine.generate(PROMPT, request_id=name, **ENDLESS) for name in ("mine", "also mine")]
    await until(lambda: engine.service.engine.stats().running == 2)
    everything = {"all_requests": lifecycle_pb2.AllRequests()}
    for tenant in ("zenith", "operators"):
        response = await abort(engine, metadata_of(tenant), **everything)
        assert response.message == "0 requests were aborted"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await abort(engine, metadata_of(tenant), request_id="mine")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert engine.service.engine.stats().running == 2
    assert (await abort(engine, metadata_of("acme"), **everything)).message == "2 requests were aborted"
    for call in calls:
        assert (await new_output().read(call)).finished[0].reason == oe.FINISH_REASON_CANCELLED


async def test_a_reset_leaves_no_row_running(start_engine):
    engine = await start_engine(slow())
    call = engine.generate(PROMPT, **ENDLESS)
    await until(lambda: engine.service.engine.stats().running == 1)
    call.cancel()
    await until(lambda: not engine.service.engine.stats().requests)


def candidates(kind, **selection):
    return oe.ResponseOptions(**{f"{kind}_candidates": oe.CandidateTokenSelection(**selection)})


REFUSED: dict[str, dict[str, Any]] = {
    "media": {"media": [oe.MediaItem(modality=oe.MODALITY_IMAGE, url="https://example.org/a.png")]},
    "kv.session": {"kv": oe.KvOptions(session=kv_pb2.KvSessionRef(session_id="x"))},
    "kv.bypass_prefix_cache": {"kv": oe.KvOptions(bypass_prefix_cache=True)},
    "kv.cache_salt": {"kv": oe.KvOptions(cache_salt="x")},
    "response.prompt_logprob_start": {"response": oe.ResponseOptions(prompt_logprob_start=1)},
    "response.output_candidates.token_ids": {"response": candidates("output", token_ids=oe.TokenIds(ids=[1]))},
    "response.prompt_candidates.all": {"response": candidates("prompt", all=oe.AllCandidates())},
    "response.output_candidates.top_n": {"response": candidates("output", top_n=21)},
    "response.prompt_candidates.top_n": {"response": candidates("prompt", top_n=21)},
    "guided.backend": {"guided": oe.GuidedDecoding(regex="a", backend="outlines")},
    "guided.regex": {"guided": oe.GuidedDecoding(regex="(")},
    "guided.choice.choices": {"guided": oe.GuidedDecoding(choice=oe.ChoiceConstraint())},
    "guided.structural_tag": {"guided": oe.GuidedDecoding(structural_tag="{")},
    "sampling.top_k": {"sampling": oe.SamplingParams(top_k=-2)},
    "sampling.top_p": {"sampling": oe.SamplingParams(top_p=2)},
    "sampling.num_sequences": {"sampling": oe.SamplingParams(num_sequences=0)},
    "stopping.max_tokens": {"stopping": oe.StoppingOptions(max_tokens=0)},
    "stopping.conditions[1]": {
        "stopping": oe.StoppingOptions(conditions=[oe.StopCondition(stop_text="a"), oe.StopCondition()])
    },
    "stopping.conditions[1].stop_text": {"stopping": limit(1, 7, "")},
    "stopping.conditions[2].stop_token_id": {"stopping": limit(1, 7, "a", 999)},
    "token_ids.ids[0]": {"token_ids": oe.TokenIds(ids=[258])},
    "token_ids.ids": {"token_ids": oe.TokenIds()},
    "input": {"token_ids": None},
    "request_id": {"request_id": "r" * 129},
}
BAD_METADATA = [
    ("openengine-target-dp-rank", "1"),
    ("openengine-target-dp-rank", "zero"),
    ("openengine-priority", "urgent"),
    ("openengine-priority", "1001"),
    ("openengine-priority", "99999999999"),
    ("openengine-routing-key", ""),
]


async def test_what_cannot_be_done_is_refused_by_its_name(start_engine, details_of):
    engine = await start_engine()
    for field, given in REFUSED.items():
        values: dict[str, Any] = {"token_ids": oe.TokenIds(ids=PROMPT), **given}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engine.inference.Generate(oe.GenerateRequest(**values)).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
        assert (error.value.details() or "").startswith(f"{field}: "), (field, error.value.details())
        [violation] = details_of(error.value)["BadRequest"].field_violations
        assert violation.field == field
    for metadata in [*([pair] for pair in BAD_METADATA), [("openengine-routing-key", "a")] * 2]:
        with pytest.raises(grpc.aio.AioRpcError, match=f"{metadata[0][0]}: ") as error:
            await engine.output(PROMPT, metadata)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, metadata
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await engine.output(PROMPT, model="another")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_what_an_engine_may_ignore_is_ignored(start_engine):
    engine = await start_engine()
    extra = Struct()
    extra["detokenize"] = False
    kv = oe.KvOptions(bypass_prefix_cache=False, cache_salt="")
    metadata = [("openengine-routing-key", "user-7"), ("openengine-target-dp-rank", "0"), ("openengine-priority", "5")]
    output = await engine.output(PROMPT, metadata, extra=extra, kv=kv, stopping=limit(2))
    assert len(output.token_ids()) == 2


async def test_a_higher_priority_runs_first(start_engine, new_output):
    scheduler = SchedulerConfig(policy=Policy.PRIORITY, max_num_seqs=1)
    engine = await start_engine(slow(), scheduler=scheduler)
    first = engine.generate(PROMPT, **ENDLESS)
    await until(lambda: engine.service.engine.stats().running == 1)
    low = engine.generate(PROMPT, [("openengine-priority", "-3")], stopping=limit(2))
    await until(lambda: engine.service.engine.stats().waiting == 1)
    high = engine.generate(PROMPT, [("openengine-priority", "+3")], stopping=limit(100))
    await until(lambda: engine.service.engine.stats().waiting == 2)
    first.cancel()
    assert (await high.read()).WhichOneof("event") == "token"
    assert engine.service.engine.stats().waiting == 1, "the other one waits"
    for call in (high, low):
        await new_output().read(call)


async def test_a_failure_after_acceptance_is_an_event_and_the_call_is_ok(start_engine, new_output):
    engine = await start_engine(slow(), admin_listen="127.0.0.1:0")
    call = engine.generate(PROMPT, **ENDLESS)
    await until(lambda: engine.service.engine.stats().output_tokens > 5)
    await engine.service.admin.CancelRequests(pb.CancelRequestsRequest(all=pb.AllRequests()))
    output = await new_output().read(call)
    assert await call.code() is grpc.StatusCode.OK
    assert (output.error.code, output.error.retryable) == (error_pb2.ERROR_CODE_CANCELLED, False)
    assert not output.finished
    assert output.usage.completion_tokens > 0
    call = engine.generate(PROMPT, **ENDLESS)
    await until(lambda: engine.service.engine.stats().running == 1)
    output, _ = await asyncio.gather(new_output().read(call), engine.service.server.stop(0))
    assert (output.error.code, output.error.retryable) == (error_pb2.ERROR_CODE_INTERNAL, True)
    assert output.error.message


async def test_a_refusal_is_the_calls_status(start_engine):
    engine = await start_engine(slow(), scheduler=SchedulerConfig(max_num_seqs=1, max_queued_requests=1))
    calls = [engine.generate(PROMPT, **ENDLESS)]
    await until(lambda: engine.service.engine.stats().running == 1)
    calls.append(engine.generate(PROMPT, **ENDLESS))
    await until(lambda: engine.service.engine.stats().waiting == 1)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await engine.output(PROMPT)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()


async def test_a_deadline_is_the_calls_status(start_engine, new_output):
    engine = await start_engine(slow())
    request = oe.GenerateRequest(token_ids=oe.TokenIds(ids=PROMPT), **ENDLESS)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await new_output().read(engine.inference.Generate(request, timeout=0.2))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not engine.service.engine.stats().requests)


async def test_a_worker_that_dies_changes_no_token(start_engine, new_output):
    executor = FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.001)
    engine = await start_engine(executor)
    call = engine.generate(PROMPT, stopping=limit(60))
    await until(lambda: engine.service.engine.stats().output_tokens > 5)
    executor.die()
    output = await new_output().read(call)
    assert output.token_ids() == [letter(range(len(PROMPT) + n), None) for n in range(60)]
    assert executor.num_starts == 2


class TestTranslation:
    """The translation of the contract's fields."""

    @staticmethod
    def start(**fields):
        return generation_start(oe.GenerateRequest(prompt="x", **fields), ())

    def test_only_what_is_set_is_set(self):
        expected = pb.GenerationStart(text="x", sampling=pb.SamplingParams())
        expected.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
        assert self.start() == expected
        zeros: dict[str, Any] = dict.fromkeys(
            ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), 0.0
        )
        assert self.start(sampling=oe.SamplingParams(**zeros)).sampling == pb.SamplingParams(**zeros)

    def test_values_are_kept(self):
        given: dict[str, Any] = {
            "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "frequency_penalty": 0.5,
            "presence_penalty": -0.5, "repetition_penalty": 1.5, "seed": 5,
        }  # fmt: skip
        stopping = limit(9, "x", 4, min_tokens=2, ignore_eos=True)
        sampling = self.start(sampling=oe.SamplingParams(**given, num_sequences=2), stopping=stopping).sampling
        assert sampling == pb.SamplingParams(
            **given, n=2, max_tokens=9, min_tokens=2, stop=["x"], stop_token_ids=[4], ignore_eos=True
        )
        assert self.start(sampling=oe.SamplingParams(seed=2**64 - 1, top_k=-1)).sampling == pb.SamplingParams(
            seed=2**63 - 1, top_k=0
        )

    def test_only_as_many_stops_as_a_request_may_have_are_translated(self):
        stops = [*"a" * 64, *[4] * 256]
        assert len(self.start(stopping=limit(1, *stops)).sampling.stop) == 64
        with pytest.raises(ServiceError, match=r"^stopping\.conditions: at most 320; there are 321"):
            self.start(stopping=limit(1, "a", *stops))

    def test_constraints(self):
        for given, expected in (
            ({"json_schema": "{}"}, {"json_schema": "{}"}),
            ({"regex": "a+"}, {"regex": "a+"}),
            ({"ebnf_grammar": 'root ::= "a"'}, {"gbnf": 'root ::= "a"'}),
            ({"structural_tag": "{}"}, {"structural_tag_json": "{}"}),
            ({"json_object": oe.JsonObjectConstraint()}, {"any_json": pb.AnyJson()}),
            ({"choice": oe.ChoiceConstraint(choices=["a"])}, {"choices": pb.StringChoices(values=["a"])}),
        ):
            assert self.start(guided=oe.GuidedDecoding(**given)).constraint == pb.Constraint(**expected)
        assert not self.start(guided=oe.GuidedDecoding(backend="llguidance")).HasField("constraint")
