"""Generate, Abort and Embed: the output is that of penstock.v1 for the same request, in the contract's messages."""

import hashlib
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, SequenceDelta, StopMatch
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import ServiceError
from penstock.service.rpc.vllm.generation_start import generation_start
from penstock.service.rpc.vllm.output import OutputEncoder
from penstock.service.streaming.pending_message import OutputForm, PendingMessage

PROMPT = list(b"a prompt of more than two blocks of sixteen tokens")
KEYS = {"acme": "a" * 40, "zenith": "z" * 40}


@pytest.fixture
def keys(tmp_path, load_keys):
    path = tmp_path / "keys"
    lines = (f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {tenant}\n" for tenant, key in KEYS.items())
    path.write_text("".join(lines))
    return load_keys(path)


def of(tenant):
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


async def own_answer(engine, **sampling):
    """The token ids of penstock.v1's own method."""
    start = pb.GenerationStart(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(**sampling))
    start.output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
    return await engine.service.generation.Complete(pb.CompleteRequest(start=start))


async def test_a_stream_has_chunks_and_one_complete(start_engine):
    engine = await start_engine()
    expected = list((await own_answer(engine, max_tokens=12)).choices[0].token_ids)
    output = await engine.output(PROMPT, max_tokens=12)
    assert len(output.chunks) > 1
    assert output.token_ids() == expected
    assert [chunk.completion_tokens for chunk in output.chunks][-1] == 12
    assert {chunk.prompt_tokens for chunk in output.chunks} == {len(PROMPT)}
    [complete] = output.completes
    assert list(complete.output_ids) == expected
    assert (complete.finish_reason, complete.completion_tokens) == ("length", 12)
    assert (complete.prompt_tokens, complete.cached_tokens) == (len(PROMPT), 48), "the first request left its blocks"
    assert complete.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("stream", [True, False])
async def test_each_of_several_choices_has_its_chunks_and_one_complete(start_engine, stream):
    engine = await start_engine()
    output = await engine.output(PROMPT, stream=stream, max_tokens=6, n=3, seed=7)
    assert sorted(complete.index for complete in output.completes) == [0, 1, 2]
    assert {chunk.index for chunk in output.chunks} == ({0, 1, 2} if stream else set())
    for complete in output.completes:
        assert len(complete.output_ids) == 6
        if stream:
            assert output.token_ids(complete.index) == list(complete.output_ids)


async def test_a_text_is_tokenized_by_the_service(start_engine):
    engine = await start_engine()
    by_text = await engine.output(bytes(PROMPT).decode(), stream=False, max_tokens=5, prompt_logprobs=0)
    by_ids = await engine.output(PROMPT, stream=False, max_tokens=5)
    assert by_text.completes[0].output_ids == by_ids.completes[0].output_ids
    assert list(by_text.completes[0].input_logprobs.token_ids) == PROMPT


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probabilities_of_output_and_prompt(start_engine, stream):
    engine = await start_engine()
    start = pb.GenerationStart(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=4))
    start.output.logprobs, start.output.prompt_logprobs = 2, 3
    expected = await engine.service.generation.Complete(pb.CompleteRequest(start=start))
    output = await engine.output(PROMPT, stream=stream, max_tokens=4, logprobs=2, prompt_logprobs=3)
    parts = output.chunks if stream else output.completes
    own = expected.choices[0].logprobs
    assert [value for part in parts for value in part.output_logprobs.token_logprobs] == list(own.chosen)
    top = [each for part in parts for each in part.output_logprobs.top_logprobs]
    assert [value for each in top for value in each.values] == list(own.top)
    assert [token_id for each in top for token_id in each.token_ids] == list(own.top_token_ids)
    assert [part.HasField("input_logprobs") for part in parts] == [True] + [False] * (len(parts) - 1)
    prompt, own_prompt = parts[0].input_logprobs, expected.prompt_logprobs.logprobs
    assert list(prompt.token_ids) == PROMPT
    assert not prompt.token_logprobs[0].HasField("value")
    assert not prompt.top_logprobs[0].values
    assert [each.value for each in prompt.token_logprobs[1:]] == list(own_prompt.chosen)
    assert [value for each in prompt.top_logprobs[1:] for value in each.values] == list(own_prompt.top)
    if stream:
        assert not output.completes[0].HasField("output_logprobs"), "they were in the chunks"


async def test_stops_are_reported_as_what_the_caller_asked_for(start_engine):
    engine = await start_engine()
    ids = list((await own_answer(engine, max_tokens=8)).choices[0].token_ids)
    [by_text] = (await engine.output(PROMPT, max_tokens=8, stop=[bytes(ids[2:4]).decode()])).completes
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", bytes(ids[2:4]).decode())
    assert list(by_text.output_ids) == ids[:4]
    [by_id] = (await engine.output(PROMPT, max_tokens=8, stop_token_ids=[ids[3]])).completes
    assert (by_id.finish_reason, by_id.matched_token_id) == ("stop", ids[3])


