"""LoRA adapters in other engines' contracts: a request names one, answers name it, lists contain it, and KV events tell
its blocks from those of the base."""

from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from wire.inference_calls import PROMPT, Inference, message

import penstock.v1 as pb
from penstock.clients.host.reloaded_files import NamedFile, WatchedFiles
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.tenant_limits import parse_tenants
from penstock.v1.kserve import message_class


@pytest.fixture
def start_with(start_service: Any) -> Any:
    """Starts a service with an adapter named support, and both contracts."""

    async def start(**config: Any) -> Any:
        worker = FakeExecutor(vocab_size=258, max_loras=2, next_token=lambda history, sampling: ord("a"))
        modules = {"support": "/adapters/support"}
        return await start_service(
            worker, contracts=("kserve", "vllm"), admin_listen="127.0.0.1:0", lora_modules=modules, **config
        )

    return start


def named(model: str) -> Any:
    request = message(text_input=PROMPT)
    request.model_name = model
    return request


async def test_a_model_name_selects_an_adapter(start_with: Any) -> None:
    service = await start_with()
    inference = Inference(service)
    for model, slot in (("support", 1), ("bytes", 0), ("", 0)):
        plans: list[Any] = []
        submit = service.executor.submit

        def note(plan: Any, plans: list[Any] = plans, submit: Any = submit) -> None:
            plans.append(plan)
            submit(plan)

        service.executor.submit = note
        response = await inference.call("ModelInfer", named(model))
        service.executor.submit = submit
        assert response.model_name == (model or "bytes")
        assert [row.adapter for plan in plans for row in plan.added] == [slot]


async def test_an_adapter_is_listed_ready_and_described(start_with: Any) -> None:
    inference = Inference(await start_with())
    index = await inference.call("RepositoryIndex", message_class("RepositoryIndexRequest")())
    assert [(model.name, model.state) for model in index.models] == [("bytes", "READY"), ("support", "READY")]
    for name, is_ready in (("support", True), ("bytes", True), ("unknown", False)):
        assert (await inference.call("ModelReady", message_class("ModelReadyRequest")(name=name))).ready == is_ready
    for method in ("ModelMetadata", "ModelConfig"):
        answer = await inference.call(method, message_class(f"{method}Request")(name="support"))
        assert (answer.config if method == "ModelConfig" else answer).name == "support"


async def test_adapters_of_other_tenants_do_not_exist(start_with: Any, tmp_path: Any) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {adapters: []}\n")
    file = NamedFile("--tenants-file", path)
    tenants = WatchedFiles([file], lambda content: parse_tenants(file, content))
    inference = Inference(await start_with(tenants=tenants))
    index = await inference.call("RepositoryIndex", message_class("RepositoryIndexRequest")())
    assert [model.name for model in index.models] == ["bytes"]
    assert not (await inference.call("ModelReady", message_class("ModelReadyRequest")(name="support"))).ready
    with pytest.raises(grpc.aio.AioRpcError, match="name: no model of this name") as error:
        await inference.call("ModelMetadata", message_class("ModelMetadataRequest")(name="support"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_kv_events_name_the_adapter(start_with: Any) -> None:
    service = await start_with()
    for model in ("support", "bytes"):
        sampling = pb.SamplingParams(max_tokens=3)
        start = pb.GenerationStart(ref=1, text=PROMPT, model=model, sampling=sampling)
        await service.generation.Complete(pb.CompleteRequest(start=start))

    found = set()
    async for changes in service.admin.WatchKvEvents(pb.WatchKvEventsRequest()):
        found |= {(block.adapter, bytes(block.token_ids)) for block in changes.stored}
        if changes.sequence:
            break
    parts = [PROMPT.encode()[start : start + 16] for start in (0, 16, 32)]
    assert found == {(adapter, part) for adapter in ("", "support") for part in parts}

    call = VllmEngineStub(service.channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
    by_name: dict[str, int] = {}
    while sum(by_name.values()) < 6:
        batch = await call.read()
        for event in batch.events:
            by_name[event.stored.lora_name] = by_name.get(event.stored.lora_name, 0) + len(event.stored.blocks)
        assert (batch.load.lora.slots_used, batch.load.lora.slots_total) in ((1, 2), (0, 0))
    call.cancel()
    assert {name: count for name, count in by_name.items() if count} == {"": 3, "support": 3}
