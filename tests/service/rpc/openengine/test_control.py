"""The contract's other calls: facts, load, health and rights."""

from typing import Any

import grpc
import pytest
from waiting import until

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.config.contracts import CONTRACTS
from penstock.service.config.kv_events import KvEventsConfig

pytest.importorskip("openengine.v1", reason="the bindings of OpenEngine are not installed (docs/openengine.md)")
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openengine.v1 import generation_pb2, kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, openengine_pb2, server_pb2

PROMPT = list(b"a prompt of more than two blocks of sixteen tokens")
READY, NOT_READY = lifecycle_pb2.HEALTH_STATE_READY, lifecycle_pb2.HEALTH_STATE_NOT_READY


async def test_the_server(start_engine):
    engine = await start_engine(scheduler=SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=99))
    info = await engine.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
    assert len(info.schema_release) == 32
    assert (info.engine_name, info.engine_role) == ("penstock", server_pb2.ENGINE_ROLE_AGGREGATED)
    assert list(info.supported_models) == ["bytes"]
    parallelism = info.parallelism
    sizes = (parallelism.tensor_parallel_size, parallelism.pipeline_parallel_size, parallelism.data_parallel_size)
    assert sizes == (1, 1, 1)
    capacity = info.capacity
    assert (capacity.kv_block_size, capacity.total_kv_blocks) == (16, 1024)
    assert (capacity.max_running_requests, capacity.max_batched_tokens) == (7, 99)
    assert info.kv_connector.HasField("enabled")
    assert not info.kv_connector.enabled
    again = await engine.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    other = await (await start_engine()).control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert info.instance_id == again.instance_id != other.instance_id


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
async def test_the_model_and_what_generate_supports(start_engine, policy):
    engine = await start_engine(scheduler=SchedulerConfig(policy=policy))
    info = await engine.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="bytes"))
    assert (info.model_id, info.max_context_length, info.max_output_tokens) == ("bytes", 4096, 4095)
    assert info.supports_text_input
    assert info.supports_token_ids_input
    assert info.generation.supports_priority == (policy is Policy.PRIORITY)
    assert info.generation.max_num_sequences == 64
    assert info.generation.output_logprobs.max_top_n == info.generation.prompt_logprobs.max_top_n == 20
    for name in ("supports_lora", "supports_multimodal"):
        assert info.HasField(name)
        assert not getattr(info, name)
    for model, code in (("", grpc.StatusCode.INVALID_ARGUMENT), ("another", grpc.StatusCode.NOT_FOUND)):
        with pytest.raises(grpc.aio.AioRpcError, match="the served model is bytes") as error:
            await engine.control.GetModelInfo(model_pb2.GetModelInfoRequest(model=model))
        assert error.value.code() is code


async def test_the_limits_of_the_model_are_those_of_generate(start_engine):
    engine = await start_engine()
    limits = (await engine.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="bytes"))).generation

    def request(num_sequences, top_n):
        selection = generation_pb2.CandidateTokenSelection(top_n=top_n)
        return {
            "sampling": generation_pb2.SamplingParams(num_sequences=num_sequences),
            "response": generation_pb2.ResponseOptions(output_candidates=selection, prompt_candidates=selection),
            "stopping": generation_pb2.StoppingOptions(max_tokens=1),
        }

    most = limits.max_num_sequences, limits.output_logprobs.max_top_n
    output = await engine.output([1, 2], **request(*most))
    assert (len(output.finished), len(output.tokens[0][0].candidates)) == most
    for beyond in ((most[0] + 1, most[1]), (most[0], most[1] + 1)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engine.output([1, 2], **request(*beyond))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_load(start_engine):
    executor = FakeExecutor(vocab_size=258, num_blocks=8, seconds_per_step=3600, max_num_seqs=2)
    engine = await start_engine(executor)
    idle = await engine.control.GetLoad(server_pb2.GetLoadRequest())
    assert idle.HasField("running_requests")
    assert (idle.running_requests, idle.queued_requests, idle.used_kv_blocks, idle.total_kv_blocks) == (0, 0, 0, 8)
    assert not idle.ranks
    calls = [engine.generate([*range(start, start + 40)]) for start in (0, 50, 100)]
    await until(lambda: engine.service.engine.stats().requests == 3 and engine.service.engine.stats().running)
    load = await engine.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True))
    assert load.running_requests + load.queued_requests == 3
    assert load.used_kv_blocks == 3 * load.running_requests
    assert load.waiting_tokens == 40 * load.queued_requests
    [rank] = load.ranks
    assert (rank.data_parallel_rank, rank.used_kv_blocks) == (0, load.used_kv_blocks)
    assert load.timestamp_unix_nanos > idle.timestamp_unix_nanos
    for call in calls:
        call.cancel()