async def test_the_models_own_end_is_no_match(start_engine):
    engine = await start_engine(FakeExecutor(vocab_size=258, next_token=lambda history, sampling: 256))
    [complete] = (await engine.output(PROMPT)).completes
    assert (complete.finish_reason, list(complete.output_ids)) == ("stop", [256])
    assert complete.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_ends_the_stream_by_itself(start_engine, new_output, stream):
    engine = await start_engine(FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.002))
    call = engine.generate(PROMPT, stream=stream, request_id="mine", max_tokens=3000, n=2)
    await until(lambda: engine.service.engine.stats().running == 2)
    await engine.stub.Abort(vllm.AbortRequest(request_ids=["unknown", "mine", "mine"]))
    output = await new_output().read(call)
    assert {complete.finish_reason for complete in output.completes} == {"abort"}
    assert [complete.index for complete in output.completes] == [0, 1]
    assert engine.service.engine.stats().requests == 0
    await engine.stub.Abort(vllm.AbortRequest(request_ids=["mine"]))
    assert (await engine.output(PROMPT, max_tokens=2, request_id="mine")).completes[0].finish_reason == "length"


def letter(history, sampling):
    return ord("a") + len(history) % 26


async def test_an_abort_ends_only_the_tenants_own_requests(start_engine, keys):
    executor = FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.002)
    engine = await start_engine(executor, of("acme"), authenticator=keys)
    call = engine.generate(PROMPT, request_id="mine", max_tokens=3000)
    await until(lambda: engine.service.engine.stats().running == 1)
    await engine.stub.Abort(vllm.AbortRequest(request_ids=["mine"]), metadata=of("zenith"))
    assert engine.service.engine.stats().running == 1
    await engine.stub.Abort(vllm.AbortRequest(request_ids=["mine"]), metadata=of("acme"))
    await until(lambda: not engine.service.engine.stats().requests)
    call.cancel()


async def test_requests_without_an_id_cannot_be_aborted(start_engine, new_output):
    engine = await start_engine(FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.002))
    call = engine.generate(PROMPT, request_id="", max_tokens=20)
    await until(lambda: engine.service.engine.stats().running == 1)
    await engine.stub.Abort(vllm.AbortRequest(request_ids=["", "other"]))
    assert (await new_output().read(call)).completes[0].finish_reason == "length"


async def test_a_reset_leaves_no_row_running(start_engine):
    engine = await start_engine(FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.002))
    call = engine.generate(PROMPT, stream=False, max_tokens=3000)
    await until(lambda: engine.service.engine.stats().running == 1)
    call.cancel()
    await until(lambda: not engine.service.engine.stats().requests)


async def test_too_many_ids_to_abort_are_refused(start_engine):
    engine = await start_engine()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await engine.stub.Abort(vllm.AbortRequest(request_ids=["x"] * 1001))
    assert error.value.details() == "request_ids: at most 1,000; there are 1,001"


REFUSED: dict[str, dict[str, Any]] = {
    "mm_inputs": {"mm_inputs": vllm.MultimodalInputs()},
    "extra_mm_inputs": {"extra_mm_inputs": [vllm.MultimodalInputs()]},
    "media_refs": {"media_refs": vllm.MediaRefs()},
    "kv_transfer_params": {"kv_transfer_params": vllm.KvTransferParams()},
    "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
    "data_parallel_rank": {"data_parallel_rank": 1},
    "input": {"tokenized": None},
    "tokenized.input_ids[0]": {"tokenized": vllm.TokenizedInput(input_ids=[258])},
    "tokenized.input_ids": {"tokenized": vllm.TokenizedInput()},
    "request_id": {"request_id": "r" * 129},
    "sampling_params.structural_tag": {"sampling_params": vllm.SamplingParams(structural_tag="{}")},
    "sampling_params.logprobs": {"sampling_params": vllm.SamplingParams(logprobs=-1)},
    "sampling_params.prompt_logprobs": {"sampling_params": vllm.SamplingParams(prompt_logprobs=21)},
    "sampling_params.logit_bias": {"sampling_params": vllm.SamplingParams(logit_bias={-1: 1.0})},
    "sampling_params.top_p": {"sampling_params": vllm.SamplingParams(top_p=2)},
    "sampling_params.regex": {"sampling_params": vllm.SamplingParams(regex="(")},
    "sampling_params.json_schema": {"sampling_params": vllm.SamplingParams(json_schema="{")},
    "sampling_params.choice.choices": {"sampling_params": vllm.SamplingParams(choice=vllm.ChoiceConstraint())},
    "sampling_params.truncate_prompt_tokens": {"sampling_params": vllm.SamplingParams(truncate_prompt_tokens=-2)},
}


