"""Embeddings, classes and scores in Python's clients, and the flags of ``penstock serve`` that configure them."""

import asyncio
import json
import math

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.clients import AsyncClient, Client, InvalidOption, RequestFailed
from penstock.clients.classification import build_classify_request, build_score_request
from penstock.clients.embeddings import build_embed_request
from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.models.checkpoint.info import HeadActivation
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.models.errors import ModelError
from penstock.scheduler.plan import Pooling
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import vector_of
from penstock.service.app.prepare import prepare
from penstock.service.config.command_line import parse_config
from penstock.service.config.flags import ConfigError

HIDDEN_SIZE = 8


def raw(token_ids):
    """The vector of a list of ids before it is scaled: the last one's."""
    return list(memoryview(vector_of(token_ids[-1:], HIDDEN_SIZE)).cast("f"))


def scaled(values):
    length = math.hypot(*values)
    return [value / length for value in values]


class TestClients:
    async def test_asynchronous(self, start_service):
        service = await start_service()
        async with AsyncClient(service.target) as client:
            answer = await client.embed(["ab", [1, 2, 3]], normalize=False, dimensions=2, timeout=120)
            assert answer.vectors == [raw(list(b"ab"))[:2], raw([1, 2, 3])[:2]]
            assert answer.usage.prompt_tokens == 5
            assert len(answer.request_id) == 26
            assert (await client.embed("ab")).vectors == [pytest.approx(scaled(raw(list(b"ab"))))]
            with pytest.raises(RequestFailed, match="dimensions: at most 8") as failed:
                await client.embed("ab", dimensions=9)
            assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT

    async def test_vectors_of_several_messages_are_one_answer(self, start_service):
        service = await start_service(FakeExecutor(vocab_size=258, hidden_size=1 << 17))
        async with AsyncClient(service.target) as client:
            answer = await client.embed([[1], [2], [3]], normalize=False)
        assert answer.vectors == [list(memoryview(vector_of([each], 1 << 17)).cast("f")) for each in (1, 2, 3)]
        assert (answer.usage.prompt_tokens, len(answer.request_id)) == (3, 26)

    async def test_synchronous(self, start_service):
        service = await start_service()
        with Client(service.target) as client:
            answer = await asyncio.to_thread(client.embed, ["ab", "c"], normalize=False)
        assert answer.vectors == [raw(list(b"ab")), raw(list(b"c"))]

    @pytest.mark.parametrize(
        ("inputs", "options", "field"),
        [
            (7, {}, "inputs"),
            (b"x", {}, "inputs"),
            ({"text": "x"}, {}, "inputs"),
            (["x", 7], {}, "inputs[1]"),
            (["x", [1, -1]], {}, "inputs[1]"),
            (["x", [True]], {}, "inputs[1]"),
            (["x", ["y"]], {}, "inputs[1]"),
            (["\ud800"], {}, "inputs[0]"),
            (["x" * (6 << 20)], {}, "inputs"),
            ("x", {"dimensions": "many"}, "dimensions"),
            ("x", {"normalise": True}, "normalise"),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, inputs, options, field):
        with pytest.raises(InvalidOption) as error:
            build_embed_request(inputs, options)
        assert error.value.field == field


HEAD = ClassificationHead(
    np.eye(1, HIDDEN_SIZE, k=1, dtype=np.float32), np.zeros(1, np.float32), ("relevant",), HeadActivation.SIGMOID
)
"""Its logit is the id of the last token."""


class TestClassification:
    async def test_asynchronous(self, start_service):
        service = await start_service(head=HEAD)
        async with AsyncClient(service.target) as client:
            scores = await client.score("ab", ["c", "d"], use_activation=False, timeout=120)
            assert (scores.scores, scores.usage.prompt_tokens, len(scores.request_id)) == ([99, 100], 6, 26)
            assert (await client.score(["a", "b"], ["c", "d"])).scores == [1, 1]
            classes = await client.classify(["ab", [1, 2, 3]], use_activation=False)
            assert (classes.labels, classes.values, classes.usage.prompt_tokens) == (["relevant"], [[98], [3]], 5)
            with pytest.raises(
                RequestFailed, match="queries: must be one, or one for each of the 3 documents"
            ) as failed:
                await client.score(["a", "b"], ["c", "d", "e"])
            assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT

    async def test_synchronous(self, start_service):
        service = await start_service(head=HEAD)
        with Client(service.target) as client:
            assert (await asyncio.to_thread(client.score, "a", ["b"], use_activation=False)).scores == [98]
            assert (await asyncio.to_thread(client.classify, "a", use_activation=False)).values == [[97]]

    @pytest.mark.parametrize(
        ("build", "arguments", "field"),
        [
            (build_score_request, ("a", "b", {}), "documents"),
            (build_score_request, ("a", 7, {}), "documents"),
            (build_score_request, (7, ["b"], {}), "queries"),
            (build_score_request, ("a", ["b", 7], {}), "documents"),
            (build_score_request, ("a", ["b"], {"normalize": True}), "normalize"),
            (build_score_request, ("a", ["b"], {"priority": "high"}), "priority"),
            (build_score_request, ("a", ["x" * (6 << 20)], {}), "documents"),
            (build_classify_request, (["a", 7], {}), "inputs[1]"),
            (build_classify_request, ("a", {"instruction": "b"}), "instruction"),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, build, arguments, field):
        with pytest.raises(InvalidOption) as error:
            build(*arguments)
        assert error.value.field == field


def prepared(model, *flags):
    """What ``penstock serve`` would start."""
    return prepare(parse_config([str(model), "--port=0", "--admin-listen=off", *flags]))


class TestHeads:
    @pytest.fixture
    def classifier(self, tmp_path):
        """The demo model with a head of two labels in place of its own."""
        for file in resolve_model("demo").iterdir():
            if file.suffix == ".json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        config |= {"architectures": [name], "id2label": {"0": "bad", "1": "good"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        tensors = load_file(resolve_model("demo") / "model.safetensors")
        tensors["score.weight"] = torch.ones(2, config["hidden_size"])
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "modules.json").write_text('[{"path": "", "type": "some.place.Classifier"}]')
        return tmp_path

    def test_the_models_own(self, classifier):
        server = prepared(classifier).server
        assert server.head is not None
        assert server.head.labels == ("bad", "good")
        assert server.head.weight.tolist() == np.ones_like(server.head.weight).tolist()
        assert not server.generates
        assert server.embedding == PoolingConfig(Pooling.LAST, normalize=False)
        dummy = prepared(classifier, "--load-format=dummy").server
        assert dummy.head is not None
        assert not dummy.head.weight.any()

    @pytest.mark.parametrize(
        ("flags", "problem"),
        [
            (["--score-tokens=a,b"], "--score-tokens: the model has a classification head"),
            (
                ["--speculative-config", '{"method": "ngram"}'],
                "--speculative-config: a model with a classification head",
            ),
        ],
        ids=["tokens", "drafts"],
    )
    def test_flags_that_it_excludes(self, classifier, flags, problem):
        with pytest.raises(ModelError) as refusal:
            prepared(classifier, *flags)
        assert str(refusal.value).startswith(problem)

    def test_that_of_two_tokens(self, caplog):
        server = prepared("demo", "--score-tokens=a,b").server
        assert server.head is not None
        assert (server.head.labels, server.generates) == (("b",), True)
        assert "no chat template with the roles query and document" in caplog.text
        assert prepared("demo").server.head is None

    def test_tokens_that_the_model_lacks(self):
        with pytest.raises(ModelError, match="--score-tokens: 'not one token' is not a token of the model"):
            prepared("demo", "--score-tokens=a,not one token")

    @pytest.mark.parametrize("tokens", ["yes", ",yes", "no,", "", "yes,yes"])
    def test_the_flag_takes_two(self, tokens):
        with pytest.raises(ConfigError, match="--score-tokens: must be two different tokens"):
            parse_config([f"--score-tokens={tokens}"])


class TestServe:
    @pytest.fixture
    def model(self, tmp_path):
        """The demo model, with files that say how it is to be embedded."""
        for file in resolve_model("demo").iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "some.place.Pooling"}]')
        return tmp_path

    def test_the_models_files_and_the_flag(self, model):
        def embedding(*flags):
            return prepared(model, *flags).server.embedding

        assert embedding() == PoolingConfig(Pooling.MEAN, normalize=False)
        assert embedding("--pooling", "cls") == PoolingConfig(Pooling.CLS, normalize=False)

    def test_the_flag_knows_three(self):
        with pytest.raises(ConfigError, match=r"--pooling: .*last.*mean.*cls"):
            parse_config(["--pooling", "max"])
