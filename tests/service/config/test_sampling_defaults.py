"""Sampling defaults of a model's generation_config.json: which apply, to what, and what is wrong with a file."""

import json
import logging
import time
from typing import Any

import pytest

import penstock.v1 as pb
from penstock.models.errors import ModelError
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.prepare import prepare
from penstock.service.config.command_line import parse_config
from penstock.service.config.field_rules import ModelLimits
from penstock.service.config.flags import ConfigError
from penstock.service.config.limits import Validator
from penstock.service.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.grammar_check import GrammarChecks
from penstock.service.requests.preparation import Origin
from penstock.service.text.tokenizer import TokenizerPool

ALL: dict[str, Any] = {
    "temperature": 0.5, "top_k": 20, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": -0.5,
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """Writes a model's generation_config.json, which is all of the model that is read here."""

    def write(values, name="model"):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        text = values if isinstance(values, str) else json.dumps(values)
        (directory / "generation_config.json").write_text(text)
        return directory

    return write


class TestReading:
    def test_what_the_file_names_is_a_default_and_nothing_else_is(self, model):
        named = {**ALL, "max_new_tokens": 30, "do_sample": True, "eos_token_id": 7, "num_beams": 4}
        defaults = read_sampling_defaults(model(named), "auto")
        assert defaults.sampling == pb.SamplingParams(max_tokens=30, **ALL)
        assert defaults.token_limit is None

    @pytest.mark.parametrize("values", [{}, {"temperature": None, "top_k": None}, {"eos_token_id": [1, 2]}])
    def test_a_file_without_them_changes_nothing(self, model, values):
        defaults = read_sampling_defaults(model(values), "auto")
        assert (defaults, str(defaults)) == (SamplingDefaults(), "")

    def test_no_file_changes_nothing(self, tmp_path):
        assert read_sampling_defaults(tmp_path, "auto") == SamplingDefaults()

    @pytest.mark.parametrize("source", ["none", "vllm"])
    def test_none_takes_none_and_reads_nothing(self, model, source):
        assert read_sampling_defaults(model("{"), source) == SamplingDefaults()

    @pytest.mark.parametrize("at", ["", "generation_config.json"])
    def test_another_file_takes_its_place_and_limits_every_request(self, model, at):
        other = model({"top_k": 3, "max_new_tokens": 9}, "other")
        defaults = read_sampling_defaults(model(ALL), str(other / at))
        assert defaults.sampling == pb.SamplingParams(top_k=3, max_tokens=9)
        assert defaults.token_limit == 9

    def test_what_overrides_goes_before_the_file(self, model):
        override = json.dumps({"top_k": 3, "max_new_tokens": 9})
        defaults = read_sampling_defaults(model({**ALL, "max_new_tokens": 30}), "auto", override)
        assert defaults.sampling == pb.SamplingParams(max_tokens=9, **ALL | {"top_k": 3})
        assert defaults.token_limit == 9
        assert read_sampling_defaults(model(ALL), "none", override).sampling == pb.SamplingParams(top_k=3, max_tokens=9)

    def test_a_model_that_does_not_sample_is_greedy_unless_the_request_or_the_operator_has_a_temperature(self, model):
        defaults = read_sampling_defaults(model({**ALL, "do_sample": False}), "auto")
        assert defaults.sampling == pb.SamplingParams(**ALL | {"temperature": 0})
        assert defaults.applied(pb.SamplingParams(temperature=0.5)).temperature == 0.5
        override = read_sampling_defaults(model({"do_sample": False}), "auto", '{"temperature": 0.25}')
        assert override.sampling == pb.SamplingParams(temperature=0.25)
        assert not read_sampling_defaults(model({"do_sample": False}), "none").sampling.ListFields()

    def test_minus_one_is_no_top_k(self, model):
        assert read_sampling_defaults(model({"top_k": -1}), "auto").sampling == pb.SamplingParams(top_k=0)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("{", "is not valid JSON"),
            ("[1]", "is not a JSON object"),
            ('{"temperature": "hot"}', 'temperature must be a number; it is "hot"'),
            ('{"temperature": -1}', "temperature must be at least 0 and at most 100; it is -1"),
            ('{"temperature": NaN}', "temperature must be at least 0"),
            ('{"temperature": true}', "temperature must be a number; it is true"),
            ('{"top_k": 1.5}', "top_k must be a whole number; it is 1.5"),
            ('{"top_k": -2}', "top_k must be at least 0"),
            ('{"top_p": 1.5}', "top_p must be at least 0 and at most 1; it is 1.5"),
            ('{"min_p": [0.1]}', "min_p must be a number"),
            ('{"repetition_penalty": 0}', "repetition_penalty must be at least 0.01"),
            ('{"max_new_tokens": 0}', "max_new_tokens must be at least 1"),
            ('{"do_sample": "no"}', 'do_sample must be true or false; it is "no"'),
        ],
    )
    def test_what_is_wrong_names_the_file_and_the_field(self, model, text, problem):
        directory = model(text)
        with pytest.raises(ModelError, match=r"generation_config\.json: ") as error:
            read_sampling_defaults(directory, "auto")
        assert str(directory / "generation_config.json") in str(error.value)
        assert problem in str(error.value)

    def test_a_path_that_is_not_there_is_an_error(self, model, tmp_path):
        with pytest.raises(ModelError, match=r"nowhere.*is missing"):
            read_sampling_defaults(model({}), str(tmp_path / "nowhere"))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("{", "is not JSON"),
            ("[]", "must be a JSON object"),
            ('{"temprature": 1}', "there is no key temprature; there are temperature, top_k"),
            ('{"top_p": 2}', "top_p must be at least 0 and at most 1"),
        ],
    )
    def test_errors_in_the_flag_are_reported_at_once(self, text, problem):
        with pytest.raises(ConfigError, match="--override-generation-config: ") as error:
            parse_config(["--override-generation-config", text])
        assert problem in str(error.value)