async def test_what_cannot_be_done_is_refused_by_its_name(start_engine, details_of):
    engine = await start_engine()
    for field, given in REFUSED.items():
        values: dict[str, Any] = {"tokenized": vllm.TokenizedInput(input_ids=PROMPT), **given}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engine.stub.Generate(vllm.GenerateRequest(**values)).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, field
        assert (error.value.details() or "").startswith(f"{field}: "), (field, error.value.details())
        [violation] = details_of(error.value)["BadRequest"].field_violations
        assert violation.field == field.rstrip(":")
        assert violation.description == error.value.details()


async def test_a_deadline_is_the_calls_status(start_engine):
    engine = await start_engine(FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.01))
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=PROMPT), stream=True)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in engine.stub.Generate(request, timeout=0.2):
            pass
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not engine.service.engine.stats().requests)


async def test_a_worker_that_dies_changes_no_token(start_engine, new_output):
    executor = FakeExecutor(vocab_size=258, next_token=letter, seconds_per_step=0.001)
    engine = await start_engine(executor)
    call = engine.generate(PROMPT, max_tokens=60)
    await until(lambda: engine.service.engine.stats().output_tokens > 5)
    executor.die()
    output = await new_output().read(call)
    assert output.token_ids() == [letter(range(len(PROMPT) + n), None) for n in range(60)]
    assert executor.num_starts == 2


class TestTranslation:
    """The translation of the contract's fields."""

    @staticmethod
    def start(**params):
        request = vllm.GenerateRequest(
            tokenized=vllm.TokenizedInput(input_ids=[1]), sampling_params=vllm.SamplingParams(**params)
        )
        return generation_start(request)

    def test_zeros_are_values_or_off(self):
        sampling = self.start().sampling
        assert not sampling.HasField("temperature"), "the model's own default"
        assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (1, 0, 0, 1)
        assert all(sampling.HasField(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty"))
        assert not sampling.HasField("max_tokens")
        assert not sampling.HasField("seed")
        assert sampling.n == 1

    def test_values_are_kept(self):
        given: dict[str, Any] = {
            "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "frequency_penalty": 0.5,
            "presence_penalty": -0.5, "repetition_penalty": 1.5, "max_tokens": 9, "min_tokens": 2, "stop": ["x"],
            "stop_token_ids": [4], "ignore_eos": True, "n": 2, "seed": 5, "logit_bias": {7: 1.5},
        }  # fmt: skip
        assert self.start(**given).sampling == pb.SamplingParams(**given)
        assert not self.start(seed=-1).sampling.HasField("seed"), "vLLM's value for a random one"
        assert self.start(seed=-2).sampling.seed == 2**32 - 2

    def test_only_as_many_biases_as_a_request_may_have_are_translated(self):
        with pytest.raises(ServiceError, match=r"^sampling_params\.logit_bias: at most 1,024 entries; it has 1,025"):
            self.start(logit_bias=dict.fromkeys(range(1025), 1.0))

    def test_constraints(self):
        for given, expected in (
            ({"json_schema": "{}"}, {"json_schema": "{}"}),
            ({"regex": "a+"}, {"regex": "a+"}),
            ({"grammar": "start: /a/"}, {"lark": "start: /a/"}),
            ({"grammar": 'root ::= "a"'}, {"gbnf": 'root ::= "a"'}),
            ({"json_object": True}, {"any_json": pb.AnyJson()}),
            ({"choice": vllm.ChoiceConstraint(choices=["a"])}, {"choices": pb.StringChoices(values=["a"])}),
        ):
            assert self.start(**given).constraint == pb.Constraint(**expected)
            first = self.start(**given, grammar_from_first_token=True).constraint
            assert first == pb.Constraint(**expected, start=pb.CONSTRAINT_START_FIRST_TOKEN)
        assert not self.start(json_object=False).HasField("constraint")

    def test_drafts_are_counted_once(self):
        encoder = OutputEncoder(self.start(n=2), False, (256,))
        batch = PendingMessage()
        for index in range(2):
            delta = SequenceDelta(index, [1, 2], "", end=StopMatch(EngineFinishReason.LENGTH))
            batch.deltas[0, index] = OutputForm(text=False, token_ids=True), [delta]
        counts = pb.Speculation(drafted_tokens=5, accepted_tokens=3)
        batch.finished.append(pb.Finished(speculation=counts, usage=pb.Usage(prompt_tokens=1)))
        first, second = [message.complete for message in encoder(batch)]
        assert (first.spec_draft_tokens, first.spec_accepted_tokens) == (5, 3)
        assert (second.spec_draft_tokens, second.spec_accepted_tokens) == (0, 0)


async def test_an_embedding_is_the_services_own(start_engine):
    engine = await start_engine()
    own = pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=PROMPT))])
    [expected] = [message.embeddings[0] async for message in engine.service.embedding.Embed(own)]
    response = await engine.stub.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=PROMPT)))
    assert response.embedding == expected.values
    assert (response.prompt_tokens, response.embedding_dim) == (len(PROMPT), len(expected.values))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await engine.stub.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[999])))
    assert (error.value.details() or "").startswith("tokenized.input_ids[0]: ")
