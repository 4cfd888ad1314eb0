"""``penstock gateway``: its flags, what it says when it cannot start, and the API's description."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest

from penstock.clients.cli import main as cli
from penstock.clients.cli.options import KEY_VARIABLE, ConnectionOptions
from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.server.command import gateway_settings, http_settings
from penstock.clients.gateway.server.exposure import exposure_warning
from penstock.clients.gateway.server.flags import make_parser
from penstock.clients.gateway.settings import GatewaySettings


def test_help_has_examples_and_every_flag(capsys):
    assert cli.main(["gateway", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:\n  penstock gateway " in shown
    for flag in (
        "--target",
        "--api-key-file",
        "--write-timeout",
        "--tenant-header",
        "--fd",
        "--heartbeat-fd",
        "--unix-socket",
        "--sse-keep-alive",
        "--allowed-origins",
        "--unknown-fields",
    ):
        assert flag in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "--port: must be 0 to 65,535; it is '70000'"),
        (["--tenant-header", "x tenant"], "--tenant-header: must be 1 to 64 letters"),
        (["--sse-keep-alive", "-1"], "--sse-keep-alive: must be 0 to 3,600"),
        (["--allowed-origins", "app.example.com"], "--allowed-origins: must be origins without a path, such as"),
        (["--unknown-fields", "warn"], "--unknown-fields: invalid choice"),
        (["--http-tls-key", "key.pem"], "--http-tls-key: needs --http-tls-cert as well: set both or neither"),
        (["--http-tls-cert", "/none", "--http-tls-key", "/none"], "/none: cannot be used (No such file"),
        (["--api-key-file", "/none"], "--api-key-file: cannot read /none"),
        (
            ["--host", "0.0.0.0:80"],
            "cannot listen on 0.0.0.0:80:8000: Name or service not known; choose another with --ho",
        ),
        (["--require-tenant-header"], "--require-tenant-header: needs --tenant-header as well: name the header"),
        (
            ["--max-body-mib", "100", "--max-bodies-mib", "100"],
            "a tenant takes at most half of it, where a body of --max-body-mib 100 must fit; give at least 200",
        ),
        (["--allowed-hosts", "a.example:80"], "--allowed-hosts: must be names without a port, separated by commas"),
        (["--objectives", "[]"], "--objectives: must be an object with a priority for each name, such as"),
        (
            ["--responses-file", "/none/responses"],
            "--responses-file /none/responses: No such file or directory; give a file that this user can write",
        ),
        (["--responses-file", "f", "--responses-ttl", "0"], "--responses-file: not with --responses-ttl 0"),
        (["--host", ""], "; choose another with --host, such as 127.0.0.1"),
        (["--fd", "1000000"], "cannot listen on --fd 1000000: Bad file descriptor; give the number of an open socket"),
        (["--unix-socket", "/tmp/" + "x" * 200], "AF_UNIX path too long; choose another path"),
        (
            ["--unix-socket", "/none/socket"],
            "cannot listen on /none/socket: No such file or directory; choose another path with --unix-socket",
        ),
    ],
)
def test_what_is_wrong_is_one_line(capsys, flags, said):
    assert cli.main(["gateway", *flags]) in (1, 2)
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_a_port_in_use_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["gateway", "--port", str(port)]) == 1
    assert capsys.readouterr().err == (
        f"penstock gateway: cannot listen on 127.0.0.1:{port}: Address already in use; stop what uses it, or choose "
        "another with --port\n"
    )


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (["--host=0.0.0.0", "--port=0"], "0.0.0.0:0"),
        (["--host=::"], "[::]:8000"),
        ([], ""),
        (["--host=localhost"], ""),
        (["--host=::1"], ""),
        (["--host=0.0.0.0", "--unix-socket=s"], ""),
        (["--host=0.0.0.0", "--fd=9"], ""),
    ],
)
def test_an_address_that_other_machines_can_reach_is_known(flags, address):
    assert gateway_settings(make_parser().parse_args(flags)).exposed_address == address


def test_what_is_stored_is_set():
    flags = ["--responses-file=f", "--responses-ttl=60", "--responses-mib=3"]
    settings = gateway_settings(make_parser().parse_args(flags))
    assert (settings.responses_file, settings.responses_ttl_s, settings.max_responses_bytes) == (Path("f"), 60, 3 << 20)


def test_the_priorities_of_objectives_are_set():
    assert gateway_settings(make_parser().parse_args(['--objectives={"batch": 10}'])).objectives == {"batch": 10}


class FakeLink:
    """A link to a service that answers GetModel, or fails with a status."""

    stubs = SimpleNamespace(model=SimpleNamespace(GetModel=None))

    def __init__(self, settings, code=None):
        self.settings = settings
        self._code = code

    async def call(self, method, request, metadata):
        assert metadata == ()  # without a key
        if self._code is not None:
            raise RequestFailed(self._code, "no")


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({}, None, "127.0.0.1:50051, without a key; start penstock serve with --api-keys-file, or listen on 127.0.0.1"),
        ({}, grpc.StatusCode.UNAVAILABLE, "unless it requires keys; start penstock serve with --api-keys-file"),
        ({}, grpc.StatusCode.UNAUTHENTICATED, None),
        (
            {"service": ConnectionOptions("x", "key")},
            None,
            "x, under the key of --api-key-file; let only a proxy that knows",
        ),
        ({"exposed_address": ""}, None, None),
    ],
)
async def test_who_can_use_what_without_a_key_is_warned_of(caplog, settings, code, said):
    link = FakeLink(GatewaySettings(**{"exposed_address": "0.0.0.0:8000", **settings}), code)
    async with exposure_warning(link):  # type: ignore[arg-type]
        for _ in range(5):
            await asyncio.sleep(0)
    texts = [record.getMessage() for record in caplog.records]
    if said is None:
        assert texts == []
    else:
        [text] = texts
        assert text.startswith("--host 0.0.0.0:8000: anyone who can reach this address can use the service at ")
        assert said in text


def test_a_key_in_the_environment_is_not_the_gateways(monkeypatch, tmp_path):
    monkeypatch.setenv(KEY_VARIABLE, "a person's")
    parser = make_parser()
    assert gateway_settings(parser.parse_args([])).service.api_key is None
    file = tmp_path / "key"
    file.write_text("the gateway's\n")
    assert gateway_settings(parser.parse_args(["--api-key-file", str(file)])).service.api_key == "the gateway's"


def test_flags_become_settings():
    arguments = make_parser().parse_args(
        ["--target=unix:/x", "--tenant-header=X-Tenant", "--max-body-mib=2", "--request-timeout=5", "--host=::1",
         "--require-tenant-header", "--allowed-hosts=LLM.example, *.x.example",
         "--sse-keep-alive=0", "--unknown-fields=ignore", "--allowed-origins=https://a.example, http://localhost:3000"]
    )  # fmt: skip
    settings = gateway_settings(arguments)
    assert settings.keepalive_s == 0
    assert settings.ignores_unknown_fields
    assert settings.allowed_origins == ("https://a.example", "http://localhost:3000")
    assert settings.service.target == "unix:/x"
    assert settings.tenant_header == "x-tenant"
    assert settings.max_body_bytes == 2 << 20
    assert settings.max_bodies_bytes == 128 << 20
    assert settings.requires_tenant
    assert settings.allowed_hosts is not None
    assert [settings.allowed_hosts.allows(host) for host in ("llm.example:80", "a.x.example", "b.example")] == [
        True,
        True,
        False,
    ]
    assert settings.request_timeout_s == 5
    assert http_settings(arguments).host == "::1"


def test_bodies_have_room_for_one_of_the_largest():
    arguments = make_parser().parse_args(["--max-body-mib=100"])
    assert gateway_settings(arguments).max_bodies_bytes == 200 << 20


def test_no_page_reaches_a_unix_socket():
    assert gateway_settings(make_parser().parse_args(["--unix-socket=s"])).allowed_hosts is None


def test_it_starts_without_a_service_and_ends_in_order(tmp_path):
    path = tmp_path / "socket"
    code = "import sys; from penstock.clients.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "gateway", "--target", "127.0.0.1:1", "--unix-socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"http+unix:{path}/v1 in front of 127.0.0.1:1" in process.stdout.readline()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://gateway") as http:
            assert http.get("/version").status_code == 200
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert not path.exists()


def test_the_description_is_whole():
    described = create_app(GatewaySettings()).openapi()
    schemas = described["components"]["schemas"]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation.get("summary"), (method, path)
    for name in re.findall(r"#/components/schemas/(\w+)", str(described)):
        assert name in schemas
    assert {"ChatRequest", "ChatCompletion", "ChatChunk", "CompletionRequest", "ErrorBody"} <= schemas.keys()
    undescribed = [
        f"{name}.{field}"
        for name in ("ChatRequest", "CompletionRequest")
        for field, shape in schemas[name]["properties"].items()
        if not shape.get("description") and "$ref" not in str(shape)
    ]
    assert undescribed == []
