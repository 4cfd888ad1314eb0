"""What the log has for programs: a request's end and the engine's state as fields, and a failed start as JSON."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import penstock.v1 as pb

PENSTOCK = Path(sys.executable).with_name("penstock")
DOCS = Path(__file__).parents[3] / "docs/metrics.md"
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (every line|error in|end of a request|state of the engine)", re.MULTILINE)


def request(**sampling):
    return pb.CompleteRequest(
        start=pb.GenerationStart(text="0123456789", client_request_id="mine", sampling=pb.SamplingParams(**sampling))
    )


@pytest.fixture
def data_of(caplog):
    """The fields of the only line of a logger."""
    caplog.set_level("INFO", logger="penstock")

    def data_of(name):
        [record] = [record for record in caplog.records if record.name == name]
        return record.data

    return data_of


async def test_a_requests_end_has_its_fields(start_service, data_of):
    service = await start_service()
    response = await service.generation.Complete(request(max_tokens=3))
    data = data_of("penstock.service.telemetry.request_end")
    assert {name: data.pop(name) >= 0 for name in ("queued_ms", "first_token_ms", "total_ms")}
    assert data == {
        "request_id": response.request_id,
        "client_request_id": "mine",
        "session_id": "",
        "tenant": "default",
        "operation": "text_completion",
        "code": "OK",
        "reason": "LENGTH",
        "field": "",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 3,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "preemptions": 0,
        "worker_restarts": 0,
    }


async def test_a_refusal_has_its_reason_and_field(start_service, data_of):
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError):
        await service.generation.Complete(request(top_p=3))
    data = data_of("penstock.service.telemetry.request_end")
    assert (data["code"], data["reason"], data["field"]) == ("INVALID_ARGUMENT", "INVALID_FIELD", "sampling.top_p")


async def test_the_documented_fields_are_those_of_the_lines(start_service, caplog):
    caplog.set_level("INFO", logger="penstock")
    service = await start_service(stats_interval_s=0.01)
    await service.generation.Complete(request(max_tokens=300))
    logged = set().union(*(getattr(record, "data", {}) for record in caplog.records))
    documented = {name for names, _ in ROW.findall(DOCS.read_text()) for name in re.findall(r"`(\w+)`", names)}
    of_every_line = {"time", "level", "logger", "message", "exception"}
    conditional = {"trace_id", "drafted_tokens_per_s", "accepted_percent"}
    assert documented == logged | of_every_line | conditional


def test_a_failed_start_is_logged_as_json():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [str(PENSTOCK), "serve", f"--port={port}", "--log-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    line = json.loads(done.stderr.splitlines()[-1])
    assert line["level"] == "CRITICAL"
    assert line["message"].startswith(f"--port 127.0.0.1:{port}: the port is in use")
