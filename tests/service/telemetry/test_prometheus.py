"""A real Prometheus scrapes the page and answers the documented questions. Debian's package ``prometheus`` has it."""

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from monitoring.prometheus_server import running_prometheus, skip_without
from wire.http_get import fetch

import penstock.v1 as pb
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig
from penstock.service.telemetry.catalog import INSTRUMENTS

pytestmark = [pytest.mark.soak, skip_without("prometheus"), skip_without("promtool")]
DOCS = Path(__file__).parents[3] / "docs/metrics.md"


@pytest.fixture
async def metered(start_service):
    """A service with a page of metrics that has answered some requests; with drafts, which have metrics too."""
    service = await start_service(
        metrics_listen="127.0.0.1:0", speculation=SpeculationConfig(DraftMethod.NGRAM, num_speculative_tokens=4)
    )
    start = pb.GenerationStart(text="x" * 40, sampling=pb.SamplingParams(max_tokens=20))
    for _ in range(20):
        await service.generation.Complete(pb.CompleteRequest(start=start))
    return service


@pytest.fixture
async def prometheus(metered, tmp_path):
    """One that scrapes the service."""
    job = {"job_name": "penstock", "static_configs": [{"targets": [metered.server.metrics_target]}]}
    async with running_prometheus(tmp_path, [job]) as running:
        yield running


async def test_prometheus_takes_every_metric(prometheus):
    [target] = await prometheus.scraped()
    assert (target["health"], target["lastError"]) == ("up", "")

    stored = set(await prometheus.ask("label/__name__/values"))
    suffixes = ("", "_count")
    missing = [i.prometheus_name for i in INSTRUMENTS if not {i.prometheus_name + end for end in suffixes} & stored]
    assert missing == []

    [sample] = await prometheus.query("vllm:generation_tokens_total")
    assert sample["value"][1] == "400"
    assert sample["metric"]["model_name"] == "bytes"
    questions = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", DOCS.read_text(), re.MULTILINE)
    questions = [question for question in questions if "(" in question]
    assert len(questions) >= 6
    for question in questions:
        await prometheus.query(question)


async def test_promtool_finds_nothing_but_the_colons_of_vllm(metered):
    page = await asyncio.to_thread(fetch, metered.server.metrics_target)
    command = ["promtool", "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, text=True, check=False)
    complaints = (done.stdout + done.stderr).splitlines()
    assert [
        line for line in complaints if not re.fullmatch(r"vllm:\S+ metric names should not contain ':'", line)
    ] == []
