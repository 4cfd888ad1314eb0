"""A local Ray cluster with two replicas of the demo model."""

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from waiting import wait_until

EXAMPLE = Path(__file__).parents[3] / "deploy/ray/serve.yaml"
OBJECT_STORE_BYTES = 80 << 20
ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one to the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's defaults are too short while other programs use the cores.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "60000",
}
CHILD = "penstock.service.app.serve"
"""What the command line of a replica's child contains."""


@dataclass
class RayCluster:
    """Serve's proxies on a local cluster."""

    http: str
    """The base of HTTP addresses."""
    target: str
    """Of gRPC."""

    def children(self) -> list[psutil.Process]:
        """The processes that serve models."""
        return [process for process in descendants() if CHILD in " ".join(command_of(process))]


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def free_ports(number: int) -> list[int]:
    """Serve takes no port 0."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in listeners]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Two proxies without an application. No process of it is left at the end."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    serve: Any = pytest.importorskip("ray.serve", reason="ray is not installed")
    before = descendants()
    http_port, grpc_port = free_ports(2)
    functions = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["grpc_options"]["grpc_servicer_functions"]
    with (
        pytest.MonkeyPatch.context() as patch,
        # The default is in the temporary directory of pytest, too deep for a socket's path.
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory,
    ):
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        try:
            ray.init(
                address="local",
                num_cpus=4,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=directory,
            )
            serve.start(
                http_options={"host": "127.0.0.1", "port": http_port},
                grpc_options={"port": grpc_port, "grpc_servicer_functions": functions},
            )
            yield RayCluster(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
            serve.shutdown()
        finally:
            processes = descendants() - before
            ray.shutdown()
            try:
                wait_until(lambda: all(map(has_ended, processes)))
            finally:
                for process in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()


@pytest.fixture
def two_raylets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of two nodes with a CPU each."""
    utils: Any = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    node = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("RAY_TMPDIR", directory)
        Path(directory, "ray").mkdir()
        head = {**node, "include_dashboard": False}
        cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        cluster.node_args = {**node, "node_ip_address": "127.0.0.2"}  # Ray tells nodes apart by their addresses
        cluster.node = cluster.add_node(**cluster.node_args)
        try:
            yield cluster
        finally:
            cluster.shutdown()