@pytest.fixture
def convert(byte_tokenizer):
    pool = TokenizerPool(byte_tokenizer, block_size=16, max_prompt_tokens=4095)

    async def make(defaults, **sampling):
        validator = Validator(ModelLimits(byte_tokenizer.vocab_size, 4096))
        request_builder = RequestBuilder(
            validator, pool, "m", 4096, max_retain_s=1, grammars=GrammarChecks(byte_tokenizer), defaults=defaults
        )
        start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(**sampling))
        request_builder.check(start)
        origin = Origin("id", "t", time.monotonic())
        return (await request_builder.prepare(start, origin, lambda event: None)).request

    yield make
    pool.close()


DEFAULTS = SamplingDefaults(pb.SamplingParams(max_tokens=30, **ALL))


class TestRequests:
    async def test_a_request_that_sets_nothing_gets_the_defaults(self, convert):
        request = await convert(DEFAULTS)
        assert {name: getattr(request.sampling, name) for name in ALL} == ALL
        assert (request.max_tokens, request.max_tokens_is_default) == (30, True)

    @pytest.mark.parametrize("name", ALL)
    async def test_what_a_request_sets_counts_whatever_its_value(self, convert, name):
        request = await convert(DEFAULTS, **{name: NEUTRAL[name]})
        expected = ALL | {name: NEUTRAL[name]}
        assert {each: getattr(request.sampling, each) for each in ALL} == expected

    async def test_max_tokens_of_the_file_is_only_a_default(self, convert):
        assert (await convert(DEFAULTS, max_tokens=100)).max_tokens == 100
        assert (await convert(SamplingDefaults(pb.SamplingParams(max_tokens=10**6)))).max_tokens == 4091

    async def test_a_limit_cuts_every_request(self, convert):
        limited = SamplingDefaults(pb.SamplingParams(max_tokens=9), token_limit=9)
        for asked, gets in ((None, 9), (5, 5), (9, 9), (100, 9), (10**6, 9)):
            assert (await convert(limited, max_tokens=asked)).max_tokens == gets

    async def test_top_p_0_takes_the_likeliest_token_from_either(self, convert):
        for defaults, sampling in ((None, {"top_p": 0}), (SamplingDefaults(pb.SamplingParams(top_p=0)), {})):
            chosen = (await convert(defaults, temperature=0.7, **sampling)).sampling
            assert (chosen.temperature, chosen.top_p) == (0.0, 1.0)
        assert (await convert(None, top_p=1e-30)).sampling.temperature == 1.0


async def test_the_model_reports_them(start_service):
    service = await start_service(sampling_defaults=DEFAULTS)
    model = (await service.model.GetModel(pb.GetModelRequest())).model
    assert model.sampling_defaults == DEFAULTS.sampling
    plain = (await (await start_service()).model.GetModel(pb.GetModelRequest())).model
    assert not plain.sampling_defaults.ListFields()


async def test_they_reach_the_engine(start_service):
    seen = []

    def note(history, sampling):
        seen.append(sampling)
        return ord("x")

    service = await start_service(FakeExecutor(vocab_size=258, next_token=note), sampling_defaults=DEFAULTS)
    start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(max_tokens=1, top_k=0))
    await service.generation.Complete(pb.CompleteRequest(start=start))
    assert (seen[0].temperature, seen[0].top_k) == (0.5, 0)


def test_the_start_logs_them_and_the_flags_change_them(caplog):
    def defaults(*flags):
        return prepare(parse_config(["--port=0", "--admin-listen=off", "--metrics-listen=off", *flags])).server

    with caplog.at_level(logging.INFO, "penstock.service.app.prepare"):
        assert defaults().sampling_defaults.sampling == pb.SamplingParams(temperature=0.7, top_p=0.9)
    [line] = [record.getMessage() for record in caplog.records if "sampling defaults" in record.getMessage()]
    assert line.endswith("temperature 0.7, top_p 0.9")
    caplog.clear()
    with caplog.at_level(logging.INFO, "penstock.service.app.prepare"):
        assert defaults("--generation-config=none").sampling_defaults == SamplingDefaults()
    assert not [record for record in caplog.records if "sampling defaults" in record.getMessage()]
    changed = defaults("--override-generation-config", '{"temperature": 0.25}').sampling_defaults
    assert changed.sampling == pb.SamplingParams(temperature=0.25, top_p=0.9)
