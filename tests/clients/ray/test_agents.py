"""Workers on other hosts that Ray starts: two raylets of one CPU each, and what happens when one is killed."""

import contextlib
import importlib.util
import subprocess
import threading
from typing import Any

import pytest
from serve_process import PENSTOCK, serving, target_of
from waiting import wait_until

from penstock.clients.sync_client import Client

PROMPT = "What does a kernel do?"
OPTIONS: Any = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}
FLAGS = (
    "demo", "--nnodes=2", "--pipeline-parallel-size=2", "--distributed-executor-backend=ray", "--threads=1", "--port=0",
    "--master-addr=127.0.0.1", "--master-port=0", "--kv-cache-memory-bytes=16M",
)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_service_says_how_to_install_it():
    ended = subprocess.run([PENSTOCK, "serve", *FLAGS], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "--distributed-executor-backend ray: Ray is not installed: pip install 'penstock-llm[ray]'" in ended.stderr


@pytest.mark.soak
def test_a_lost_raylet_is_named_and_its_stage_comes_back(two_raylets: Any) -> None:
    with serving("demo", "--port=0", "--threads=1") as (_, greeting), Client(target_of(greeting)) as client:
        expected = client.complete(PROMPT, **OPTIONS).text
    with serving(*FLAGS, f"--ray-address={two_raylets.address}") as (process, greeting):
        log: list[str] = []
        assert process.stderr is not None
        threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True).start()
        assert "2 stages of" in greeting
        with (
            Client(target_of(greeting)) as client,
            contextlib.closing(client.stream(PROMPT, **OPTIONS)) as stream,
        ):
            texts = [next(stream).text for _ in range(5)]
            two_raylets.remove_node(two_raylets.node)
            wait_until(lambda: any("node rank 1" in line and "lost" in line for line in log))
            two_raylets.add_node(**two_raylets.node_args)
            texts += [delta.text for delta in stream]
        assert "".join(texts) == expected
        process.terminate()
        assert process.wait() == 0
