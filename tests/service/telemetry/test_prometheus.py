"""A real Prometheus scrapes the page and answers the documented questions. Debian's package ``prometheus`` has it."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from penstock.scheduler.plan import DraftMethod, SpeculationConfig
from penstock.service.telemetry.catalog import INSTRUMENTS
from penstock.v1 import generation_pb2 as pb

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Prometheus"),
]
DOCS = Path(__file__).parents[3] / "docs/metrics.md"
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: penstock
    static_configs: [{{targets: ["{target}"]}}]
"""


def get(url):
    with urllib.request.urlopen(url, timeout=120) as answer:
        return answer.read().decode()


async def ask(address, path, **parameters):
    """The API's answer; None while Prometheus is not there yet."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        return json.loads(await asyncio.to_thread(get, url))["data"]
    except OSError:
        return None


async def until(find):
    async with asyncio.timeout(120):
        while not (found := await find()):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.1)
        return found


@pytest.fixture
async def metered(start_service):
    """A service with a page of metrics that has answered some requests; with drafts, which have metrics too."""
    service = await start_service(
        metrics_listen="127.0.0.1:0", speculation=SpeculationConfig(DraftMethod.NGRAM, num_speculative_tokens=4)
    )
    start = pb.Start(text="x" * 40, sampling=pb.Sampling(max_tokens=20))
    for _ in range(20):
        await service.generation.Complete(pb.CompleteRequest(start=start))
    return service


@pytest.fixture
async def prometheus(metered, tmp_path):
    """Where one listens that scrapes the service."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (tmp_path / "config.yml").write_text(CONFIG.format(target=metered.server.metrics_target))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={tmp_path / 'config.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    yield address
    process.terminate()
    await process.wait()


async def test_prometheus_takes_every_metric(metered, prometheus):
    async def scraped():
        found = await ask(prometheus, "targets")
        return [target for target in found["activeTargets"] if target["health"] != "unknown"] if found else []

    [target] = await until(scraped)
    assert (target["health"], target["lastError"]) == ("up", "")

    stored = set(await ask(prometheus, "label/__name__/values"))
    suffixes = ("", "_count")
    missing = [i.prometheus_name for i in INSTRUMENTS if not {i.prometheus_name + end for end in suffixes} & stored]
    assert missing == []

    [sample] = (await ask(prometheus, "query", query="vllm:generation_tokens_total"))["result"]
    assert sample["value"][1] == "400"
    assert sample["metric"]["model_name"] == "bytes"
    questions = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", DOCS.read_text(), re.MULTILINE)
    questions = [question for question in questions if "(" in question]
    assert len(questions) >= 6
    for question in questions:
        assert await ask(prometheus, "query", query=question) is not None, question


async def test_promtool_finds_nothing_but_the_colons_of_vllm(metered):
    page = await asyncio.to_thread(get, f"http://{metered.server.metrics_target}/metrics")
    command = ["promtool", "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, text=True, check=False)
    complaints = (done.stdout + done.stderr).splitlines()
    assert [
        line for line in complaints if not re.fullmatch(r"vllm:\S+ metric names should not contain ':'", line)
    ] == []
