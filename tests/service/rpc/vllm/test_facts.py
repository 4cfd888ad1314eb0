"""The contract's other calls: those that a gateway makes before it sends requests, and those of operators."""

import asyncio
import hashlib
import io
import json
import shutil
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common, vllm_engine_pb2 as vllm
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.rpc.foreign.contracts import ModelFiles

PROMPT = list(b"a prompt of more than two blocks of sixteen tokens")


async def test_the_model(start_engine, byte_tokenizer_path, tmp_path):
    config = {"model_type": "tiny", "architectures": ["TinyForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    defaults = SamplingDefaults(pb.SamplingParams(temperature=0.7, top_k=20, max_tokens=5))
    files = ModelFiles(tmp_path, byte_tokenizer_path)
    engine = await start_engine(model_files=files, sampling_defaults=defaults)
    info = await engine.stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.model_type, list(info.architectures)) == ("bytes", "tiny", ["TinyForCausalLM"])
    assert info.is_generation
    assert not info.supports_vision
    assert (info.vocab_size, info.max_context_length, list(info.eos_token_ids)) == (258, 4096, [256])
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.7, "top_k": 20}


async def test_the_server(start_engine):
    engine = await start_engine()
    info = await engine.stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.server_type, info.block_size, info.max_num_seqs) == ("vllm-grpc", 16, 256)
    assert info.constrained_decoding_start == "first_token"
    assert not info.is_paused
    assert (await engine.stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    engine.service.engine.drain()
    assert (await engine.stub.GetServerInfo(vllm.GetServerInfoRequest())).is_paused
    health = await engine.stub.HealthCheck(vllm.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "draining")


async def test_the_tokenizer_is_a_zip_with_its_hash_on_the_last_chunk(start_engine, byte_tokenizer_path):
    engine = await start_engine()
    chunks = [chunk async for chunk in engine.stub.GetTokenizer(common.GetTokenizerRequest())]
    content = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(content).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("tokenizer.json") == (byte_tokenizer_path / "tokenizer.json").read_bytes()
        template = json.loads((byte_tokenizer_path / "tokenizer_config.json").read_text())["chat_template"]
        assert archive.read("chat_template.jinja").decode() == template
    again = [chunk async for chunk in engine.stub.GetTokenizer(common.GetTokenizerRequest())]
    assert again == chunks


async def test_the_files_beside_a_converted_tokenizer_are_the_models(start_engine, byte_tokenizer_path, tmp_path):
    converted, model = tmp_path / "converted", tmp_path / "model"
    converted.mkdir()
    model.mkdir()
    shutil.copy(byte_tokenizer_path / "tokenizer.json", converted)
    names = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
    for name in names:
        (model / name).write_text("{}")
    engine = await start_engine(model_files=ModelFiles(model, converted))
    chunks = [chunk async for chunk in engine.stub.GetTokenizer(common.GetTokenizerRequest())]
    with zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))) as archive:
        assert set(archive.namelist()) == {"tokenizer.json", "chat_template.jinja", *names}


async def test_a_flush_waits_until_nothing_runs(start_engine):
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: 97, seconds_per_step=0.002)
    engine = await start_engine(executor)
    log = engine.service.engine.kv_events
    call = engine.generate(PROMPT, max_tokens=3000)
    await until(lambda: set(log.hashes))
    refused = await engine.stub.FlushCache(common.FlushCacheRequest())
    assert (refused.success, refused.message) == (False, "1 requests are live; call again with a longer timeout_s")
    waiting = asyncio.ensure_future(engine.stub.FlushCache(common.FlushCacheRequest(timeout_s=60)))
    call.cancel()
    assert (await waiting).success
    assert not set(log.hashes)
    for wrong in (-1, float("nan"), float("inf"), 601):
        with pytest.raises(grpc.aio.AioRpcError, match="timeout_s: must be 0 to 600 seconds"):
            await engine.stub.FlushCache(common.FlushCacheRequest(timeout_s=wrong))


async def test_there_is_no_profiler(start_engine):
    engine = await start_engine()
    start, stop = common.StartProfileRequest(), common.StopProfileRequest()
    for call in (engine.stub.StartProfile(start), engine.stub.StopProfile(stop)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_the_flag_there_is_no_such_service(start_engine):
    engine = await start_engine(contracts=())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await engine.stub.HealthCheck(vllm.HealthCheckRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
