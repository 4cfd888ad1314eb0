"""A pod's container as far as it runs without a cluster: its variables, its probes and its hook."""

import base64
import datetime
import hashlib
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.manifests import WORKER, Manifest, container, environment, expand, find, on_this_machine
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from serve_process import PENSTOCK, serving, target_of
from wire.http_get import fetch

from penstock.clients import Client, Delta
from penstock.service.config.addresses import LIVE_PATH, READY_PATH

OPERATOR_KEY = "a-key-of-an-operator"
PROMPT = "Once upon a time"
OPTIONS: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.0}
"""Takes a second or more, so that something can happen meanwhile."""

Serve = Callable[[Manifest], Any]


def probes(greeting: str) -> list[int]:
    """The status of liveness and readiness at the metrics listener."""
    found = []
    for path in (LIVE_PATH, READY_PATH):
        try:
            fetch(metrics_of(greeting), path=path)
            found.append(200)
        except urllib.error.HTTPError as error:
            found.append(error.code)
    return found


def metrics_of(greeting: str) -> str:
    found = re.search(r"http://(\S+)/metrics", greeting)
    assert found is not None, greeting
    return found[1]


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Stands for /etc/penstock: the files of the Secrets."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    certificate = builder.serial_number(1).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    hashed = hashlib.sha256(OPERATOR_KEY.encode()).hexdigest()
    files = {
        "tls/tls.crt": certificate.public_bytes(pem),
        "tls/tls.key": key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        "keys/keys": f"sha256:{hashed} operators admin\n".encode(),
        "operator/key": OPERATOR_KEY.encode(),
    }
    for file, content in files.items():
        path = tmp_path / "etc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "etc"


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Starts the service with a container's variables, free ports, and folders of the test in place of volumes."""

    def run(rendered: Manifest) -> Any:
        values = on_this_machine(environment(rendered, POD_IP="127.0.0.1"), tmp_path)
        return serving(command=(PENSTOCK, "serve"), env=values, cwd=tmp_path)

    return run


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def admin_of(greeting: str) -> str:
    found = re.search(r"admin listener on (\S+):\n", greeting)
    assert found is not None, greeting
    return found[1]


def end(process: subprocess.Popen[str]) -> int:
    """Sends SIGTERM, reads the rest of the output, and returns the exit status."""
    reading = threading.Thread(target=process.communicate)
    process.send_signal(signal.SIGTERM)
    reading.start()
    reading.join()
    return process.returncode


def test_the_service_runs_with_the_variables_of_a_pod(render: Callable[..., Any], serve: Serve) -> None:
    with serve(container(render(shutdown={"drainDelaySeconds": 0}, http={"enabled": True}))) as (process, greeting):
        assert target_of(greeting).startswith("0.0.0.0:")
        assert "penstock_waiting_choices 0" in fetch(metrics_of(greeting))
        assert probes(greeting) == [200, 200]
        assert end(process) == 0


def test_probes_and_hook_work_beside_tls_and_keys(render: Callable[..., Any], serve: Serve, etc: Path) -> None:
    rendered = container(
        render(
            tls={"secret": "tls"},
            apiKeys={"secret": "keys"},
            shutdown={"drainDelaySeconds": 0, "preStop": {"enabled": True, "operatorKey": {"secret": "operator"}}},
        )
    )
    (shell, option, script) = rendered["lifecycle"]["preStop"]["exec"]["command"]
    with serve(rendered) as (process, greeting):
        admin = admin_of(greeting)
        assert probes(greeting) == [200, 200]
        variables = {"PATH": f"{PENSTOCK.parent}:{os.environ['PATH']}", "PENSTOCK_ADMIN": admin}
        command = [shell, option, script.replace("/etc/penstock", str(etc))]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert probes(greeting) == [200, 503]
        assert end(process) == 0


def test_a_worker_is_replaced_and_the_leaders_stream_goes_on(
    render: Callable[..., Any], tmp_path: Path, free_port: int
) -> None:
    flags = {"threads": 1, "kv-cache-memory-bytes": 32 << 20, "join-timeout": 60}
    manifests = render(hosts={"size": 2, "port": free_port}, shutdown={"drainDelaySeconds": 0}, flags=flags)
    token = tmp_path / "etc/join/token"
    token.parent.mkdir(parents=True)
    token.write_bytes(base64.b64decode(find(manifests, "Secret")["data"]["token"]))
    token.chmod(0o440)
    log = tmp_path / "worker.log"
    given = {"POD_IP": "127.0.0.1", "LWS_LEADER_ADDRESS": "127.0.0.1"}
    rendered = container(manifests, role=WORKER)
    variables = on_this_machine(environment(rendered, **given), tmp_path)
    arguments = [expand(each, variables).replace("/etc/penstock", f"{tmp_path}/etc") for each in rendered["args"]]

    def start_worker() -> subprocess.Popen[bytes]:
        with log.open("a") as errors:
            return subprocess.Popen([PENSTOCK, "worker", *arguments], env=variables, cwd=tmp_path, stderr=errors)

    worker = start_worker()  # before its leader, for which it waits
    try:
        leader = on_this_machine(environment(container(manifests), **given), tmp_path)
        with serving(command=(PENSTOCK, "serve"), env=leader, cwd=tmp_path) as (process, greeting):
            with Client(f"127.0.0.1:{target_of(greeting).rpartition(':')[2]}") as client:
                whole = client.complete(PROMPT, **OPTIONS).text
                pieces = []
                for event in client.generate(PROMPT, **OPTIONS):
                    if isinstance(event, Delta):
                        pieces.append(event.text)
                        if len(pieces) == 3:
                            worker.kill()
                            worker.wait()
                            worker = start_worker()
            assert "".join(pieces) == whole
            assert log.read_text().count("as node rank 1 of 2") == 2
            assert end(process) == 0
        worker.terminate()
        assert worker.wait() == 0
    finally:
        worker.kill()
        worker.wait()
