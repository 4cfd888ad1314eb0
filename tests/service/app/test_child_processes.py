"""What child processes get and leave: no keys, no cores, and which of them ends first where memory runs out.

Two services never share a Unix socket, and a service does not end because nobody can read what it says.
"""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from penstock.clients.host.socket_lock import PathTaken, socket_lock
from penstock.models.executor.child_process import CORES_VARIABLE, PASSED_VARIABLE, child_environment
from penstock.service.config.addresses import Address, ListenError

PENSTOCK = Path(sys.executable).with_name("penstock")
SMALL = ("--max-model-len=256", "--kv-cache-memory-bytes=16M")
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "HF_HUB_TOKEN": "secret",
    "HUGGING_FACE_HUB_TOKEN": "secret",
    "MY_OWN_VARIABLE": "secret",
    "OPENAI_API_KEY": "secret",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
    "PENSTOCK_API_KEY": "secret",
}


@pytest.fixture
def start():
    """Starts ``penstock serve``; returns the process once it has printed its greeting, or has ended."""
    processes = []

    def start(*arguments, **options):
        process = subprocess.Popen(
            [PENSTOCK, "serve", "--admin-listen=off", *SMALL, *arguments], stdout=subprocess.PIPE, text=True, **options
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def score(pid):
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_child_gets_what_it_needs_and_no_secret():
    needed = {"PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2", "HF_HOME": "/h"}
    needed |= {"TOKENIZERS_PARALLELISM": "false", "LD_LIBRARY_PATH": "/l", "PENSTOCK_CPU_LIBRARY": "/x.so"}
    assert child_environment(needed | SECRETS) == needed
    named = {PASSED_VARIABLE: "MY_OWN_VARIABLE, HF_TOKEN", **SECRETS}
    assert child_environment(named) == {name: named[name] for name in (PASSED_VARIABLE, "MY_OWN_VARIABLE", "HF_TOKEN")}


@pytest.mark.parametrize(("value", "cores", "dumpable"), [(None, "0", "0"), ("1", "-1", "1")])
def test_cores_can_be_switched_on(value, cores, dumpable):
    code = (
        "import ctypes, os, resource\n"
        "from penstock.models.executor.child_process import forbid_core_dumps\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)\n"
        "before = resource.getrlimit(resource.RLIMIT_CORE)[0]\n"
        "forbid_core_dumps(os.environ)\n"
        "after = resource.getrlimit(resource.RLIMIT_CORE)[0]\n"
        "print('-1' if after == before != 0 else after, ctypes.CDLL(None).prctl(3))\n"
    )
    environ = {**os.environ, **({} if value is None else {CORES_VARIABLE: value})}
    said = subprocess.run([sys.executable, "-P", "-c", code], env=environ, capture_output=True, text=True, check=True)
    if cores == "-1" and said.stdout.split()[0] == "0":
        pytest.skip("this machine allows no cores at all")
    assert said.stdout.split() == [cores, dumpable]


def test_children_of_a_service(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start("--port=0", f"--http-port={port}", env={**os.environ, **SECRETS})
    assert process.stdout is not None
    assert process.stdout.readline().startswith("penstock")
    kinds = ("models.worker", "http_child", "check_process")

    def found():
        children: dict[str, int] = {}
        for child in psutil.Process(process.pid).children(recursive=True):
            line = " ".join(child.cmdline())
            children |= {kind: child.pid for kind in kinds if kind in line}
        return children

    wait_until(lambda: len(found()) == len(kinds) and score(found()["check_process"]) == 1000)
    children = found()
    for pid in children.values():
        if os.geteuid() == 0:  # only root may read it, since the processes are not dumpable
            secrets = [line for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"secret" in line]
            # The gateway sends its own spans.
            known = [b"OTEL_EXPORTER_OTLP_HEADERS=authorization=secret"] if pid == children["http_child"] else []
            assert secrets == known
        assert re.search(r"Max core file size +0 ", Path(f"/proc/{pid}/limits").read_text())
    first = min(score(children["http_child"]), score(children["check_process"]))
    assert first > score(process.pid) > score(children["models.worker"])


def test_of_two_services_on_one_unix_path_one_serves(start, tmp_path):
    """They start at once, so that neither finds the other's socket yet."""
    flag = f"--listen=unix:{tmp_path / 'socket'}"
    processes = [start(flag, stderr=subprocess.PIPE) for _ in range(2)]
    wait_until(lambda: any(process.poll() is not None for process in processes))
    (loser,) = [process for process in processes if process.poll() is not None]
    (winner,) = [process for process in processes if process is not loser]
    _, errors = loser.communicate()
    assert loser.returncode == 1
    assert "the socket is in use; stop that service or choose another path" in errors
    assert "Traceback" not in errors
    assert winner.stdout.readline().startswith("penstock")
    winner.terminate()
    winner.communicate(timeout=120)
    assert winner.returncode == 0
    assert list(tmp_path.iterdir()) == [], "neither the socket nor its lock stays"


def test_a_lock_ends_with_its_holder(tmp_path):
    path = tmp_path / "socket"
    with socket_lock(path), pytest.raises(PathTaken), socket_lock(path):
        pass
    code = "import sys, time; from pathlib import Path; from penstock.clients.host.socket_lock import socket_lock\n"
    code += "with socket_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    command = [sys.executable, "-P", "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ListenError, match="is in use"), Address.parse(f"unix:{path}").reserved():
            pass
        holder.kill()
    with Address.parse(f"unix:{path}").reserved():
        pass


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("penstock.clients.host.socket_lock.fcntl.flock", flock)
    with Address.parse(f"unix:{tmp_path / 'socket'}").reserved():
        assert "has no locks" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "socket.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ListenError, match="cannot be locked"), Address.parse(f"unix:{tmp_path / 'socket'}").reserved():
        pass


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "</dev/null 2>&- 0<&-"])
def test_the_service_starts_without_a_usable_stderr(redirection, tmp_path):
    """A full disk behind stderr, or no stderr at all, whose number must not become a socket's."""
    arguments = f"--listen=unix:{tmp_path / 'socket'} --admin-listen=off {' '.join(SMALL)}"
    command = ["sh", "-c", f"exec {PENSTOCK} serve {arguments} {redirection}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("penstock")
            descriptor = Path(f"/proc/{process.pid}/fd/2")
            assert str(descriptor.readlink()) in ("/dev/full", "/dev/null")
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("arguments", ["serve --port=x", "serve /nowhere --port=0", "gateway --port=x", "nothing"])
def test_an_unwritable_stderr_does_not_change_the_exit_status(arguments):
    command = f"exec {PENSTOCK} {arguments}"
    told = subprocess.run(["sh", "-c", command], capture_output=True, check=False, text=True)
    full = subprocess.run(["sh", "-c", f"{command} 2>/dev/full"], capture_output=True, check=False)
    assert full.returncode == told.returncode != 0
    assert "Traceback" not in told.stderr
