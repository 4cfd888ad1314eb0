"""Where the server listens, and that nothing is left of a start that failed."""

import asyncio
import re
import socket
from contextlib import ExitStack, suppress

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.http_process import HttpProcess
from penstock.service.app.prepare import prepare
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.config.addresses import Address, ListenError, check_apart
from penstock.service.config.command_line import parse_config


async def serves(channel):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return answer.status == health_pb2.HealthCheckResponse.SERVING


class TestListening:
    """host:port and unix:PATH."""

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("127.0.0.1:50051", "127.0.0.1:50051"),
            ("localhost:0", "localhost:0"),
            ("[::1]:80", "[::1]:80"),
            ("unix:/tmp/x.sock", "unix:/tmp/x.sock"),
        ],
    )
    def test_addresses(self, text, parsed):
        assert str(Address.parse(text)) == parsed

    @pytest.mark.parametrize(
        "text", ["", "50051", ":50051", "host:", "host:x", "host:65536", "host:-1", "unix:", "unix:/" + "x" * 200]
    )
    def test_what_is_no_address_is_named(self, text):
        with pytest.raises(ListenError, match="--listen"):
            Address.parse(text)

    async def test_a_port_in_use_is_named_before_anything_starts(self, start_service):
        service = await start_service()
        executor = FakeExecutor(vocab_size=258)
        executor.start = None  # type: ignore[assignment, method-assign]  # it must not come to that
        with pytest.raises(ListenError, match=f"{service.target}.*in use"):
            await start_service(executor, listen=service.target)

    @pytest.mark.parametrize(
        "addresses",
        [
            ("--port 127.0.0.1:7", "--admin-listen 127.0.0.1:7"),
            ("--port 0.0.0.0:7", "--http-port 127.0.0.1:8", "--admin-listen 127.0.0.1:8"),
            ("--port 127.0.0.1:0", "--http-port 127.0.0.1:7", "--metrics-listen [::]:7"),
            ("--listen unix:/run/s", "--admin-listen unix:/run/s"),
        ],
    )
    def test_two_listeners_with_one_address_are_named(self, addresses):
        listeners = [Address.parse(text, flag) for flag, text in (each.split() for each in addresses)]
        one, other = map(re.escape, addresses[-2:])
        with pytest.raises(ListenError, match=rf"^{one} conflicts with {other}; give one of them another address$"):
            check_apart(listeners)

    @pytest.mark.parametrize(
        "addresses",
        [
            ("127.0.0.1:7", "127.0.0.1:8", "unix:/run/s", "unix:/run/t"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("127.0.0.1:7", "192.0.2.1:7"),
        ],
    )
    def test_listeners_with_addresses_of_their_own(self, addresses):
        check_apart([Address.parse(text) for text in addresses])

    async def test_an_address_that_is_not_ours_is_named(self, start_service):
        with pytest.raises(ListenError, match=r"192\.0\.2\.1.*no such address"):
            await start_service(listen="192.0.2.1:50051")
        with pytest.raises(ListenError, match="no address for this host"):
            await start_service(listen="nowhere.invalid:50051")

    @pytest.mark.parametrize(
        ("host", "flag"), [("192.0.2.1", "--host"), ("nowhere.invalid", "--host"), ("127.0.0.1", "--port")]
    )
    def test_the_flag_that_was_given_is_named(self, host, flag):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            config = parse_config(["--host", host, "--port", str(taken.getsockname()[1])])
            with pytest.raises(ListenError, match=rf"^{flag} {host}:\d+: .*; (stop|choose) "):
                Address.parse(config.address, *config.address_flags).check_free()

    async def test_a_unix_socket(self, start_service, tmp_path):
        path = tmp_path / "s"
        service = await start_service(listen=f"unix:{path}")
        assert service.target == f"unix:{path}"
        assert await serves(service.channel)
        with pytest.raises(ListenError, match="in use"):
            await start_service(listen=f"unix:{path}")
        assert await serves(service.channel)
        await service.server.stop()
        assert not path.exists()

    async def test_what_a_dead_service_left_is_removed(self, start_service, tmp_path):
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        service = await start_service(listen=f"unix:{path}")
        assert await serves(service.channel)

    def test_a_socket_that_does_not_refuse_connections_is_not_removed(self, tmp_path):
        """Too many wait for its service, or it is of another kind: somebody may be there."""
        busy, datagrams = tmp_path / "busy", tmp_path / "datagrams"
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(busy))
            listener.listen(0)
            with suppress(BlockingIOError):
                while True:
                    waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                    waiting.setblocking(False)
                    waiting.connect(str(busy))
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(str(datagrams))
            for path in (busy, datagrams):
                with pytest.raises(ListenError, match=f"{path}: the socket cannot be tried .*; stop that service or"):
                    Address.parse(f"unix:{path}").check_free()
                assert path.is_socket()

    async def test_a_file_is_not(self, start_service, tmp_path):
        path = tmp_path / "precious"
        path.write_text("data")
        with pytest.raises(ListenError, match="not a socket"):
            await start_service(listen=f"unix:{path}")
        assert path.read_text() == "data"
        with pytest.raises(ListenError, match="not a directory"):
            await start_service(listen=f"unix:{tmp_path}/missing/s")


