"""Keys of tokens from a URL: fetched within limits, again when they change, and kept while they cannot be fetched."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.clients.host.reloaded_files import FileError
from penstock.service.auth import jwks_url
from penstock.service.auth.identity import BearerAuthenticator, Principal
from penstock.service.auth.jwks_url import FETCH_INTERVAL_S, MIN_INTERVAL_S, RETRY_INTERVAL_S, JwksUrl
from penstock.service.auth.jwt import TokenRules
from penstock.service.auth.operator_files import OperatorFiles
from penstock.service.config.serve_config import ServeConfig
from penstock.service.errors import ServiceError

RULES = TokenRules("https://id.example", "penstock")


class Provider:
    """An identity provider's server, which answers with ``status`` and ``body``."""

    def __init__(self, authority, directory):
        self.status, self.body, self.num_fetches = 200, b"", 0
        self.headers: dict[str, str] = {}
        self.trickles = threading.Event()
        self._over = threading.Event()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                provider.num_fetches += 1
                self.send_response(provider.status)
                for name, value in {"Content-Length": str(len(provider.body)), **provider.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                while provider.trickles.is_set() and not provider._over.wait(0.01):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                self.wfile.write(provider.body)

            def log_message(self, *_):
                pass

        chain, key = authority.issue()
        (directory / "chain.pem").write_bytes(chain + key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "chain.pem")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"https://localhost:{self._server.server_address[1]}/jwks.json"

    def publish(self, jwks):
        self.status, self.body = 200, json.dumps(jwks).encode()

    def close(self):
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def provider(new_authority, issuer, tmp_path, monkeypatch):
    authority = new_authority("Test CA")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    found = Provider(authority, tmp_path)
    found.publish(issuer.jwks())
    yield found
    found.close()


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


def refresh(keys):
    take = keys.refresh()
    if take is not None:
        take()
    return take is not None


def only(issuer, *kids):
    return {"keys": [jwk for jwk in issuer.jwks()["keys"] if jwk["kid"] in kids]}


def test_keys_are_fetched_and_fetched_again(provider, issuer, clock):
    provider.publish(only(issuer, "ed"))
    keys = JwksUrl(provider.url, RULES, clock)
    assert keys.principal_of(issuer.token("ed")) == Principal("acme")
    assert keys.principal_of("no token") is None
    provider.publish(only(issuer, "ec"))
    assert not refresh(keys)
    clock.now += FETCH_INTERVAL_S
    assert refresh(keys)
    assert keys.principal_of(issuer.token("ec")) == Principal("acme")
    with pytest.raises(ServiceError):
        keys.principal_of(issuer.token("ed"))
    clock.now += FETCH_INTERVAL_S
    assert not refresh(keys)  # the same content
    assert provider.num_fetches == 3


def test_a_token_of_an_unknown_key_has_the_keys_fetched_soon_but_not_often(provider, issuer, clock):
    provider.publish(only(issuer, "ed"))
    keys = JwksUrl(provider.url, RULES, clock)
    provider.publish(issuer.jwks())
    for _ in range(3):
        with pytest.raises(ServiceError):
            keys.principal_of(issuer.token("rsa"))
        assert not refresh(keys)
    clock.now += MIN_INTERVAL_S
    assert refresh(keys)
    assert keys.principal_of(issuer.token("rsa")) == Principal("acme")
    for _ in range(3):
        with pytest.raises(ServiceError):
            keys.principal_of(issuer.token("rsa", {"kid": "unknown"}))
        assert not refresh(keys)
    assert provider.num_fetches == 2


def test_a_token_with_a_bad_signature_does_not_have_the_keys_fetched(provider, issuer, other_issuer, clock):
    keys = JwksUrl(provider.url, RULES, clock)
    with pytest.raises(ServiceError):
        keys.principal_of(other_issuer.token("ed"))
    clock.now += MIN_INTERVAL_S
    assert not refresh(keys)
    assert provider.num_fetches == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"status": 503}, "returned status 503"),
        ({"status": 302, "headers": {"Location": "https://localhost/other"}}, "returned status 302"),
        ({"body": b"<html>"}, "is not a JWKS"),
        ({"body": b"\xff"}, "is not a JWKS"),
        ({"body": b'{"keys": []}'}, "holds no key that signs tokens"),
        ({"body": b" " * ((1 << 20) + 1)}, "is longer than 1,048,576 bytes"),
        ({"headers": {"Content-Length": "none"}, "body": b""}, "is not a JWKS"),
    ],
)
def test_the_last_good_keys_stay_in_use(provider, issuer, clock, caplog, change, problem):
    keys = JwksUrl(provider.url, RULES, clock)
    before = dict(vars(provider))
    vars(provider).update(change)
    clock.now += FETCH_INTERVAL_S
    for _ in range(2):
        assert not refresh(keys)
        clock.now += RETRY_INTERVAL_S
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"--jwt-jwks-url {provider.url}: {problem}" in record.message
    assert "the previous keys stay in use" in record.message
    assert keys.principal_of(issuer.token()) == Principal("acme")
    vars(provider).update({name: before[name] for name in change})
    provider.publish(only(issuer, "ed"))
    assert refresh(keys)
    assert provider.num_fetches == 4


