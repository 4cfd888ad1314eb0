"""Runs ``penstock worker`` on other hosts of a Ray cluster, for a service whose ranks run on several hosts.

``penstock serve --distributed-executor-backend ray`` starts this as a process of its own, and tells it on its standard
input which hosts it needs. Ray chooses the hosts and starts an actor on each, which runs the worker. From there on
everything is as without Ray: the worker joins the service over TCP, and the service notices by that connection when it
is lost. Ray then starts the actor again, as soon as it has a host for it. This process and all actors end when its
standard input is closed.
"""

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

INSTALL = "pip install 'penstock-llm[ray]'"
WAIT_S = 10.0
"""How often it is logged that hosts are missing."""
HERE = 0.001
"""How much is reserved of the resource that Ray has for each node."""
_WORKER = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the actor, however that ends
from penstock.clients.cli.main import main
raise SystemExit(main())
"""

_log = logging.getLogger(__name__)


class AgentsOrder(msgspec.Struct, frozen=True):
    """Which workers a service needs."""

    arguments: list[str]
    """Those of ``penstock worker``, without the token."""
    num_hosts: int
    """The number of hosts besides this one."""
    resources: dict[str, float]
    """What Ray reserves on each of them, such as {"CPU": 8}."""
    token: str = ""
    """The join token in hexadecimal digits; empty: there is none."""
    address: str = "auto"
    """The address of the Ray cluster, as ``ray.init`` takes it."""


class WorkerAgent:
    """The actor of one host: ``penstock worker`` as a child process. It ends with the child, so that Ray starts
    another."""

    def __init__(self, arguments: Sequence[str], token: str) -> None:
        self._token_file = _write_token(token) if token else None
        with_token = ["--join-token-file", str(self._token_file)] if self._token_file else []
        self._process = subprocess.Popen([sys.executable, "-P", "-c", _WORKER, "worker", *arguments, *with_token])
        threading.Thread(target=self._end_with_child, daemon=True).start()

    def pid(self) -> int:
        """Returns the process id of the worker."""
        return self._process.pid

    def _end_with_child(self) -> None:
        code = self._process.wait()
        if self._token_file is not None:
            self._token_file.unlink(missing_ok=True)
        _log.warning("penstock worker has ended with exit code %d", code)
        os._exit(1)


def main() -> int:
    """Runs until the standard input is closed. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=AgentsOrder)
    try:
        import ray
    except ImportError:
        _log.error("--distributed-executor-backend ray: Ray is not installed: %s", INSTALL)
        return 1
    try:
        ray.init(address=order.address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises several kinds
        _log.error("--distributed-executor-backend ray: no Ray cluster was found (%s): run ray start first", error)
        return 1
    closed = threading.Event()
    threading.Thread(target=_wait_closed, args=(closed,), daemon=True).start()
    try:
        group = _reserve(ray, order, closed)
        if group is not None:
            actors = [_start(ray, order, group, number) for number in range(1, order.num_hosts + 1)]
            closed.wait()
            del actors
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
    return 0


def _reserve(ray: Any, order: AgentsOrder, closed: threading.Event) -> Any:
    """Reserves the hosts: bundle 0 is this one, where the leader runs ranks too. Waits until Ray has them; returns None
    if the input is closed before."""
    here = {f"node:{ray.util.get_node_ip_address()}": HERE}
    bundles = [{**order.resources, **here}, *[order.resources] * order.num_hosts]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    while not group.wait(WAIT_S):
        if closed.is_set():
            return None
        wanted = ", ".join(f"{number:g} {name}" for name, number in order.resources.items())
        _log.info("Ray has no room yet: needs this host and %d others, each with %s", order.num_hosts, wanted)
    return group


def _start(ray: Any, order: AgentsOrder, group: Any, number: int) -> Any:
    """Starts the actor of a bundle, and again whenever it has ended."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = dict(order.resources)
    actor = ray.remote(WorkerAgent).options(
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        max_restarts=-1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
    )
    return actor.remote(order.arguments, order.token)


def _wait_closed(closed: threading.Event) -> None:
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    closed.set()


def _write_token(token: str) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="penstock-join-")  # readable by this user only
    with os.fdopen(descriptor, "wb") as file:
        file.write(bytes.fromhex(token))
    return Path(name)
