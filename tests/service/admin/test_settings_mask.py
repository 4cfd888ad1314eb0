"""The update mask and the etag of settings: which settings change, which are reset, and which changes are refused."""

import asyncio
from datetime import timedelta

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.service.app.prepare import prepare
from penstock.service.config.command_line import parse_config


@pytest.fixture
async def service(start_service):
    config = SchedulerConfig(max_num_seqs=32, max_queued_requests=200, tenants={"acme": TenantLimits(weight=2)})
    return await start_service(scheduler=config, admin_listen="127.0.0.1:0")


async def settings_of(service):
    return (await service.admin.GetSettings(pb.GetSettingsRequest())).settings


async def update(service, forget_tenants=(), mask=None, **changes):
    """Changes settings, and returns all. ``mask``: the paths of the update mask."""
    request = pb.UpdateSettingsRequest(settings=pb.Settings(**changes), forget_tenants=forget_tenants)
    if mask is not None:
        request.update_mask.paths.extend(mask)
    return (await service.admin.UpdateSettings(request)).settings


def without_etag(settings):
    settings.ClearField("etag")
    return settings


def tenant(name="", **settings):
    return pb.TenantSettings(tenant=name, **settings)


class TestMask:
    """The update mask names what changes; what it names and is not set goes back to the command line's value."""

    async def test_fields_that_it_does_not_name_are_ignored(self, service):
        before = await settings_of(service)
        changed = await update(
            service, mask=["max_num_seqs"], max_num_seqs=7, max_queued_requests=9, tenants=[tenant("acme", weight=9)]
        )
        assert changed.max_num_seqs == 7
        before.max_num_seqs = 7
        assert without_etag(changed) == without_etag(before)

    async def test_a_named_field_that_is_not_set_goes_back(self, service):
        before = await settings_of(service)
        changes = {"policy": pb.SCHEDULING_POLICY_FAIR, "max_num_seqs": 7, "target_itl": timedelta(milliseconds=30)}
        for name in changes:
            await update(service, **changes)
            changed = await update(service, mask=[name])
            assert getattr(changed, name) == getattr(before, name)
            assert [each for each in changes if getattr(changed, each) == getattr(before, each)] == [name]

    @pytest.mark.parametrize("mask", [["*"], ["policy", "max_num_seqs", "default_tenant", "tenants"]])
    async def test_all_can_go_back_at_once(self, service, mask):
        before = await settings_of(service)
        await update(
            service,
            policy=pb.SCHEDULING_POLICY_FAIR,
            max_num_seqs=7,
            default_tenant=tenant(max_tokens=3),
            tenants=[tenant("b")],
            forget_tenants=["acme"],
        )
        assert await update(service, mask=mask) == before

    async def test_tenants_that_are_named_and_set_leave_the_others(self, service):
        changed = await update(service, mask=["tenants"], tenants=[tenant("b", weight=3)], forget_tenants=["c"])
        assert [each.tenant for each in changed.tenants] == ["acme", "b"]

    async def test_an_empty_mask_is_no_mask(self, service):
        assert (await update(service, mask=[], max_num_seqs=7)).max_num_seqs == 7

    async def test_the_command_line_is_the_tenants_file_as_it_is_now(self, tmp_path):
        """It is read again when it changes, as its content at the start no longer applies."""
        file = tmp_path / "tenants.yaml"
        file.write_text("acme: {weight: 2}\n")
        config = prepare(parse_config(["--port=0", f"--tenants-file={file}"])).server
        assert config.configured() == config.scheduler
        file.write_text("default: {max-tokens: 9}\nzenith: {weight: 3}\n")
        files = config.tenants
        assert files is not None
        assert files.refresh() is None  # the file may not be complete yet
        take = files.refresh()
        assert take is not None
        take()
        assert config.configured().tenants == {"zenith": TenantLimits(weight=3)}
        assert config.configured().default_tenant == TenantLimits(max_tokens=9)


class TestEtag:
    """A change of settings that the caller has not seen is refused."""

    async def test_the_current_one_is_accepted_and_an_earlier_one_is_not(self, service, details_of):
        etag = (await settings_of(service)).etag
        changed = await update(service, etag=etag, max_num_seqs=7)
        assert changed.etag != etag
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await update(service, etag=etag, max_num_seqs=8)
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert details_of(error.value)["ErrorInfo"].reason == "SETTINGS_CHANGED"
        assert "get them again" in str(error.value.details())
        assert await settings_of(service) == changed
        assert (await update(service, etag=changed.etag, max_num_seqs=8)).max_num_seqs == 8

    async def test_of_two_that_have_seen_the_same_one_wins(self, service):
        etag = (await settings_of(service)).etag
        outcomes = await asyncio.gather(
            *(update(service, etag=etag, max_num_seqs=rows) for rows in (5, 6)), return_exceptions=True
        )
        [refused] = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
        assert refused.code() is grpc.StatusCode.ABORTED

    async def test_the_same_settings_have_the_same_one(self, service):
        before = await settings_of(service)
        await update(service, max_num_seqs=7)
        assert await update(service, max_num_seqs=32) == before
