"""Drafts as operators and callers have them: the flag, a request's bound, and what is told of them."""

import asyncio
import dataclasses
import json
import re
import urllib.request

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import penstock.v1 as pb
from penstock.clients import AsyncClient
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import RowFailure
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig
from penstock.service.app.embedded import LocalServiceError, local_service
from penstock.service.app.prepare import prepare
from penstock.service.config.command_line import parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig
from penstock.service.config.speculative import MAX_DRAFTS, parse_speculation

NGRAM = SpeculationConfig(DraftMethod.NGRAM, 4)
SILENT = ServeConfig(port=0, admin_listen="off", metrics_listen="off")


# The flag -----------------------------------------------------------------------------------------------------------


def test_the_flag_has_vllms_keys():
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 1}'
    expected = SpeculationConfig(DraftMethod.NGRAM, 3, prompt_lookup_max=5, prompt_lookup_min=1)
    assert parse_config(["--speculative-config", text]).speculation == expected


def test_by_default_repetition_is_drafted_from():
    auto = SpeculationConfig(DraftMethod.AUTO, 15)
    assert ServeConfig().speculation == parse_config(['--speculative-config={"method": "auto"}']).speculation == auto
    assert ServeConfig(speculative_config="none").speculation is None
    assert ServeConfig(tensor_parallel_size=2).speculation is None, "all ranks must draft the same number of tokens"
    assert prepare(SILENT).server.scheduler.drafts_on_repetition
    for text in ("none", '{"method": "ngram"}'):
        prepared = prepare(dataclasses.replace(SILENT, speculative_config=text))
        assert not prepared.server.scheduler.drafts_on_repetition