class TestExposure:
    """A listener that other machines can reach, where callers need not show who they are, is warned of."""

    @pytest.fixture
    def warnings(self, caplog, monkeypatch, tmp_path):
        """What `penstock serve` logs with these flags before it looks at the model."""
        for name in ("keys", "cert", "key", "ca", "jwks"):
            (tmp_path / name).touch()

        class Reached(Exception):
            pass

        def stop(config):
            raise Reached

        monkeypatch.setattr("penstock.service.app.prepare.OperatorFiles.load", stop)

        def prepared(*flags):
            caplog.clear()
            with pytest.raises(Reached):
                prepare(parse_config(["--port=0", *flags] if "--listen" not in flags[0] else [*flags]))
            return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

        return prepared

    @pytest.mark.parametrize(
        ("flags", "begins", "remedy"),
        [
            (["--host=0.0.0.0"], "--host 0.0.0.0:0: anyone who can reach this address can use", "--api-keys-file"),
            (["--host=::"], "--host [::]:0: anyone", "--tls-client-ca, or listen on 127.0.0.1"),
            (["--listen=0.0.0.0:0"], "--listen 0.0.0.0:0: anyone", "--api-keys-file"),
            (["--http-host=0.0.0.0", "--http-port=0"], "--http-host 0.0.0.0:0: anyone", "--api-keys-file or --jwt"),
            (["--metrics-listen=0.0.0.0:0"], "--metrics-listen 0.0.0.0:0: anyone", "firewall, or listen on 127.0.0.1"),
            (["--host=0.0.0.0", "--tls-cert=c", "--tls-key=k"], "--host 0.0.0.0:0: anyone", "--api-keys-file"),
            (["--host=::", "--contracts=kserve"], "--host [::]:0: anyone who can reach this address can use", "--api"),
            (["--host=::", "--contracts=vllm"], "--host [::]:0: anyone who can reach this address can read", "gateway"),
        ],
    )
    def test_who_can_reach_what_and_the_remedy(self, warnings, flags, begins, remedy):
        [text] = warnings(*flags)
        assert text.startswith(begins)
        assert remedy in text

    def test_each_listener_has_its_own(self, warnings):
        flags = ["--host=0.0.0.0", "--http-host=::", "--http-port=0", "--metrics-listen=0.0.0.0:0"]
        assert len(warnings(*flags)) == 3

    @pytest.mark.parametrize(
        "identity",
        [
            ["--api-keys-file=keys"],
            ["--jwt-jwks-file=jwks", "--jwt-issuer=i", "--jwt-audience=a"],
            ["--tls-cert=c", "--tls-key=k", "--tls-client-ca=ca"],
        ],
    )
    def test_none_where_callers_show_who_they_are(self, warnings, identity):
        assert warnings("--host=0.0.0.0", "--metrics-listen=0.0.0.0:0", *identity) == []

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "127.1", "::ffff:127.0.0.1"])
    def test_none_on_loopback(self, warnings, host, monkeypatch):
        monkeypatch.setattr(Address, "check_free", lambda address: None)  # not every machine has each
        assert warnings(f"--host={host}", f"--http-host={host}", "--http-port=0", "--metrics-listen=localhost:0") == []

    def test_none_on_a_unix_socket(self, warnings, tmp_path):
        assert warnings(f"--listen=unix:{tmp_path}/s") == []


class TestFailedStart:
    """It leaves nothing behind."""

    @pytest.mark.parametrize("fails", ["admin", "metrics", "http"])
    async def test_what_listened_already_does_not_any_more(self, byte_tokenizer, tmp_path, monkeypatch, fails):
        engine = Engine(FakeExecutor(vocab_size=258), SchedulerConfig())
        path, admin = tmp_path / "s", tmp_path / "a"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            http = HttpProcess(Address("127.0.0.1", port if fails == "http" else 0))
            config = ServerConfig(
                "bytes",
                f"unix:{path}",
                f"unix:{admin}",
                f"127.0.0.1:{port}" if fails == "metrics" else "127.0.0.1:0",
            )
            server = Server(config, engine, lambda: byte_tokenizer, http)
            if fails == "admin":
                monkeypatch.setattr("penstock.service.admin.listener.bind", self.cannot_bind)
            with pytest.raises(ListenError):
                await server.start()
        # The metrics listener opens before the engine starts.
        assert engine.state is (EngineState.STARTING if fails == "metrics" else EngineState.STOPPED)
        assert not path.exists()
        assert not admin.exists()

    @staticmethod
    def cannot_bind(server, address, tls):
        raise ListenError(f"{address}: cannot be listened on")

    async def test_a_port_is_free_again(self, start_service):
        with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
            port, metrics = free.getsockname()[1], f"127.0.0.1:{taken.getsockname()[1]}"
            free.close()
            tasks = asyncio.all_tasks()
            with pytest.raises(ListenError, match="--metrics-listen"):
                await start_service(listen=f"127.0.0.1:{port}", metrics_listen=metrics)
            assert asyncio.all_tasks() == tasks
            service = await start_service(listen=f"127.0.0.1:{port}")
            assert await serves(service.channel)
