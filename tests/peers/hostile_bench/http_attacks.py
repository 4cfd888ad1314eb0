"""Attacks on the HTTP gateway with a key: bodies, answers that are not read, and streams of many keys."""

import contextlib
import http.client
import json
import select
import socket
import time

from hostile_bench.attack import PAUSE_S, Attack, allow_many_files, connect, run_threads
from hostile_bench.live_service import ATTACKER_KEY, MORE_KEYS

_MIB = 1 << 20
_LAST_READ_S = 10.0
"""For all answers together."""
_LEAST_READ_S = 0.2
_KEYS_TURN_S = 3.0
"""In which each key makes a request."""


def gateway_bodies(attack: Attack) -> None:
    """Sends bodies of 16 MiB with too many values, on six connections."""
    body = b'{"input":[' + b"1," * (8 * _MIB - 100) + b"1]}"
    _post_again(attack, "/v1/embeddings", body, 6)


def tool_parser(attack: Attack) -> None:
    """Has a regular expression make the model write the beginnings of tool calls, one inside the other."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "structured_outputs": {"regex": '(<tool_call>\\{"x":\\[)*'},
        "max_tokens": 3000,
        "min_tokens": 2999,
        "n": 2,
        "stream": True,
    }
    _post_again(attack, "/v1/chat/completions", json.dumps(body).encode(), 1)


def many_keys(attack: Attack) -> None:
    """Calls with each of the tenant's 100 keys: more than the gateway has places. The requests are short and rare."""
    body = json.dumps({"prompt": "x", "max_tokens": 1, "stream": True}).encode()

    def repeat(index: int) -> None:
        time.sleep(_KEYS_TURN_S * index / len(MORE_KEYS))
        while attack.is_on:
            attack.count(len(body), _post(attack, "/v1/completions", body, MORE_KEYS[index]))
            time.sleep(min(_KEYS_TURN_S, attack.left_s))

    run_threads(repeat, len(MORE_KEYS))


def bodies_that_almost_end(attack: Attack) -> None:
    """Holds 64 bodies of 15 MiB that lack their last byte."""
    size = 15 * _MIB
    data = _head("/v1/completions", size) + b'{"prompt":"' + b"x" * (size - 12)
    run_threads(lambda _: _almost_end(attack, data), 64)


def unread_http_answers(attack: Attack) -> None:
    """Holds 60 answers of several MiB that it does not read until the end."""
    allow_many_files()
    body = json.dumps({"tokens": [258] * 400_000}).encode()
    data = _head("/detokenize", len(body)) + body
    held: list[socket.socket] = []
    hung_up = select.poll()
    while attack.is_on:
        if len(held) < 60:
            try:
                connection = connect(attack.http, receive_bytes=4096)
                connection.sendall(data)
            except OSError as error:
                attack.count(0, type(error).__name__)
            else:
                held.append(connection)
                hung_up.register(connection, select.POLLRDHUP)
                attack.num_calls += 1
                attack.num_bytes += len(data)
        gone = {descriptor for descriptor, _ in hung_up.poll(10 if len(held) < 60 else 200)}
        for connection in [each for each in held if each.fileno() in gone]:
            hung_up.unregister(connection)
            held.remove(connection)
            connection.close()
            attack.answers["connection closed"] += 1
    until = time.monotonic() + _LAST_READ_S
    for connection in held:
        attack.answers[_read_at_last(connection, max(until, time.monotonic() + _LEAST_READ_S))] += 1


# ----------------------------------------------------------------------------------------------------------------------


def _post_again(attack: Attack, path: str, body: bytes, number: int) -> None:
    def repeat(_: int) -> None:
        while attack.is_on:
            attack.count(len(body), _post(attack, path, body, ATTACKER_KEY))
            time.sleep(PAUSE_S)

    run_threads(repeat, number)


def _post(attack: Attack, path: str, body: bytes, key: str) -> str:
    """Makes a request; returns its status and the error's code."""
    connection = http.client.HTTPConnection(attack.http, timeout=attack.left_s + 0.1)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        with contextlib.suppress(ConnectionError):  # an early answer to a long body
            connection.request("POST", path, body, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            return _answer(response.status, response.read())
        while response.read1(1 << 16):
            if not attack.is_on:
                return "200, open at the end"
        return "200"
    except TimeoutError:
        return "open at the end"
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def _answer(status: int, body: bytes) -> str:
    try:
        return f"{status} {json.loads(body)['error']['code']}"
    except (ValueError, LookupError, TypeError):
        return str(status)


def _almost_end(attack: Attack, data: bytes) -> None:
    """Sends all of a body except its end, and waits for an answer to it; then does so again."""
    while attack.is_on:
        try:
            with connect(attack.http) as connection:
                connection.settimeout(attack.left_s + 0.1)
                with contextlib.suppress(ConnectionError):  # an early answer
                    connection.sendall(data)
                response = http.client.HTTPResponse(connection)
                response.begin()
                answer = _answer(response.status, response.read())
        except TimeoutError:
            answer = "open at the end"
        except (OSError, http.client.HTTPException) as error:
            answer = type(error).__name__
        attack.count(len(data), answer)
        time.sleep(PAUSE_S)


def _read_at_last(connection: socket.socket, until: float) -> str:
    """Reads an answer; returns its status, or that the service gave it up.

    The connection's end cannot arrive before the rest of what the peer's kernel still has.
    """
    connection.settimeout(max(_LEAST_READ_S, until - time.monotonic()))
    try:
        response = http.client.HTTPResponse(connection)
        response.begin()
        while response.read1(1 << 18):
            if time.monotonic() > until:
                return "held to the end"
        return _answer(response.status, b"") if not response.length else "cut short"
    except http.client.IncompleteRead:
        return "cut short"
    except TimeoutError:
        return "held to the end"
    except (OSError, http.client.HTTPException):
        return "connection closed"
    finally:
        connection.close()


def _head(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
        f"Authorization: Bearer {ATTACKER_KEY}\r\n\r\n"
    ).encode()
