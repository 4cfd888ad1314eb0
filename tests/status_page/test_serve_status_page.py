"""``penstock serve --admin-http-port`` and ``penstock status-page``: the page as a process, and the flags of both."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from serve_process import serving
from waiting import wait_until

from penstock.clients.errors import PenstockError
from penstock.clients.status_page import command
from penstock.service.app import prepare
from penstock.service.config.addresses import ListenError, admin_http_address
from penstock.service.config.command_line import parse_config
from penstock.service.config.flags import ConfigError

FLAGS = ["--port=0", "--admin-http-port=0", "--metrics-listen=off", "--kv-cache-memory-bytes=64M", "--log-level=error"]


def url_of(greeting):
    found = re.search(r"Status page for operators: (\S+)/$", greeting, re.MULTILINE)
    assert found is not None, greeting
    return found[1]


def page_process(served):
    (page,) = (each for each in psutil.Process(served.pid).children() if "status-page" in each.cmdline())
    return page


def answered(http):
    """The status, or None where the service was too slow for the page."""
    response = http.get("/api/status")
    return response.json() if response.status_code == 200 else None


def test_the_page_is_a_process_that_is_replaced_and_ends_with_the_service():
    with serving(*FLAGS, "--admin-listen=off") as (served, greeting):
        url = url_of(greeting)
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            assert http.get("/").status_code == 200
            answer = wait_until(lambda: answered(http))
            assert answer["stats"]["state"] == "serving"
            assert http.get("/api/status", headers={"host": "rebound.example"}).status_code == 421
        first = page_process(served)
        first.kill()
        first.wait()
        assert httpx.get(url, timeout=120, trust_env=False).status_code == 200
        second = page_process(served)
        assert second.pid != first.pid
        served.terminate()
        assert served.wait(120) in (0, 128 + signal.SIGTERM)
        wait_until(lambda: not second.is_running())


async def test_the_command_serves_any_service(start_page):
    page = await start_page()
    program = [str(Path(sys.executable).with_name("penstock")), "status-page", "--port=0"]
    with subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        program, stdout=subprocess.PIPE, text=True, env={**os.environ, "PENSTOCK_ADMIN": page.server.admin_target}
    ) as process:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        url = re.match(rf"penstock status-page: (\S+)/ shows the service at {page.server.admin_target}\.", line)
        assert url is not None, line
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            while (response := await http.get(f"{url[1]}/api/status")).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # too slow for the page, where other programs use the cores
            assert response.json()["stats"]["state"] == "serving"
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait) == 0


def test_the_command_takes_no_key():
    with pytest.raises(SystemExit):
        command.main(["--api-key-file=key"])


def test_a_certificate_needs_its_key():
    with pytest.raises(PenstockError, match="--http-tls-cert: needs --http-tls-key as well"):
        command.main(["--http-tls-cert=page.pem"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--admin-http-host", "0.0.0.0"], "--admin-http-host: needs --admin-http-port as well: give that too"),
        (["--admin-http-port", "70000"], "--admin-http-port: must be 0 to 65,535; it is 70,000"),
        (["--admin-http-port", "1", "--admin-http-host", "a:1"], "--admin-http-host: must be a host name or an IP"),
        (
            ["--admin-http-port", "0", "--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a"],
            "--admin-http-port: --tls-client-ca does not apply to HTTP, where anyone could call; give --api-keys-file",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, named):
    with pytest.raises(ConfigError, match=f"^{named}"):
        parse_config(flags)


def test_without_keys_no_other_machine_may_reach_the_page():
    assert admin_http_address(None, has_keys=False) is None
    assert str(admin_http_address("127.0.0.1:1", has_keys=False)) == "127.0.0.1:1"
    assert str(admin_http_address("0.0.0.0:1", has_keys=True)) == "0.0.0.0:1"
    with pytest.raises(ListenError, match=r"^--admin-http-host 0\.0\.0\.0:1: anyone who reaches it could administer"):
        admin_http_address("0.0.0.0:1", has_keys=False)


def test_the_page_gets_its_options():
    flags = [
        "--admin-http-host=::1",
        "--admin-http-port=0",
        "--tls-cert=c",
        "--tls-key=k",
        "--allowed-hosts=ops.example",
    ]
    config = parse_config(flags)
    assert config.admin_http_address == "[::1]:0"
    assert prepare.status_page_options(config) == [
        "--http-tls-cert=c",
        "--http-tls-key=k",
        "--host=::1",
        "--allowed-hosts=ops.example",
    ]
    assert prepare.status_page_options(parse_config([])) == []
