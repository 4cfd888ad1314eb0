"""Parses a request's body as JSON. A large one is measured first, since parsing blocks every other stream: its cost
depends on the number of values, and hardly on their size."""

import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.requests.json_scan import JsonScan
from penstock.clients.host.parse_turns import PORTION_S, ParseTurns

Body = bytes | bytearray

MAX_PARTS = 1 << 15
"""The limit on lists, objects, strings and names in a body: 4,096 messages have 20,480. Each costs up to 10 us to
validate."""
MAX_COMMAS = 1 << 19
"""The limit on commas between values: a number costs a thirtieth of those 10 us."""
MAX_REALS = 1 << 16
"""The limit on numbers with a fraction or an exponent: each costs a quarter of a microsecond, since it is kept
exact."""
MAX_DEPTH = 256
"""The limit on nested lists and objects. The JSON writer for the service accepts no more either."""
SMALL_BYTES = 64 << 10
"""Bodies up to this size are not measured: they are cheap, whatever they contain."""
_SCAN_BYTES = 1 << 10
"""How many bytes are scanned between checks of the clock: at most 2 ms."""
_SEARCH_BYTES, _PAIR_BYTES = 1 << 16, 12
_BLANK = re.compile(rb"[ \t\n\r]*")
_BOM = b"\xef\xbb\xbf"
_MAX_EXACT = 1 << 53
"""Doubles represent all integers up to it."""
_MAX_DIGITS = 400
"""The limit on digits in a number that is kept exact. The service accepts no more in a schema either."""
_REST_OF_NUMBER = re.compile(rb"[-+.0-9eE]*")
_POSITION = re.compile(r" \(byte (\d+)\)$")
_NOT_JSON = re.compile(rb"NaN|Infinity")
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+"
    rb"(\\u[dD](?:[89aAbB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89aAbB]..\\u[dD])[c-fC-F][0-9a-fA-F]{2}))"
)


async def parse_json(body: Body, turns: ParseTurns) -> Any:
    """Parses a body, in its turn; other tasks run meanwhile. Raises GatewayError, with the problem and its position."""
    body = body if body[:3] != _BOM else body[3:]  # copies the body only if it has a BOM
    if _BLANK.fullmatch(body):
        raise GatewayError(400, "the body is empty; send a JSON object", code="invalid_json")
    if len(body) > SMALL_BYTES:
        await _measure(body, turns)
    try:
        with turns.portion():
            decoded = _DECODER.decode(body)
            if len(body) <= SMALL_BYTES and body.count(b"[") + body.count(b"{") > MAX_DEPTH:
                _check_depth(decoded)
            return decoded
    except RecursionError:
        raise await _too_deep(body, turns) from None
    except UnicodeDecodeError:
        raise await _not_utf8(body, turns) from None
    except msgspec.ValidationError:
        raise await _large_number(body, turns) from None
    except msgspec.DecodeError as error:
        raise await _malformed(body, turns, str(error)) from None