async def test_output_is_the_same_by_default_and_without_drafts():
    """Greedy and sampled, from text that repeats itself and from text that does not."""
    repeating = "The cat sat on the mat and then it went home to sleep. " * 4
    requests = [(repeating, 0.0, 1), (repeating, 0.5, 2), ("Once upon a time", 1.0, 1)]

    async def complete(client):
        answers = [
            await client.complete(prompt, temperature=temperature, n=n, seed=1, max_tokens=64, ignore_eos=True)
            for prompt, temperature, n in requests
        ]
        accepted = [0 if one.speculation is None else one.speculation.accepted_tokens for one in answers]
        return [[choice.token_ids for choice in answer.choices] for answer in answers], accepted

    with local_service(speculative_config="none") as target:
        async with AsyncClient(target) as client:
            expected, accepted = await complete(client)
            assert accepted == [0, 0, 0]
    with local_service() as target:
        async with AsyncClient(target) as client:
            accepted = [0, 0, 0]
            while not accepted[0]:  # on a busy machine steps may vary so much that drafts do not seem to pay at first
                outputs, accepted = await complete(client)
                assert outputs == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        ('{"method": "auto", "prompt_lookup_max": 6}', SpeculationConfig(DraftMethod.AUTO, 15, prompt_lookup_max=6)),
        ('{"method": "ngram"}', SpeculationConfig(DraftMethod.NGRAM, 8)),
        ('{"method": "suffix"}', SpeculationConfig(DraftMethod.SUFFIX, 16)),
        ('{"method": "ngram", "prompt_lookup_max": 1}', SpeculationConfig(DraftMethod.NGRAM, 8, None, 1, 1)),
        ('{"method": "ngram", "prompt_lookup_min": 9}', SpeculationConfig(DraftMethod.NGRAM, 8, None, 9, 9)),
        ('{"method": "draft_model", "model": "m"}', SpeculationConfig(DraftMethod.DRAFT_MODEL, 5, "m")),
        ('{"method": "eagle3", "model": "m"}', SpeculationConfig(DraftMethod.EAGLE3, 5, "m")),
        (
            '{"method": "suffix", "suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0}',
            SpeculationConfig(
                DraftMethod.SUFFIX, 16, suffix_decoding_max_spec_factor=2, suffix_decoding_min_token_prob=0
            ),
        ),
    ],
)
def test_each_method_has_its_default(text, expected):
    assert parse_speculation(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngram", "is not valid JSON .*write it as"),
        ("[" * 100_000, "is not valid JSON"),
        ('["ngram"]', "must be an object, such as"),
        ("{}", "method: is required; there are auto, ngram, suffix, draft_model, eagle3, mtp"),
        (
            '{"method": "medusa"}',
            "method: there is no 'medusa'; there are auto, ngram, suffix, draft_model, eagle3, mtp",
        ),
        ('{"method": "mtp", "model": "m"}', "model: only applies to draft_model and eagle3"),
        ('{"method": ["ngram"]}', "method: there is no"),
        ('{"method": "ngram", "tokens": 3}', "tokens: there is no such key; ngram has num_speculative_tokens, prompt_"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: must be .* 1 to 32; it is 0"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "num_speculative_tokens: must be .* 1 to 32; it is 33"),
        ('{"method": "ngram", "num_speculative_tokens": 2.5}', "num_speculative_tokens: must be a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens: must be a whole number"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": NaN}', "suffix_decoding_min_token_prob: must be a n"),
        (
            '{"method": "suffix", "prompt_lookup_max": 3}',
            "prompt_lookup_max: only applies to auto and ngram; leave it out",
        ),
        ('{"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}', "prompt_lookup_min: must be at most"),
        ('{"method": "ngram", "model": "m"}', "model: only applies to draft_model and eagle3"),
        ('{"method": "eagle3"}', "model: is required by eagle3; give a directory"),
        ('{"method": "draft_model", "model": 3}', "model: must be a directory"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(ConfigError, match=rf"^--speculative-config: {says}"):
        parse_config([f"--speculative-config={text}"])


def test_a_file_has_it_as_keys_or_as_text(tmp_path):
    path = tmp_path / "serve.yaml"
    for value in ({"method": "ngram", "num_speculative_tokens": 3}, '{"method": "ngram", "num_speculative_tokens": 3}'):
        path.write_text(yaml.safe_dump({"speculative-config": value}))
        assert parse_config(["--config", str(path)]).speculation == SpeculationConfig(DraftMethod.NGRAM, 3)


def test_python_has_it_as_a_dict():
    with pytest.raises(LocalServiceError, match="there is no 'medusa'"):
        local_service(speculative_config={"method": "medusa"}).__enter__()


def test_worker_and_server_get_the_same_speculation_config():
    config = ServeConfig(port=0, admin_listen="off", metrics_listen="off", speculative_config='{"method": "suffix"}')
    prepared = prepare(config)
    assert prepared.worker.speculation == prepared.server.speculation == SpeculationConfig(DraftMethod.SUFFIX, 16)


def test_a_drafter_that_is_not_there_is_refused():
    text = json.dumps({"method": "draft_model", "model": "/nowhere"})
    config = ServeConfig(port=0, admin_listen="off", metrics_listen="off", speculative_config=text)
    with pytest.raises(Exception, match="/nowhere"):
        prepare(config)


# A request ----------------------------------------------------------------------------------------------------------


def request(max_tokens=40, **fields):
    sampling = pb.SamplingParams(max_tokens=max_tokens, n=fields.pop("n", None))
    return pb.CompleteRequest(start=pb.GenerationStart(text="0123456789", sampling=sampling, **fields))


@pytest.fixture
async def controller(start_service):
    """A service that drafts four tokens a step."""
    return await start_service(speculation=NGRAM, metrics_listen="127.0.0.1:0", admin_listen="127.0.0.1:0")


async def test_drafts_change_when_tokens_come_and_never_which(controller, start_service):
    plain = await start_service()
    expected = await plain.generation.Complete(request(n=2))
    answer = await controller.generation.Complete(request(n=2))
    assert [choice.text for choice in answer.choices] == [choice.text for choice in expected.choices]
    assert controller.engine.stats().steps < plain.engine.stats().steps
    assert not expected.finished.HasField("speculation")
    told = answer.finished.speculation
    assert 0 < told.accepted_tokens < told.drafted_tokens
    assert (sum(told.drafted_at), sum(told.accepted_at)) == (told.drafted_tokens, told.accepted_tokens)
    assert len(told.drafted_at) == 4
    # The first token of each choice comes with its prompt.
    assert told.accepted_tokens + told.steps <= answer.finished.usage.output_tokens - 2


@pytest.mark.parametrize(("asked", "most"), [(None, 4), (0, 0), (2, 2), (MAX_DRAFTS, 4)])
async def test_a_request_may_have_fewer(controller, asked, most):
    answer = await controller.generation.Complete(request(max_draft_tokens=asked))
    assert len(answer.finished.speculation.drafted_at) == most


async def test_more_drafts_than_the_maximum_are_refused(controller, details_of):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await controller.generation.Complete(request(max_draft_tokens=MAX_DRAFTS + 1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(caught.value)["BadRequest"].field_violations[0].field == "max_draft_tokens"


async def test_a_prediction_is_drafted_from_without_any_flag_unless_another_turns_it_off(start_service):
    prediction = pb.Prediction(text="something")
    for flags, expected in (({}, 32), ({"drafts_predictions": False}, 0), ({"speculation": NGRAM}, 32)):
        service = await start_service(**flags)
        speculation = (await service.generation.Complete(request(prediction=prediction))).finished.speculation
        assert len(speculation.drafted_at) == expected
        assert speculation.predicted_tokens == speculation.drafted_tokens
        assert speculation.accepted_predicted_tokens == speculation.accepted_tokens


def test_the_worker_is_told_whether_it_drafts_from_predictions():
    for expected in (True, False):
        config = ServeConfig(port=0, admin_listen="off", metrics_listen="off", enable_predictions=expected)
        prepared = prepare(config)
        assert prepared.worker.drafts_predictions is prepared.server.drafts_predictions is expected
    assert not parse_config(["--no-enable-predictions"]).enable_predictions


async def test_a_service_without_drafts_takes_the_bound(start_service):
    service = await start_service()
    answer = await service.generation.Complete(request(max_draft_tokens=8))
    assert not answer.finished.HasField("speculation")


# What is told -------------------------------------------------------------------------------------------------------


async def test_all_reports_of_drafts_agree(controller, caplog):
    caplog.set_level("INFO", logger="penstock")
    answer = await controller.generation.Complete(request())
    told = answer.finished.speculation
    page = await asyncio.to_thread(_read, f"http://{controller.server.metrics_target}/metrics")
    values: dict[str, float] = {}
    positions: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if "position" in sample.labels:
                positions.setdefault(sample.name, {})[sample.labels["position"]] = sample.value
            else:
                values[sample.name] = sample.value
    assert values["penstock_drafts_total"] == values["vllm:spec_decode_num_drafts_total"] == told.steps
    assert values["vllm:spec_decode_num_draft_tokens_total"] == told.drafted_tokens
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == told.accepted_tokens
    accepted_at = {str(place): count for place, count in enumerate(told.accepted_at)}
    assert positions["penstock_accepted_tokens_total"] == accepted_at
    assert positions["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted_at
    assert positions["penstock_drafted_tokens_total"] == dict(zip("0123", told.drafted_at, strict=True))

    stats = await anext(aiter(controller.admin.WatchStats(pb.WatchStatsRequest())))
    assert (stats.drafts, stats.drafted_tokens, stats.accepted_tokens) == (
        told.steps,
        told.drafted_tokens,
        told.accepted_tokens,
    )
    [record] = [record for record in caplog.records if record.name == "penstock.service.telemetry.request_end"]
    data = vars(record)["data"]
    assert (data["drafted_tokens"], data["accepted_tokens"]) == (told.drafted_tokens, told.accepted_tokens)

    explained = await controller.admin.Explain(pb.ExplainRequest(request_id=answer.request_id))
    [decoded] = [entry for entry in explained.timeline if entry.kind == pb.TIMELINE_KIND_DECODED]
    drafts = pb.DraftDetail(drafted_tokens=told.drafted_tokens, accepted_tokens=told.accepted_tokens)
    assert decoded.drafts == drafts


async def test_draft_statistics_are_logged_periodically(start_service, caplog):
    caplog.set_level("INFO", logger="penstock.service.telemetry.stats_log")
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002)
    service = await start_service(executor, speculation=NGRAM, stats_interval_s=0.05)
    await service.generation.Complete(request(max_tokens=200))
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.service.telemetry.stats_log"]
    assert any(re.search(r"; drafted \d+ tokens/s, accepted \d+ %$", line) for line in lines)


async def test_the_model_is_described_with_it(controller, start_service):
    model = (await controller.model.GetModel(pb.GetModelRequest())).model
    assert (model.speculation, model.limits.max_draft_tokens) == ("ngram", 4)
    plain = (await (await start_service()).model.GetModel(pb.GetModelRequest())).model
    assert (plain.speculation, plain.limits.max_draft_tokens) == ("", 0)


# A grammar that cannot be followed ----------------------------------------------------------------------------------


class FailingExecutor(FakeExecutor):
    """Its worker gives a row up with its tenth token."""

    kind = RowFailure.COSTLY

    async def results(self):
        async for result in super().results():
            for row in result.rows:
                if row.num_computed >= 18:
                    row.failure, row.failure_kind = "the grammar is too costly", self.kind
            yield result


@pytest.mark.parametrize(("kind", "reason"), [(RowFailure.COSTLY, "GRAMMAR"), (RowFailure.SLOW, "SLOW_CONSTRAINT")])
async def test_a_grammar_too_costly_to_follow_ends_its_request(start_service, details_of, new_reading, kind, reason):
    """What it had brought by then stays."""
    executor = FailingExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"))
    executor.kind = kind
    service = await start_service(executor, SchedulerConfig())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.generation.Complete(request())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the grammar is too costly"
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
    details = details_of(caught.value)
    assert details["ErrorInfo"].reason == reason
    assert details["Finished"].reason == pb.FINISH_REASON_ERROR

    call = service.generation.Generate()
    start = pb.GenerationStart(ref=1, text="0123456789", sampling=pb.SamplingParams(max_tokens=40))
    await call.write(pb.GenerateRequest(start=start))
    await call.done_writing()
    outcome = (await new_reading().read(call)).outcomes[1]
    [finished] = outcome.finished
    assert finished.status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert len(outcome.text) == finished.usage.output_tokens >= 9


def _read(url):
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.read().decode()
