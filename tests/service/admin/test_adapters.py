"""LoRA adapters for operators and callers: loaded and unloaded by RPC, named as a request's model, listed with their
parent, and permitted by tenant."""

import hashlib

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.clients.host.reloaded_files import NamedFile, WatchedFiles
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import AdapterLoad
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.tenant_limits import parse_tenants
from penstock.service.errors import Reason


def executor(**facts):
    return FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), **{"max_loras": 2, **facts})


@pytest.fixture
def start_with(start_service):
    async def start(**config):
        worker = config.pop("executor", None) or executor()
        return await start_service(worker, admin_listen="127.0.0.1:0", **config)

    return start


def complete(service, model, metadata=None, tenant="", **sampling):
    sampling = {"max_tokens": 3, "ignore_eos": True, **sampling}
    start = pb.GenerationStart(ref=1, text="hi", model=model, tenant=tenant, sampling=pb.SamplingParams(**sampling))
    return service.generation.Complete(pb.CompleteRequest(start=start), metadata=metadata)


async def load(service, name, path=None, metadata=None):
    request = pb.LoadAdapterRequest(name=name, path=path or f"/adapters/{name}")
    return (await service.admin.LoadAdapter(request, metadata=metadata)).adapter


async def refusal(call, details_of):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), details_of(error.value)["ErrorInfo"].reason, str(error.value.details())


async def names(service, metadata=None):
    models = (await service.model.ListModels(pb.ListModelsRequest(), metadata=metadata)).models
    return {model.name: model.parent for model in models}


async def test_an_adapter_is_loaded_named_listed_and_unloaded(start_with, details_of):
    service = await start_with()
    adapter = await load(service, "support")
    assert adapter == pb.Adapter(name="support", path="/adapters/support", rank=8, slot=1)
    assert await load(service, "support") == adapter, "the same again changes nothing"
    assert await names(service) == {"bytes": "", "support": "bytes"}
    assert [each.name for each in (await service.admin.ListAdapters(pb.ListAdaptersRequest())).adapters] == ["support"]

    plans, submit = [], service.executor.submit

    def note(plan):
        plans.append(plan)
        submit(plan)

    service.executor.submit = note
    for model in ("support", "bytes", ""):
        await complete(service, model)
    assert [row.adapter for plan in plans for row in plan.added] == [1, 0, 0]

    await service.admin.UnloadAdapter(pb.UnloadAdapterRequest(name="support"))
    assert await names(service) == {"bytes": ""}
    code, reason, message = await refusal(complete(service, "support"), details_of)
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert message.endswith("send bytes")
    unload = service.admin.UnloadAdapter(pb.UnloadAdapterRequest(name="support"))
    assert (await refusal(unload, details_of))[:2] == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_an_unknown_one_is_not_found_and_the_known_ones_are_named(start_with, details_of):
    service = await start_with()
    await load(service, "one")
    await load(service, "two")
    code, reason, message = await refusal(complete(service, "three"), details_of)
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert message.endswith("send bytes, one, two")


@pytest.mark.parametrize(
    ("name", "path", "problem"),
    [
        ("bytes", "/x", "name: is the model's own"),
        ("a", "x", "path: must be an absolute path"),
        ("known", "/other", "name: is the name of another adapter"),
        ("bad", "/bad", "path: /bad: lora_alpha is missing"),
        ("", "/x", "name: is required"),
    ],
)
async def test_what_cannot_be_loaded(name, path, problem, start_with, details_of):
    service = await start_with()
    service.executor.load_errors["/bad"] = "/bad: lora_alpha is missing"
    await load(service, "known")
    call = service.admin.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path))
    code, reason, message = await refusal(call, details_of)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert message.startswith(problem)
    assert await names(service) == {"bytes": "", "known": "bytes"}


async def test_a_second_load_of_changed_files_is_refused(start_with, details_of):
    """Otherwise an operator would believe that the new files are served."""
    service = await start_with()
    await load(service, "a")
    service.executor.load_errors["/adapters/a"] = "/adapters/a: its files have changed since it was loaded: unload it"
    call = service.admin.LoadAdapter(pb.LoadAdapterRequest(name="a", path="/adapters/a"))
    code, _, message = await refusal(call, details_of)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("path: /adapters/a: its files have changed")
    assert service.executor.adapter_loads[-1] == AdapterLoad(0, "/adapters/a", b"/adapters/a"), "only checked"
    assert (await complete(service, "a")).finished.usage.output_tokens == 3
    await service.admin.UnloadAdapter(pb.UnloadAdapterRequest(name="a"))
    del service.executor.load_errors["/adapters/a"]
    await load(service, "a")


