"""``penstock serve`` ends on signals, in time though a thread is busy, and when its worker cannot be replaced."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest
from serve_process import PENSTOCK, serving, target_of, write_small_model
from waiting import wait_until

import penstock.v1 as pb
from penstock.clients import Client
from penstock.clients.errors import RequestFailed
from penstock.v1.generation_pb2_grpc import GenerationServiceStub


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("small"))


@contextmanager
def long_request(target):
    """A request that runs, in a thread; its failure is in the list."""
    runs, failures = threading.Event(), []

    def run():
        with Client(target) as client:
            try:
                for _ in client.stream("long", max_tokens=15_000, ignore_eos=True):
                    runs.set()
            except RequestFailed as failure:
                failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    assert runs.wait(120)
    yield failures
    thread.join(120)
    assert not thread.is_alive()


def ended(process):
    """Whether the process has ended. Its new parent may not have reaped it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_second_interrupt_ends_it_at_once(small_model):
    with (
        serving(small_model, "--port", "0", "--kv-cache-memory-bytes=64M") as (process, greeting),
        long_request(target_of(greeting)) as failures,
    ):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None, "running requests have their grace"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert [failure.code for failure in failures] == [grpc.StatusCode.UNAVAILABLE]


SLOW_TOKENIZER = """
import sys, time
from penstock.service.app import command
from penstock.service.text import tokenizer

def encode(self, text, *arguments):
    print("a thread is busy", file=sys.stderr, flush=True)
    time.sleep(60)

tokenizer.Tokenizer.encode = encode
sys.exit(command.main(sys.argv[1:]))
"""


def test_it_ends_in_time_though_a_text_is_being_tokenized(small_model):
    """Two seconds after the grace; the rest is for a slow machine."""
    arguments = (small_model, "--port", "0", "--kv-cache-memory-bytes=64M", "--shutdown-grace=0")
    with (
        serving(*arguments, command=(sys.executable, "-P", "-c", SLOW_TOKENIZER)) as (process, greeting),
        grpc.insecure_channel(target_of(greeting)) as channel,
    ):
        start = pb.GenerationStart(text="long")
        call = GenerationServiceStub(channel).Complete.future(pb.CompleteRequest(start=start))
        assert process.stderr is not None
        while "a thread is busy" not in process.stderr.readline():
            pass
        process.terminate()
        assert process.wait(120) == 0
        assert call.code() is grpc.StatusCode.UNAVAILABLE


IMPATIENT = """
import sys
from penstock.scheduler.loop.engine import Engine
from penstock.service.app import command

Engine.__init__.__kwdefaults__["restart_delay_s"] = 0.01
sys.exit(command.main(sys.argv[1:]))
"""


def test_a_failed_worker_replacement_fails_requests_and_exits_nonzero(small_model, tmp_path):
    model = shutil.copytree(small_model, tmp_path / "model")
    with (
        serving(model, "--port=0", "--kv-cache-memory-bytes=64M", command=(sys.executable, "-P", "-c", IMPATIENT)) as (
            process,
            greeting,
        ),
        long_request(target_of(greeting)) as failures,
    ):
        shutil.rmtree(model)
        (worker,) = workers_of(process)
        worker.send_signal(signal.SIGKILL)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert [failure.code for failure in failures] == [grpc.StatusCode.UNAVAILABLE]
    assert errors.count("another worker did not start: ") == 5
    assert "the engine has failed" in errors
    assert "Traceback" not in errors


def workers_of(process):
    """Not other children, such as one that is asked for GPUs."""
    found = []
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.Error):
            found += [child] if "penstock.models.worker.main" in " ".join(child.cmdline()) else []
    return found


def catches(process, number):
    """Whether a signal is its own to answer by now."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in status if line.startswith("SigCgt:"))
    return int(caught, 16) >> (number - 1) & 1


def test_a_signal_while_it_loads_ends_it_and_its_worker():
    with subprocess.Popen([PENSTOCK, "serve", "--port", "0"], stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: catches(process, signal.SIGTERM))
            (worker,) = workers_of(process)
        finally:
            process.terminate()
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM
    wait_until(lambda: ended(worker))
    assert b"Traceback" not in errors
