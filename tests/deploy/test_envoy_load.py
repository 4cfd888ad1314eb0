"""Envoy balances by load reports: a replica with a quarter of the load gets most new requests."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from proxies.envoy import Config, Envoy, cluster_of, policy_of, running_envoy
from proxies.replicas import replicas, share_of_second

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.rpc import load_stream
from penstock.service.text.tokenizer import Tokenizer

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
    async with replicas(tokenizer) as running:
        busy, other = (replica.target for replica in running)
        async with running_envoy(program, tmp_path, busy, other, change=change) as proxy:
            has_begun: Any = None if change is without_reports else lambda: has_weights(proxy, busy, other)
            share = await share_of_second(proxy.target, running, NUM_REQUESTS, has_begun)
    print(f"{change.__name__}: {share:.0%} of {NUM_REQUESTS} requests went to the less loaded replica")
    assert least <= share <= most


async def has_weights(proxy: Envoy, busy: str, other: str) -> bool:
    """Whether Envoy has taken the reports of both."""
    weights = await asyncio.to_thread(proxy.weights)
    return weights[other] > weights[busy] > 0