def test_a_server_that_trickles_does_not_hold_up_the_other_files(provider, issuer, clock, monkeypatch, caplog):
    keys = JwksUrl(provider.url, RULES, clock)
    monkeypatch.setattr(jwks_url, "FETCH_TIMEOUT_S", 0.05)
    provider.headers = {"Content-Length": str(1 << 19)}
    provider.trickles.set()
    clock.now += FETCH_INTERVAL_S
    assert keys.refresh() is None
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "took longer than 0.05 s" in record.message or "sends too slowly" in record.message
    assert keys.principal_of(issuer.token()) == Principal("acme")


def test_a_download_that_hangs_is_not_waited_for_and_not_started_twice(provider, issuer, clock, monkeypatch, caplog):
    """Such as in the resolver, which has no time limit of its own."""
    keys = JwksUrl(provider.url, RULES, clock)
    monkeypatch.setattr(jwks_url, "FETCH_TIMEOUT_S", 0.05)
    over, num_started = threading.Event(), []

    def hang(*_, **__):
        num_started.append(1)
        over.wait()
        raise OSError("no such host")

    monkeypatch.setattr(keys._opener, "open", hang)
    clock.now += FETCH_INTERVAL_S
    for _ in range(2):
        assert keys.refresh() is None
        clock.now += RETRY_INTERVAL_S
    assert len(num_started) == 1
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "took longer than 0.05 s" in record.message
    over.set()
    assert keys.principal_of(issuer.token()) == Principal("acme")


def test_a_service_does_not_start_without_keys(provider):
    provider.status = 404
    with pytest.raises(FileError, match=r"returned status 404; it must be 200, without a redirect$"):
        JwksUrl(provider.url, RULES)
    provider.close()
    with pytest.raises(FileError, match=r"cannot be fetched \(.*\); check the URL$"):
        JwksUrl(provider.url, RULES)


def test_a_server_whose_certificate_is_not_trusted_is_refused(provider, monkeypatch, tmp_path):
    (tmp_path / "none.pem").write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(FileError, match="CERTIFICATE_VERIFY_FAILED"):
        JwksUrl(provider.url, RULES)


def test_a_service_accepts_the_tokens_and_watches_the_url(provider, issuer):
    config = ServeConfig(jwt_jwks_url=provider.url, jwt_issuer=RULES.issuer, jwt_audience=RULES.audience)
    files = OperatorFiles.load(config)
    assert isinstance(files.authenticator, BearerAuthenticator)
    assert files.authenticator.authenticate([("authorization", f"Bearer {issuer.token()}")]) == Principal("acme")
    assert [str(watched) for watched in files.watched] == [f"--jwt-jwks-url {provider.url}"]