async def health(engine, **fields):
    return await engine.control.Health(lifecycle_pb2.HealthRequest(**fields))


async def test_the_health_and_its_checks(start_engine):
    engine = await start_engine()
    response = await health(engine, model="bytes", role=server_pb2.ENGINE_ROLE_AGGREGATED)
    assert response.state == READY
    assert [check.name for check in response.checks] == ["grpc", "scheduler", "model", "role"]
    for wrong in ({"model": "another"}, {"role": server_pb2.ENGINE_ROLE_DECODE}):
        response = await health(engine, **wrong)
        assert response.state == NOT_READY
        assert [check.state for check in response.checks] == [READY, READY, NOT_READY]
    with pytest.raises(grpc.aio.AioRpcError, match="include_inference_probe: ") as error:
        await health(engine, include_inference_probe=True)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_health_while_the_service_drains(start_engine, new_output):
    engine = await start_engine(FakeExecutor(vocab_size=258, seconds_per_step=0.002))
    call = engine.generate(PROMPT)
    await until(lambda: engine.service.engine.stats().running == 1)
    engine.service.engine.drain()
    response = await health(engine)
    assert response.state == NOT_READY
    assert [(check.name, check.state, check.message) for check in response.checks] == [
        ("grpc", READY, ""),
        ("scheduler", NOT_READY, "draining"),
    ]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await engine.output(PROMPT)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    call.cancel()


async def test_the_health_while_the_worker_is_replaced(start_engine):
    executor = FakeExecutor(vocab_size=258, seconds_per_step=0.002)
    engine = await start_engine(executor)
    executor.may_start.clear()
    executor.die()
    await until(lambda: engine.service.engine.state.name == "RECOVERING")
    assert (await health(engine)).state == lifecycle_pb2.HEALTH_STATE_DEGRADED
    executor.may_start.set()
    await until(lambda: engine.service.engine.state.name == "SERVING")
    assert (await health(engine)).state == READY


async def test_each_service_has_its_readiness(start_engine):
    engine = await start_engine()
    names = {service.full_name for service in openengine_pb2.DESCRIPTOR.services_by_name.values()}
    assert set(CONTRACTS["openengine"].services) == names
    stub = health_pb2_grpc.HealthStub(engine.service.channel)
    for name in names:
        response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_adapters_are_validated_as_in_our_own_contract(start_engine):
    long = lora_pb2.LoraAdapter(lora_name="support", source_path="/" + "p" * 4096)
    control = (await start_engine()).control
    for call, name in (
        (control.LoadLora(lora_pb2.LoadLoraRequest()), "adapter.lora_name: "),
        (control.LoadLora(lora_pb2.LoadLoraRequest(adapter=long)), "adapter.source_path: "),
        (control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="n" * 257)), "lora_name: "),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert (error.value.code().name, str(error.value.details())[: len(name)]) == ("INVALID_ARGUMENT", name)


async def test_without_slots_there_are_no_adapters(start_engine):
    control = (await start_engine()).control
    assert not (await control.ListLoras(lora_pb2.ListLorasRequest())).adapters
    adapter = lora_pb2.LoraAdapter(lora_name="support", source_path="/adapters/support")
    for call, code, name in (
        (control.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter)), "INVALID_ARGUMENT", "adapter.lora_name: "),
        (control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="support")), "NOT_FOUND", "lora_name: "),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert (error.value.code().name, str(error.value.details())[: len(name)]) == (code, name)