async def test_without_slots_there_are_no_adapters(start_with, details_of):
    service = await start_with(executor=executor(max_loras=0))
    call = service.admin.LoadAdapter(pb.LoadAdapterRequest(name="a", path="/a"))
    assert "start it with --max-loras" in (await refusal(call, details_of))[2]


async def test_files_that_changed_end_the_request(start_with, details_of):
    service = await start_with(executor=executor(max_loras=1))
    for name in "ab":
        await load(service, name)
    service.executor.load_errors["/adapters/b"] = "/adapters/b: its files have changed"
    code, reason, _ = await refusal(complete(service, "b"), details_of)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.ADAPTER_FAILED.name)


async def test_a_running_request_finishes_after_its_adapter_is_unloaded(start_with):
    service = await start_with(executor=executor(), scheduler=None)
    await load(service, "a")
    request = pb.GenerateOneRequest(
        start=pb.GenerationStart(text="hi", model="a", sampling=pb.SamplingParams(max_tokens=300, ignore_eos=True))
    )
    call = service.generation.GenerateOne(request)
    await until(lambda: service.engine.stats().running)
    await service.admin.UnloadAdapter(pb.UnloadAdapterRequest(name="a"))
    messages = [message async for message in call]
    assert messages[-1].finished.usage.output_tokens == 300


async def test_a_conversation_changes_its_adapter(start_with):
    """The cached blocks of another adapter are not used."""
    service = await start_with()
    for name in "ab":
        await load(service, name)
    first = await complete(service, "a", max_tokens=100)
    cached = []
    for model in ("a", "b", ""):
        start = pb.GenerationStart(
            text="go on", model=model, continue_from=first.request_id,
            sampling=pb.SamplingParams(max_tokens=1, ignore_eos=True),
        )  # fmt: skip
        response = await service.generation.Complete(pb.CompleteRequest(start=start))
        cached.append(response.finished.usage.cached_tokens)
    assert cached[0] > 0
    assert cached[1:] == [0, 0]


async def test_tenants_may_use_the_adapters_that_their_file_names(start_with, tmp_path, load_keys, details_of):
    keys = {name: f"{name}-key" * 5 for name in ("acme", "zenith", "other")}
    file = tmp_path / "keys"
    lines = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {name} admin" for name, key in keys.items()]
    file.write_text("\n".join(lines))
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("default: {adapters: [common]}\nacme: {weight: 2}\nzenith: {adapters: []}\n")
    named = NamedFile("--tenants-file", tenants)
    watched = WatchedFiles([named], lambda content: parse_tenants(named, content))
    service = await start_with(authenticator=load_keys(file), tenants=watched)

    def bearer(tenant):
        return (("authorization", f"Bearer {keys[tenant]}"),)

    for name in ("common", "private"):
        await load(service, name, metadata=bearer("acme"))
    assert set(await names(service, bearer("acme"))) == {"bytes", "common", "private"}
    assert set(await names(service, bearer("zenith"))) == {"bytes"}
    assert set(await names(service, bearer("other"))) == {"bytes", "common"}
    await complete(service, "private", bearer("acme"))
    await complete(service, "common", bearer("other"))
    for tenant, model in (("other", "private"), ("zenith", "common")):
        code, _, message = await refusal(complete(service, model, bearer(tenant)), details_of)
        assert code is grpc.StatusCode.NOT_FOUND
        assert "private" not in message


async def test_those_of_the_command_line_are_there_from_the_start(start_with):
    service = await start_with(lora_modules={"a": "/a", "b": "/b", "c": "/c"})
    assert await names(service) == {"bytes": "", "a": "bytes", "b": "bytes", "c": "bytes"}


async def test_one_of_the_command_line_that_cannot_be_loaded_ends_the_start(start_with):
    worker = executor()
    worker.load_errors["/b"] = "/b: no such directory"
    with pytest.raises(ExecutorError, match="--lora-modules: b: path: /b: no such directory"):
        await start_with(executor=worker, lora_modules={"a": "/a", "b": "/b"})
