"""The signals that KEDA gets from the chart's queries: a real Prometheus has them, and they rise and fall with load."""

import asyncio
import math
import re
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from monitoring.prometheus_server import Prometheus, running_prometheus, skip_without, until
from serve_process import serving, target_of

from penstock.clients import AsyncClient

NUM_ROWS = 8
NUM_REQUESTS = 3 * NUM_ROWS


def triggers(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    (scaled,) = (each["spec"] for each in manifests if each["kind"] == "ScaledObject")
    return {each["name"]: each for each in scaled["triggers"]}


async def desired_replicas(prometheus: Prometheus, trigger: dict[str, Any], current: int = 1) -> int | None:
    """The number that the HPA computes of KEDA's metric, before limits; None while the query has no result.
    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details"""
    result = await prometheus.query(trigger["metadata"]["query"])
    if not result:
        return None
    ratio = float(result[0]["value"][1]) / float(trigger["metadata"]["threshold"])
    return math.ceil(ratio if trigger["metricType"] == "AverageValue" else current * ratio)


@pytest.mark.soak
@skip_without("prometheus")
async def test_load_asks_for_replicas_and_its_end_gives_them_back(render: Any, tmp_path: Path) -> None:
    keda = {"enabled": True, "prometheusAddress": "http://prometheus:9090"}
    manifests = render(autoscaling={"keda": keda}, serviceMonitor={"enabled": True})
    queue, kv_cache = (triggers(manifests)[name] for name in ("queue", "kv-cache"))
    (headless,) = (
        each["metadata"]
        for each in manifests
        if each["kind"] == "Service" and each["metadata"]["name"].endswith("-headless")
    )
    labels = {"namespace": "llm", "service": headless["name"]}  # as the Prometheus Operator sets them
    flags = ("--port=0", "--metrics-listen=127.0.0.1:0", f"--max-num-seqs={NUM_ROWS}", "--kv-cache-memory-bytes=64M")
    async with AsyncExitStack() as stack:
        _, greeting = stack.enter_context(serving(*flags, stdin=subprocess.DEVNULL))
        metrics = re.search(r"curl http://([\d.:]+)/metrics", greeting)
        assert metrics is not None, greeting
        job = {"job_name": "penstock", "static_configs": [{"targets": [metrics[1]], "labels": labels}]}
        prometheus = await stack.enter_async_context(running_prometheus(tmp_path, [job]))

        async def is_at(signal: dict[str, Any], number: int) -> bool:
            return await desired_replicas(prometheus, signal) == number

        await until(lambda: is_at(queue, 0))
        await until(lambda: is_at(kv_cache, 0))
        async with AsyncClient(target_of(greeting)) as client:
            requests = [
                asyncio.create_task(client.complete(f"{number} kernels", max_tokens=15_000, ignore_eos=True))
                for number in range(NUM_REQUESTS)
            ]
            await until(lambda: is_at(queue, 2))  # 16 sequences wait, and a replica may have 8
            await until(lambda: is_at(kv_cache, 2))  # above 80 % of the only replica's cache
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
        await until(lambda: is_at(queue, 0))
        await until(lambda: is_at(kv_cache, 0))
