"""Which values of ``Host`` are served, in every spelling that the standard has."""

import socket

import pytest

from penstock.clients.host.allowed_hosts import AllowedHosts, read_hosts

HOSTS = AllowedHosts("llm.internal", read_hosts("api.example.com, *.corp.example"))


@pytest.mark.parametrize(
    "host",
    [
        "llm.internal", "LLM.Internal:8000", "llm.internal.", "llm.internal.:8000",
        "api.example.com", "API.EXAMPLE.COM:443", "a.corp.example", "a.b.corp.example:80",
        "localhost", "LOCALHOST:8000", "localhost.", "localhost:", "app.localhost", "penstock", "penstock:8000",
        "127.0.0.1", "127.0.0.1:8000", "127.1", "0x7f.1", "192.168.7.9:8000",
        "[::1]", "[::1]:8000", "[::FFFF:127.0.0.1]:80", "[fe80::1%25eth0]:80", "[fe80::1%eth0]",
        socket.gethostname(),
    ],
)  # fmt: skip
def test_names_of_the_server_are_allowed(host):
    assert HOSTS.allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "EVIL.EXAMPLE.", "localhost.evil.example", "127.0.0.1.evil.example",
        "llm.internal.evil.example", "xllm.internal", "api.example.com.evil.example", "corp.example", "xcorp.example",
        "1.2.3.4.5.example", "127.0.0.1.nip.io", "localhost@evil.example", "evil.example@localhost", "::1", "",
        " localhost", "localhost:8000:9", "localhost:80a", "localhost/evil.example", "[evil.example]", "[::1", "a b",
        "localhost,evil.example",
    ],
)  # fmt: skip
def test_other_names_are_not(host):
    assert not HOSTS.allows(host)


def test_any_name_may_be_allowed():
    assert AllowedHosts("", read_hosts("*")).allows("evil.example")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("A.example, b.example.,a.example", ("a.example", "b.example")),
        ("*.x.example,*", ("*.x.example", "*")),
    ],
)
def test_lists_are_read(text, names):
    assert read_hosts(text) == names


@pytest.mark.parametrize("text", ["http://a.example", "a.example:80", "a.*.example", "a b", "a.example/x", "[::1]"])
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ValueError, match="must be names without a port"):
        read_hosts(text)
