"""Envoy balances by load reports: a replica with a quarter of the load gets most new requests."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from proxies.envoy import Config, Envoy, cluster_of, for_http, policy_of, running_envoy
from proxies.replicas import LOADS, replicas, share_of_second
from wire.http_get import fetch

from penstock.clients.gateway.upstream.load_reports import load_header
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.rpc import load_stream
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1 import orca

NUM_REQUESTS = 80


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(DEMO))


def soon(config: Config, *, oob: bool) -> None:
    """The shipped policy, with shorter periods."""
    policy_of(config).update(
        enable_oob_load_report=oob, oob_reporting_period="0.1s", blackout_period="0s", weight_update_period="0.1s"
    )


def by_stream(config: Config) -> None:
    soon(config, oob=True)


def by_trailers(config: Config) -> None:
    soon(config, oob=False)


def without_reports(config: Config) -> None:
    del cluster_of(config)["load_balancing_policy"]
    cluster_of(config)["lb_policy"] = "ROUND_ROBIN"


@pytest.mark.parametrize(
    ("change", "least", "most"), [(by_stream, 0.7, 1.0), (by_trailers, 0.7, 1.0), (without_reports, 0.45, 0.55)]
)
async def test_the_less_loaded_replica_gets_most_new_requests(
    find_program: Callable[[str], str],
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Config], None],
    least: float,
    most: float,
) -> None:
    program = find_program("envoy")
    monkeypatch.setattr(load_stream, "MIN_INTERVAL_S", 0.05)
    async with replicas(tokenizer, *LOADS) as running:
        busy, other = (replica.target for replica in running)
        async with running_envoy(program, tmp_path, busy, other, change=change) as proxy:
            has_begun: Any = None if change is without_reports else lambda: has_weights(proxy, busy, other)
            share = await share_of_second(proxy.target, running, NUM_REQUESTS, has_begun)
    print(f"{change.__name__}: {share:.0%} of {NUM_REQUESTS} requests went to the less loaded replica")
    assert least <= share <= most


@pytest.mark.parametrize("wanted", ["TEXT", "JSON", "BIN"])
async def test_envoy_reads_the_header_of_the_http_gateway(
    find_program: Callable[[str], str], tmp_path: Path, wanted: str
) -> None:
    """Tests each format. A fake gateway responds with the header that the real one creates."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, utilization: float) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            assert f"endpoint-load-metrics-format: {wanted}".encode() in head
            report = orca.OrcaLoadReport(
                application_utilization=utilization, rps_fractional=100, named_metrics={"num_requests_waiting": 1}
            )
            header = load_header(report, wanted)
            assert header is not None
            writer.write(f"HTTP/1.1 200 OK\r\n{header[0]}: {header[1]}\r\ncontent-length: 0\r\n\r\n".encode())

    async def accept(utilization: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            await respond(reader, writer, utilization)
        writer.close()

    envoy = find_program("envoy")  # without it the test is skipped, before a server listens
    servers = [await asyncio.start_server(partial(accept, share), "127.0.0.1", 0) for share in (0.8, 0.2)]
    targets = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]

    def change(config: Config) -> None:
        for_http(config, wanted)
        soon(config, oob=False)

    async with running_envoy(envoy, tmp_path, *targets, change=change) as proxy:
        weights: dict[str, int] = {}
        while [weights.get(target) for target in targets] != [125, 500]:  # requests per second / utilization
            await asyncio.to_thread(fetch, proxy.target, path="/v1/models")
            weights = await asyncio.to_thread(proxy.weights)
    for server in servers:
        server.close()


async def has_weights(proxy: Envoy, busy: str, other: str) -> bool:
    """Whether Envoy has applied the reports of both."""
    weights = await asyncio.to_thread(proxy.weights)
    return weights[other] > weights[busy] > 0
