"""The process that ``penstock serve --http-port`` starts: replaced when it ends, gone when the service is, and told
when to end."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from waiting import until, wait_until

from penstock.clients import Client
from penstock.clients.host.machine import Package, inspect_machine
from penstock.clients.requests import Options
from penstock.service.app import http_process, prepare, serve
from penstock.service.app.http_process import HttpFailed, HttpProcess, Patience, check_installed
from penstock.service.app.usage_examples import Transport, UsageExamples
from penstock.service.config.addresses import HTTP_FLAG, Address, ListenError
from penstock.service.config.command_line import parse_config
from penstock.service.config.flags import ConfigError

# The real bootstrap, and instead of the gateway one that answers each connection with its own process id and arguments.
STAND_IN = """
import os, signal, socket, sys, threading, time
from penstock.service.app import http_child

def gateway(arguments):
    name, *flags = arguments
    assert name == "gateway"
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    listener = socket.socket(fileno=int(given["fd"]))
    beats = int(given["heartbeat-fd"])
    os.write(beats, b".")

    def beat():
        while True:
            time.sleep(0.1)
            os.write(beats, b".")

    threading.Thread(target=beat, daemon=True).start()
    if "deaf" in given:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "tells-signals" in given:
        connection, _ = listener.accept()
        listener.close()
        for number in (signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
        connection.sendall(b"!")
        connection.recv(1)
        return 0
    try:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(f"{os.getpid()} {given['target']}".encode())
    except KeyboardInterrupt:
        return 130

http_child.penstock = gateway
http_child.main(*sys.argv[1:])
"""
BROKEN = "import sys; sys.exit(3)"


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(http_process, "_CHILD", STAND_IN)


@contextlib.asynccontextmanager
async def running(*options, port=0, **patience):
    """A gateway, where it listens, and the address that the service would have."""
    gateway = HttpProcess(Address("127.0.0.1", port, flag=HTTP_FLAG), options, Patience(**patience))
    try:
        service = gateway.open()
        yield gateway, await gateway.start(), service
    finally:
        await gateway.stop()


async def ask(address):
    """Who answered, and what it was told to call."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        pid, target = (await asyncio.wait_for(reader.read(), 120)).decode().split()
        return int(pid), target
    finally:
        writer.close()


async def refused(address):
    with contextlib.suppress(ConnectionError):
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.close()
        return False
    return True


def is_gone(pid):
    """Whether the process has ended. Its new parent may not have reaped it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_it_gets_a_private_socket_and_the_listener(stand_in):
    async with running() as (gateway, address, service):
        pid, target = await ask(address)
        assert pid == gateway.pid
        assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C in a terminal is for the service alone
        assert target == str(service)
        assert stat.S_IMODE(service.path.parent.stat().st_mode) == 0o700
    assert not service.path.parent.exists()
    assert is_gone(pid)
    assert await refused(address)


async def test_another_follows_one_that_was_killed_and_no_connection_is_refused(stand_in, caplog):
    async with running(first_s=0.05) as (_, address, _):
        pid, _ = await ask(address)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: is_gone(pid))
        answers = await asyncio.gather(*(ask(address) for _ in range(20)))
        assert pid not in {answer for answer, _ in answers}
        assert "the HTTP gateway was ended by SIGKILL; restarting it in 0.1 s" in caplog.text


async def test_one_that_hangs_is_killed_and_another_follows(stand_in, caplog):
    async with running(first_s=0.05, silent_s=2.0) as (_, address, _):
        pid, _ = await ask(address)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: is_gone(pid))
        answers = await asyncio.gather(*(ask(address) for _ in range(3)))
        assert pid not in {answer for answer, _ in answers}
        assert "the HTTP gateway sent no heartbeat for 2 s; killing it" in caplog.text
        assert "the HTTP gateway was ended by SIGKILL; restarting it in 0.1 s" in caplog.text


async def test_one_that_hangs_before_it_serves_is_no_gateway(monkeypatch):
    monkeypatch.setattr(http_process, "_CHILD", "import time; time.sleep(1000)")
    with pytest.raises(HttpFailed, match="the HTTP gateway was ended by SIGKILL"):
        async with running(start_s=0.1):
            pass


async def test_the_gateway_itself_lives_while_its_loop_does(caplog):
    async with running(first_s=0.05, silent_s=3.0) as (gateway, address, _), httpx.AsyncClient(timeout=120) as http:
        first = gateway.pid
        await asyncio.sleep(4)
        assert gateway.pid == first
        assert not caplog.records
        os.kill(first, signal.SIGSTOP)
        await until(lambda: is_gone(first))
        assert (await http.get(f"http://{address}/version")).status_code == 200
        assert gateway.pid != first
        assert "sent no heartbeat" in caplog.text


async def test_one_that_never_serves_is_no_gateway(monkeypatch):
    monkeypatch.setattr(http_process, "_CHILD", BROKEN)
    with pytest.raises(HttpFailed, match=f"^{HTTP_FLAG}: the HTTP gateway ended with exit code 3; see its output"):
        async with running():
            pass


async def test_one_that_cannot_start_again_is_tried_less_and_less_often(stand_in, monkeypatch, caplog):
    async with running(first_s=0.1, longest_s=0.2) as (gateway, *_):
        monkeypatch.setattr(http_process, "_CHILD", BROKEN)
        os.kill(gateway.pid, signal.SIGKILL)
        await until(lambda: caplog.text.count("ended with exit code 3") == 2)
        assert "was ended by SIGKILL; restarting it in 0.1 s" in caplog.text
        assert caplog.text.count("ended with exit code 3; restarting it in 0.2 s") == 2
        await until(lambda: gateway.pid is None)


async def test_one_that_served_for_long_is_replaced_at_once(stand_in, caplog):
    async with running(first_s=0.1, steady_s=0.0) as (_, address, _):
        for _ in range(3):
            pid, _ = await ask(address)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: is_gone(pid))
        await ask(address)
        assert caplog.text.count("restarting it in 0.1 s") == 3


async def test_the_gateway_ends_on_drain_and_not_on_a_service_wide_signal(stand_in):
    async with running() as (gateway, address, _):
        pid, _ = await ask(address)
        os.kill(pid, signal.SIGTERM)
        assert (await ask(address))[0] == pid
        gateway.drain()
        await until(lambda: is_gone(pid))
        assert await refused(address)


async def test_one_that_does_not_end_is_killed(stand_in, monkeypatch):
    monkeypatch.setattr(http_process, "_END_TIMEOUT_S", 0.1)
    async with running("--deaf=1") as (_, address, _):
        pid, _ = await ask(address)
    assert is_gone(pid)


async def test_what_is_answered_goes_on_while_it_drains(stand_in):
    async with running("--tells-signals=1") as (gateway, address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert await reader.readexactly(1) == b"!"
        gateway.drain()
        assert await reader.readexactly(1) == bytes([signal.SIGINT])
        assert await refused(address)
        gateway.drain()  # a second SIGINT would cut off what is answered
        os.kill(gateway.pid, signal.SIGUSR1)
        assert await reader.readexactly(1) == bytes([signal.SIGUSR1])
        writer.close()
        await until(lambda: gateway.pid is None)


async def test_a_port_in_use_is_named(stand_in):
    async with running() as (_, address, _):
        with pytest.raises(ListenError, match=f"{HTTP_FLAG} {address}: the port is in use; stop what uses it"):
            async with running(port=address.port):
                pass


def test_missing_packages_are_reported_before_anything_is_loaded(monkeypatch, capsys):
    machine = inspect_machine()
    check_installed(machine, HTTP_FLAG)
    lacks = [
        Package("fastapi", None, "gateway"),
        Package("matplotlib", None, "bench"),
        Package("uvicorn", "1", "gateway"),
    ]
    monkeypatch.setattr(prepare, "inspect_machine", lambda: dataclasses.replace(machine, packages=lacks))
    assert serve.serve(["--port=0", "--http-port=0"]) == 1
    said = (
        "penstock serve: --http-port: not installed: fastapi; pip install 'penstock-llm[gateway]', or omit the flag\n"
    )
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--http-host", "0.0.0.0"], "--http-host: needs --http-port as well: give that too"),
        (["--allowed-origins", "https://a.example/page"], "--allowed-origins: must be origins without a path"),
        (["--allowed-hosts", "a.example:80"], "--allowed-hosts: must be names without a port"),
        (["--responses-file", "f", "--responses-ttl", "0"], "--responses-file: not with --responses-ttl 0"),
        (["--http-port", "70000"], "--http-port: must be 0 to 65,535; it is 70,000"),
        (
            ["--http-port", "0", "--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"],
            "--http-port: --tls-client-ca does not apply to HTTP, where anyone could call; give --api-keys-file",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        parse_config(flags)


def test_the_gateway_gets_its_options():
    http = ["--http-host=::1", "--http-port=0", "--tls-cert=c", "--tls-key=k", "--shutdown-grace=2.5"]
    other = ["--allowed-origins=*", "--allowed-hosts=llm.example", "--unknown-fields=ignore", "--sse-keep-alive=5"]
    stored = ["--responses-file=f", "--responses-ttl=60"]
    config = parse_config([*http, *other, *stored])
    assert config.http_address == "[::1]:0"
    assert prepare.http_options(config) == [
        "--http-tls-cert=c",
        "--http-tls-key=k",
        "--host=::1",
        "--allowed-origins=*",
        "--allowed-hosts=llm.example",
        "--unknown-fields=ignore",
        "--sse-keep-alive=5",
        "--responses-file=f",
        "--responses-ttl=60",
        "--responses-mib=128",
        "--shutdown-grace=13",
    ]


# With the gateway itself ----------------------------------------------------------------------------------------------


LONG = Options(max_tokens=800, ignore_eos=True, seed=1)


def gateway_of(served):
    """The gateway's process."""
    (gateway,) = (p for p in psutil.Process(served.process.pid).children() if "http_child" in " ".join(p.cmdline()))
    return gateway


def socket_directory(gateway):
    """Where the socket between service and gateway is."""
    (target,) = (word for word in gateway.cmdline() if word.startswith("--target=unix:"))
    return Path(target.removeprefix("--target=unix:")).parent


def test_the_printed_calls_work(demo):
    lines = [line.strip() for line in demo.greeting.splitlines() if f" {demo.openai}/" in line]
    assert len(lines) == 2
    streamed, whole = (paste(line) for line in lines)
    assert streamed.rstrip().endswith("data: [DONE]")
    assert json.loads(whole)["choices"][0]["message"]["content"]


def paste(line):
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_printed_fits_what_is_served():
    text = UsageExamples("my model", takes_chat=False, wants_key=True).http(Address("0.0.0.0", 80))
    assert "API at http://127.0.0.1:80/v1" in text
    *_, line = text.splitlines()
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:80/v1/completions"]
    assert "authorization: Bearer YOUR_KEY" in words
    assert json.loads(words[-1]) == {"model": "my model", "prompt": "The kernel is", "max_tokens": 64}
    with_tls = UsageExamples("m", takes_chat=True, wants_key=False, transport=Transport.TLS)
    secure = with_tls.http(Address("0.0.0.0", 80))
    assert "curl --cacert CA.pem https://127.0.0.1:80/v1/chat/completions -H 'content-type" in secure


def test_killing_the_gateway_costs_the_service_nothing_and_killing_the_service_ends_the_gateway(start_serving):
    with start_serving("--log-level=error") as served:
        client = openai.OpenAI(base_url=served.openai, api_key="none", max_retries=0, timeout=120)
        with client, Client(served.target) as direct:
            running = direct.stream("The kernel is", **LONG)
            text = next(running).text
            first = gateway_of(served)
            over_http = client.completions.create(
                model="demo", prompt="The", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            next(over_http)
            first.kill()
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(over_http)
            assert client.completions.create(model="demo", prompt="The", max_tokens=2).choices[0].text
            second = gateway_of(served)
            assert second.pid != first.pid
            text += "".join(delta.text for delta in running)
            assert direct.complete("The kernel is", **LONG).text == text
        directory = socket_directory(second)
        assert directory.is_dir()
        served.process.kill()
        served.process.wait()
        errors = served.log()
        assert "the HTTP gateway was ended by SIGKILL; restarting it in 0.1 s" in errors
        assert "Traceback" not in errors
        wait_until(lambda: is_gone(second.pid) and not directory.exists())


def test_at_the_end_http_takes_nothing_new_and_streams_finish(start_serving):
    with start_serving("--log-level=error") as served:
        client = openai.OpenAI(base_url=served.openai, api_key="none", max_retries=0, timeout=120)
        with client:
            running = client.completions.create(
                model="demo", prompt="The", max_tokens=1500, stream=True, stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            next(running)
            directory = socket_directory(gateway_of(served))
            served.process.terminate()
            port = int(served.http.rpartition(":")[2])
            wait_until(lambda: not connects(port))
            *_, last = running
            assert last.usage is not None
            assert last.usage.completion_tokens == 1500
        assert served.process.wait(120) == 0
        assert "Traceback" not in served.log()
        assert not directory.exists()


def connects(port):
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False
