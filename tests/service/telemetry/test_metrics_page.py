"""The HTTP listener of the metrics page: methods, names of hosts, slow and idle connections, and its address."""

import asyncio
import concurrent.futures
import http.client
import socket
import threading
import urllib.error
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from waiting import until
from wire.http_get import fetch

from penstock.service.config.addresses import Address, ListenError, metrics_address
from penstock.service.telemetry import collector as metrics_reader, prometheus as metrics_page


async def test_only_the_metrics_are_served(metered):
    target = metered.server.metrics_target
    with pytest.raises(urllib.error.HTTPError) as error:
        await asyncio.to_thread(fetch, target, path="/")
    assert error.value.code == 404
    assert error.value.read() == b"there is only: /metrics, /livez, /readyz\n"
    some = await asyncio.to_thread(fetch, target, path="/metrics?name[]=penstock_steps_total")
    assert [family.name for family in parse_text(some)] == ["penstock_steps"]


async def test_head_and_options_of_the_metrics(metered):
    def ask(method, path):
        connection = http.client.HTTPConnection(metered.server.metrics_target, timeout=30)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, answer.headers, body

    for method, path, status in (
        ("HEAD", "/metrics", 200),
        ("HEAD", "/", 404),
        ("OPTIONS", "/metrics", 204),
        ("POST", "/metrics", 405),
        ("HEAD", "/livez", 200),
        ("OPTIONS", "/readyz", 204),
        ("POST", "/readyz", 405),
    ):
        answered, headers, body = await asyncio.to_thread(ask, method, path)
        assert answered == status
        assert bool(body) == (method == "POST")
        if method == "HEAD":
            assert int(headers["content-length"]) > 0
        else:
            assert headers["allow"] == "GET, HEAD, OPTIONS"


async def test_a_scrape_of_a_busy_loop_gets_503(metered, monkeypatch):
    monkeypatch.setattr(metrics_reader, "READ_S", 0.05)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(fetch, metered.server.metrics_target)
        error = fetched.exception(timeout=120)  # meanwhile the loop does nothing else
    assert isinstance(error, urllib.error.HTTPError)
    assert error.code == 503
    error.close()


@pytest.mark.parametrize("sent", [b"", b"GET /metr"])
async def test_connections_without_a_request_give_way(metered, sent):
    address = Address.parse(metered.server.metrics_target)
    idle = [socket.create_connection((address.host, address.port)) for _ in range(metrics_page.MAX_CONNECTIONS)]
    try:
        for connection in idle:
            connection.sendall(sent)
        assert "penstock_steps_total" in await asyncio.to_thread(fetch, metered.server.metrics_target)
        idle[0].settimeout(120)
        with suppress(ConnectionError):
            assert await asyncio.to_thread(idle[0].recv, 1) == b""
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)
    finally:
        for connection in idle:
            connection.close()


async def test_requests_that_take_long_give_way(metered, monkeypatch):
    """As do those whose clients read slowly."""
    monkeypatch.setattr(metrics_page, "SCRAPE_S", 0.0)
    answer, release, num_slow = metrics_page._answer, threading.Event(), 0

    def answer_slowly(registry, environ):
        nonlocal num_slow
        if environ["QUERY_STRING"] == "slow":
            num_slow += 1
            release.wait(120)
        return answer(registry, environ)

    monkeypatch.setattr(metrics_page, "_answer", answer_slowly)
    address = Address.parse(metered.server.metrics_target)
    slow = [socket.create_connection((address.host, address.port)) for _ in range(metrics_page.MAX_CONNECTIONS)]
    try:
        for connection in slow:
            connection.sendall(b"GET /metrics?slow HTTP/1.0\r\n\r\n")
        await until(lambda: num_slow == len(slow))
        assert "penstock_steps_total" in await asyncio.to_thread(fetch, metered.server.metrics_target)
    finally:
        release.set()
        for connection in slow:
            connection.close()


async def test_while_all_requests_are_answered_new_connections_are_closed(metered, monkeypatch):
    monkeypatch.setattr(metrics_page, "MAX_CONNECTIONS", 0)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        await asyncio.to_thread(fetch, metered.server.metrics_target)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost"], 200), (["127.0.0.1:1"], 200), (["[::1]:1"], 200), (["LOCALHOST.:9"], 200), ([], 200),
        (["page.example"], 200), (["evil.example"], 421), (["evil.example:80"], 421),
        (["localhost", "evil.example"], 421), ([""], 421),
    ],
)  # fmt: skip
async def test_the_page_has_its_own_names_only(start_service, hosts, status):
    service = await start_service(metrics_listen="127.0.0.1:0", allowed_hosts=("page.example",))

    def ask():
        address = Address.parse(service.server.metrics_target)
        connection = http.client.HTTPConnection(address.host, address.port, timeout=120)
        connection.putrequest("GET", "/metrics", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    found, text = await asyncio.to_thread(ask)
    assert found == status
    assert ("penstock_steps_total" in text) is (status == 200)
    assert ("--allowed-hosts" in text) is (status == 421)


async def test_a_request_that_comes_byte_by_byte_is_cut(metered, monkeypatch):
    monkeypatch.setattr(metrics_page, "REQUEST_S", 0.05)
    address = Address.parse(metered.server.metrics_target)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        async with asyncio.timeout(120):
            with suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"G")
                    await writer.drain()
                    await asyncio.sleep(0.01)
    finally:
        writer.transport.abort()


async def test_it_ends_with_the_service(start_service):
    service = await start_service(metrics_listen="[::1]:0")
    assert "penstock_steps_total" in await asyncio.to_thread(fetch, service.server.metrics_target)
    await service.server.stop()
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(fetch, service.server.metrics_target)


async def test_a_port_in_use_is_reported(metered, start_service):
    with pytest.raises(ListenError, match=r"--metrics-listen 127\.0\.0\.1:\d+: "):
        await start_service(metrics_listen=metered.server.metrics_target)


async def test_without_an_address_there_is_no_page(start_service):
    service = await start_service()
    assert service.server.metrics_target is None


def test_where_the_page_is_by_default():
    def where(listen, text=None):
        address = metrics_address(text, Address.parse(listen))
        return None if address is None else str(address)

    assert where("0.0.0.0:50051") == "127.0.0.1:50053"
    assert where("127.0.0.1:65535") == "127.0.0.1:65533"
    assert where("127.0.0.1:0") == "127.0.0.1:0"
    assert where("unix:/run/penstock.sock") is None
    assert where("unix:/run/penstock.sock", "0.0.0.0:9464") == "0.0.0.0:9464"
    assert where("127.0.0.1:50051", "off") is None
    with pytest.raises(ListenError, match="must be HOST:PORT, or off"):
        where("127.0.0.1:50051", "unix:/run/metrics")
    with pytest.raises(ListenError, match="--metrics-listen 9464: must be HOST:PORT with a port of 0 to 65535, or off"):
        where("127.0.0.1:50051", "9464")
