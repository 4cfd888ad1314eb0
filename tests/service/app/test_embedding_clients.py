"""Embeddings as Python's clients have them, and as ``penstock serve`` is told to make them."""

import asyncio
import math

import grpc
import pytest

from penstock.clients import AsyncClient, Client, InvalidOption, RequestFailed
from penstock.clients.embeddings import build_embed_request
from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.plan import Pooling
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
            return prepare(parse_config([str(model), "--port=0", "--admin-listen=off", *flags])).server.embedding

        assert embedding() == PoolingConfig(Pooling.MEAN, normalize=False)
        assert embedding("--pooling", "cls") == PoolingConfig(Pooling.CLS, normalize=False)

    def test_the_flag_knows_three(self):
        with pytest.raises(ConfigError, match=r"--pooling: .*last.*mean.*cls"):
            parse_config(["--pooling", "max"])