def _check_depth(value: Any) -> None:
    """Raises RecursionError for a value that is nested too deeply. How deep the decoder itself goes depends on the
    version of Python."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]


def _read_real(text: str) -> float | int:
    """Converts a number with a fraction or an exponent; returns an integer if a double would round it."""
    value = float(text)
    if -_MAX_EXACT < value < _MAX_EXACT:
        return value
    if math.isinf(value):
        raise ValueError("beyond the range of a double")
    exact = Decimal(text)
    is_kept = len(text) > _MAX_DIGITS or exact == Decimal(value) or exact == Decimal(repr(value))
    return value if is_kept or exact != exact.to_integral_value() else int(exact)


_DECODER = msgspec.json.Decoder(float_hook=_read_real)


async def _measure(body: Body, turns: ParseTurns) -> None:
    async for scan in _scanned(body, turns):
        if scan.num_parts > MAX_PARTS:
            raise _too_many(scan.parts_of, f"{MAX_PARTS:,} lists, objects, strings and names")
        if scan.num_commas > MAX_COMMAS:
            raise _too_many(scan.commas_of, f"{MAX_COMMAS:,} values")
        if scan.num_reals > MAX_REALS:
            raise _too_many(scan.reals_of, f"{MAX_REALS:,} numbers with a fraction or an exponent")
        if scan.max_depth > MAX_DEPTH:
            raise _nested(scan.deepest_field)


async def _scanned(
    body: Body, turns: ParseTurns, end: int | None = None, *, seeks_number: bool = False
) -> AsyncIterator[JsonScan]:
    """Scans up to ``end``; yields the scan after each portion, at least once."""
    scan, end, begin = JsonScan(seeks_number=seeks_number), len(body) if end is None else end, 0
    while True:
        with turns.portion():
            until = time.perf_counter() + PORTION_S
            begin = _scan_piece(scan, body, begin, end, seeks_number)
            while begin < end and time.perf_counter() < until:
                begin = _scan_piece(scan, body, begin, end, seeks_number)
        yield scan
        if begin >= end:
            return
        await turns.pause()


def _scan_piece(scan: JsonScan, body: Body, begin: int, end: int, seeks_number: bool) -> int:
    """Returns where the next piece begins."""
    until = min(begin + _SCAN_BYTES, end)
    if seeks_number:
        rest = _REST_OF_NUMBER.match(body, until)
        assert rest is not None, "it may be empty"
        until = rest.end()
    scan.feed(bytes(body[begin:until]))
    return until


async def _path_at(body: Body, turns: ParseTurns, position: int) -> str:
    """Returns the path of the field that holds a position; empty if it is in none."""
    async for scan in _scanned(body, turns, position):  # noqa: B007 - the last one counts
        pass
    return scan.path()


def _too_many(numbers: Mapping[str, int], bound: str) -> GatewayError:
    field = max(numbers, key=numbers.__getitem__)
    message = f"the body has more than {bound}{', most of them here' if field else ''}; send less at once"
    return GatewayError(413, f"{field}: {message}" if field else message, param=field or None, code="request_too_large")


async def _too_deep(body: Body, turns: ParseTurns) -> GatewayError:
    async for scan in _scanned(body, turns):
        if scan.max_depth > MAX_DEPTH:
            return _nested(scan.deepest_field)
    return _nested("")


def _nested(field: str) -> GatewayError:
    problem = f"nested too deeply; at most {MAX_DEPTH} lists and objects inside each other"
    return _invalid(field, problem, code="nested_too_deeply")


def _invalid(field: str, problem: str, *, code: str) -> GatewayError:
    """Returns the error of a field, or of the whole body if ``field`` is empty."""
    return GatewayError(400, f"{field or 'the body'}: {problem}", param=field or None, code=code)


async def _not_utf8(body: Body, turns: ParseTurns) -> GatewayError:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        field, where = await _path_at(body, turns, error.start), f"byte {error.start:,}"
    else:
        field, where = "", "a byte"
    return _invalid(field, f"{where} of the body is not UTF-8; encode the JSON as UTF-8", code="invalid_unicode")


async def _large_number(body: Body, turns: ParseTurns) -> GatewayError:
    async for scan in _scanned(body, turns, seeks_number=True):
        if scan.large_number is not None:
            break
    problem = "the number is too large: it may have at most 4,300 digits and must be less than 1.8e308"
    return _invalid(scan.large_number or "", problem, code="invalid_number")


async def _malformed(body: Body, turns: ParseTurns, problem: str) -> GatewayError:
    found = _POSITION.search(problem)
    position = int(found[1]) if found else len(body)
    if not found or "surrogate" in problem:
        # The parser treats half of a pair near the end of a body as a truncated pair.
        lone = await _lone_surrogate(body, turns)
        if lone is not None and lone <= position:
            return await _half_a_pair(body, turns, lone)
    literal = _NOT_JSON.match(body, position)
    if literal is not None:
        field = await _path_at(body, turns, position)
        return _invalid(field, f"{literal[0].decode()} is not JSON; send a number or null", code="invalid_json")
    what = problem[: found.start()].removeprefix("JSON is malformed: ") if found else "the text ends too early"
    message = f"the body is not valid JSON: {what}, at {_line_and_column(body, position)}"
    return GatewayError(400, message, code="invalid_json")


async def _lone_surrogate(body: Body, turns: ParseTurns) -> int | None:
    """Returns where the first escape of half a pair begins."""
    for begin in range(0, len(body), _SEARCH_BYTES):
        with turns.portion():
            found = _LONE_SURROGATE.search(body, begin, begin + _SEARCH_BYTES + _PAIR_BYTES)
        if found is not None:
            return found.start(1)
        await turns.pause()
    return None


async def _half_a_pair(body: Body, turns: ParseTurns, position: int) -> GatewayError:
    field, escape = await _path_at(body, turns, position), body[position : position + 6].decode()
    problem = f"{escape} is half of a surrogate pair, which is not text; send both halves or neither"
    return _invalid(field, problem, code="invalid_unicode")


def _line_and_column(body: Body, position: int) -> str:
    line_begins = body.rfind(b"\n", 0, position) + 1
    column = len(body[line_begins:position].decode(errors="replace")) + 1
    line = body.count(b"\n", 0, position) + 1
    return f"line {line}, column {column}"