async def test_an_adapter_is_loaded_selected_listed_and_unloaded(start_engine):
    executor: Any = FakeExecutor(vocab_size=258, max_loras=2, next_token=lambda history, sampling: 97)
    engine = await start_engine(executor)
    control = engine.control
    info = await control.GetModelInfo(model_pb2.GetModelInfoRequest(model="bytes"))
    server = await control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert (info.supports_lora, server.capacity.max_loras) == (True, 2)
    adapter = lora_pb2.LoraAdapter(lora_name="support", source_path="/adapters/support")
    for was_loaded in (False, True):
        loaded = await control.LoadLora(lora_pb2.LoadLoraRequest(adapter=adapter))
        assert (loaded.adapter, loaded.already_loaded) == (adapter, was_loaded)
    assert list((await control.ListLoras(lora_pb2.ListLorasRequest())).adapters) == [adapter]

    plans, submit = [], executor.submit

    def note(plan):
        plans.append(plan)
        submit(plan)

    executor.submit = note
    for fields in ({"lora_name": "support"}, {"model": "bytes", "lora_name": "support"}, {"model": "support"}, {}):
        await engine.output(PROMPT, stopping=generation_pb2.StoppingOptions(max_tokens=1), **fields)
    assert [row.adapter for plan in plans for row in plan.added] == [1, 1, 1, 0]
    request = kv_pb2.SubscribeKvEventsRequest(include_snapshot=True)
    first = await control.SubscribeKvEvents(request).read()
    stored = [event.block_stored for event in first.batch.events if event.HasField("block_stored")]
    assert [(each.lora_name, [list(keys.values) for keys in each.extra_keys]) for each in stored] == [
        ("support", [["support"]] * 3),
        ("", []),
    ]

    for fields, name, code in (
        ({"lora_name": "other"}, "lora_name: ", "NOT_FOUND"),
        ({"model": "other", "lora_name": "support"}, "model: ", "INVALID_ARGUMENT"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engine.output(PROMPT, **fields)
        assert (error.value.code().name, str(error.value.details())[: len(name)]) == (code, name)
    assert (await control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="support"))).adapter == adapter
    assert not (await control.ListLoras(lora_pb2.ListLorasRequest())).adapters


async def sources(engine, **fields):
    return (await engine.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest(**fields))).sources


async def test_the_zeromq_publisher_is_a_source(start_engine):
    assert not await sources(await start_engine())
    config = KvEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv"
    )
    engine = await start_engine(kv_events=config)
    [source] = await sources(engine, data_parallel_ranks=[0])
    published = engine.service.server.kv_events
    assert (source.transport, source.encoding, source.topic) == ("zmq", "msgpack", "kv")
    assert published.endpoint == f"tcp://{source.endpoint_addr.host}:{source.endpoint_addr.port}"
    assert source.replay_endpoint == published.replay_endpoint
    with pytest.raises(grpc.aio.AioRpcError, match="data_parallel_ranks: "):
        await sources(engine, data_parallel_ranks=[0, 1])


async def test_a_source_has_no_wildcard(start_engine, monkeypatch, tmp_path):
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")
    engine = await start_engine(kv_events=config)
    own = "penstock.service.rpc.openengine.kv_sources._own_address"
    monkeypatch.setattr(own, lambda: "10.1.2.3")
    [source] = await sources(engine)
    assert source.endpoint_addr.host == "10.1.2.3"
    assert engine.service.server.kv_events.endpoint.endswith(f":{source.endpoint_addr.port}")
    monkeypatch.setattr(own, lambda: None)
    assert not await sources(engine)
    unix = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/kv")
    assert not await sources(await start_engine(kv_events=unix)), "it has no port"


async def test_only_operators_read_what_is_cached(start_engine, keys, metadata_of):
    engine = await start_engine(authenticator=keys)
    control = engine.control
    assert (await health(engine)).state == READY, "without a key"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await control.GetServerInfo(server_pb2.GetServerInfoRequest(), metadata=metadata_of("acme"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest(), metadata=metadata_of("acme")).read()
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_without_the_flag_there_are_no_such_services(start_engine):
    engine = await start_engine(contracts=())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health(engine)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
