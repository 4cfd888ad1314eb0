"""Requests that supersede others of their stream."""

import logging

import grpc
import pytest
from wire.frames import append, begin, commit, paced

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.request import EngineFinishReason
from penstock.service.auth.identity import Principal

CANCELLED = grpc.StatusCode.CANCELLED.value[0]
LONG = 2000


class Gateway:
    """Every caller may act for others."""

    def authenticate(self, metadata):
        return Principal("default", may_act_for_others=True)


def ends(stream, *refs):
    """For each request that has ended, the reason of its status and the ref of the one that superseded it."""
    found = {}
    for ref in refs:
        for finished in stream.outcome(ref).finished:
            reason = stream.reason_of(finished.status) if finished.status.code else "OK"
            found[ref] = (reason, finished.superseded_by)
    return found


@pytest.fixture
async def stream(open_frames):
    """A stream whose request 1 generates a long output."""
    stream = await open_frames(paced())
    await stream.send(begin(1, text="The cat sat on the mat, and then", max_tokens=LONG))
    await stream.until(lambda: stream.outcome(1).deltas)
    return stream


class TestSuperseding:
    """A request that is accepted ends the one that it names."""

    async def test_ends_the_older_one(self, stream):
        await stream.send(begin(2, text="The cat sat on the mat, and then slept", supersedes=1))
        old, new = await stream.finished(1), await stream.finished(2)
        assert (old.status.code, stream.reason_of(old.status)) == (CANCELLED, "SUPERSEDED")
        assert (old.superseded_by, old.reason, old.may_continue) == (2, pb.FINISH_REASON_CANCELLED, True)
        assert 0 < old.usage.output_tokens < LONG
        assert (new.status.code, new.superseded_by, new.usage.output_tokens) == (0, 0, 12)
        assert new.usage.cached_tokens >= 16
        assert not stream.refused

    async def test_is_told_from_a_cancellation(self, stream, caplog):
        caplog.set_level(logging.INFO, "penstock.service.telemetry.request_end")
        await stream.send(begin(2, text="x", supersedes=1))
        request_id = (await stream.finished(1)).request_id
        await stream.finished(2)
        ended = {record.data["request_id"]: (record.data["code"], record.data["reason"]) for record in caplog.records}
        assert ended[request_id] == ("CANCELLED", "SUPERSEDED")
        assert stream.service.engine.explain(request_id).ended_by is EngineFinishReason.SUPERSEDED

    async def test_a_refused_one_ends_nothing(self, stream):
        await stream.send(begin(2, text="x", supersedes=1, timeout_ms=0))
        await stream.send(begin(3, token_ids=pb.TokenIds(ids=[1] * 5000), supersedes=1))
        await stream.until(lambda: len(ends(stream, 2, 3)) == 2)
        num_deltas = stream.outcome(1).deltas
        await stream.until(lambda: stream.outcome(1).deltas > num_deltas)
        assert ends(stream, 1, 2, 3) == {2: ("INVALID_FIELD", 0), 3: ("CONTEXT_LENGTH", 0)}

    async def test_of_an_unknown_ref_means_nothing(self, stream):
        await stream.send(begin(2, text="x", supersedes=7))
        assert (await stream.finished(2)).status.code == 0
        assert ends(stream, 1) == {}

    async def test_of_its_own_ref(self, stream):
        await stream.send(begin(2, text="x", supersedes=2))
        refused = await stream.finished(2)
        assert stream.reason_of(refused.status) == "INVALID_FIELD"
        assert "supersedes: is the request's own ref" in refused.status.message

    async def test_of_another_tenant(self, open_frames):
        stream = await open_frames(paced(), authenticator=Gateway())
        await stream.send(begin(1, text="x", max_tokens=LONG))
        await stream.send(begin(2, text="x", tenant="other", supersedes=1))
        refused = await stream.finished(2)
        assert stream.reason_of(refused.status) == "INVALID_FIELD"
        assert "another tenant's" in refused.status.message
        assert ends(stream, 1) == {}

    async def test_where_a_tenant_may_have_one_request(self, open_frames):
        limits = TenantLimits(max_live_requests=1)
        stream = await open_frames(paced(), scheduler=SchedulerConfig(default_tenant=limits))
        await stream.send(begin(1, text="x", max_tokens=LONG), begin(2, text="y"), begin(3, text="z", supersedes=1))
        await stream.until(lambda: len(ends(stream, 1, 2, 3)) == 3)
        assert ends(stream, 1, 2, 3) == {1: ("SUPERSEDED", 3), 2: ("TENANT_BUSY", 0), 3: ("OK", 0)}

    @pytest.mark.parametrize("method", ["GenerateOne", "Complete", "Prefetch"])
    async def test_only_on_a_stream(self, stream, method):
        request = getattr(pb, f"{method}Request")(start=begin(2, text="x", supersedes=1).start)
        call = getattr(stream.service.generation, method)(request)
        with pytest.raises(grpc.aio.AioRpcError, match=r"start\.supersedes: only on a Generate stream"):
            await (call.read() if method == "GenerateOne" else call)
        assert ends(stream, 1) == {}


class TestOpenPrompts:
    """A request with an open prompt is superseded at once, and supersedes when it is accepted."""

    async def test_an_older_one_that_is_open(self, stream):
        await stream.send(begin(2, open=True), append(2, text="half of"), begin(3, text="all of it", supersedes=2))
        assert (await stream.finished(3)).status.code == 0
        assert ends(stream, 1, 2) == {2: ("SUPERSEDED", 3)}

    async def test_a_newer_one_that_is_open(self, stream):
        await stream.send(begin(2, open=True, supersedes=1), append(2, text="half of"))
        num_deltas = stream.outcome(1).deltas
        await stream.until(lambda: stream.outcome(1).deltas > num_deltas)
        assert ends(stream, 1, 2) == {}
        await stream.send(commit(2))
        assert (await stream.finished(2)).status.code == 0
        assert ends(stream, 1) == {1: ("SUPERSEDED", 2)}

    async def test_the_first_of_a_row_that_is_accepted_ends_all_before_it(self, stream):
        await stream.send(begin(2, open=True, supersedes=1), begin(3, open=True, supersedes=2))
        await stream.send(begin(4, text="x", supersedes=3))
        assert (await stream.finished(4)).status.code == 0
        assert ends(stream, 1, 2, 3) == dict.fromkeys((1, 2, 3), ("SUPERSEDED", 4))

    async def test_one_of_a_row_that_is_refused_is_left_out(self, stream):
        await stream.send(begin(2, open=True, supersedes=1), begin(3, open=True, supersedes=2), commit(2))
        assert stream.reason_of((await stream.finished(2)).status) == "INVALID_FIELD"  # its prompt is empty
        assert ends(stream, 1) == {}
        await stream.send(append(3, text="x"), commit(3))
        assert (await stream.finished(3)).status.code == 0
        assert ends(stream, 1) == {1: ("SUPERSEDED", 3)}

    async def test_a_ref_is_that_of_the_request_that_has_it_now(self, stream):
        await stream.send(begin(2, open=True, supersedes=1))
        await stream.send(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        await stream.finished(1)
        del stream.reading.outcomes[1]
        await stream.send(begin(1, text="another", max_tokens=LONG), append(2, text="x"), commit(2))
        assert (await stream.finished(2)).status.code == 0
        assert ends(stream, 1) == {}
