"""Bodies: what is no JSON, and where; and how much one may hold."""

import asyncio
import contextlib
import gzip
import json

import pytest

from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.requests import json_body
from penstock.clients.gateway.requests.json_body import MAX_COMMAS, MAX_DEPTH, MAX_PARTS, MAX_REALS, parse_json
from penstock.clients.gateway.requests.json_scan import JsonScan
from penstock.clients.host.parse_turns import ParseTurns

LONG = b'"' + b"p" * 70_000 + b'"'
"""What makes a body one that is measured before it is parsed."""
CHAT = "/v1/chat/completions"

WRONG = [
    (rb'{"x":%s,"a":[1,{"b":NaN}]}', "invalid_json", "a[1].b", "NaN"),
    (rb'{"x":%s,"chat_template_kwargs":{"a":[-Infinity]}}', "invalid_json", "chat_template_kwargs", "Infinity"),
    (rb'{"x":%s,"logit_bias":{"5":NaN}}', "invalid_json", "logit_bias", "NaN"),
    (rb'{"x":%s,"tools":[{"function":{"parameters":{"a":NaN}}}]}', "invalid_json", "tools[0].function.parameters", ""),
    (rb'{"x":%s,"m":[{"role":"u","content":"\ud800"}]}', "invalid_unicode", "m[0].content", r"\ud800"),
    (rb'{"x":%s,"m":[{"role":"u","content":"\\\udc00 b"}]}', "invalid_unicode", "m[0].content", r"\udc00"),
    (rb'{"x":%s,"m":"\ud83d\ude00","n":["\uD83D"]}', "invalid_unicode", "n[0]", r"\uD83D"),
    (rb'{"x":%s,"m":"\ud83d\u0041"}', "invalid_unicode", "m", "half of a surrogate pair"),
    (rb'{"x":%s,"\ud800":1}', "invalid_unicode", None, "half of a surrogate pair"),
    (b'{"x":%s,"a":{"b":["\xe9"]}}', "invalid_unicode", "a.b[0]", "UTF-8"),
    (b'{"x":%s,"\xe9":1}', "invalid_unicode", None, "UTF-8"),
    (b'{"x":%s,"seed":' + b"9" * 5000 + b"}", "invalid_number", "seed", "4,300 digits"),
    (b'{"x":%s,"a":"1e999","l":[[1,2,"a",-1e999]]}', "invalid_number", "l[0][3]", "too large"),
    (b'{"x":%s,"d":{"a":' + b"[" * 2000 + b"]" * 2000 + b"}}", "nested_too_deeply", "d", "nested too deeply"),
    (b'{"x":%s,"d":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested_too_deeply", "d", "nested too deeply"),
    (b'{"x":%s,"d":' + b'{"a":' * 2000 + b"1" + b"}" * 2001, "nested_too_deeply", "d", str(MAX_DEPTH)),
    (b'{"x":%s,\n "a" 1}', "invalid_json", None, "line 2, column 6"),
    (b'{"x":%s,\n "a":1,}', "invalid_json", None, "line 2"),
    (b'{"x":%s,\n "a":"\xc3\xa9" "b"}', "invalid_json", None, "line 2, column 10"),
    (b'{"x":%s', "invalid_json", None, "ends too early"),
    (b"{'x':%s}", "invalid_json", None, "line 1, column 2"),
    (b"nul", "invalid_json", None, "line 1, column"),
    (b" \n", "invalid_json", None, "empty"),
    ('{"a":1}'.encode("utf-16"), "invalid_json", None, "line 1, column 1"),
]


@pytest.mark.parametrize("value", [b"1", LONG], ids=["small", "large"])
@pytest.mark.parametrize(("body", "code", "param", "said"), WRONG)
async def test_invalid_json_is_reported_with_its_position(body, code, param, said, value):
    with pytest.raises(GatewayError) as raised:
        await parse_json(body.replace(b"%s", value), ParseTurns())
    error = raised.value
    assert (error.status, error.code, error.param) == (400, code, param)
    assert said in error.message
    assert error.message.startswith(f"{param}: " if param else "the body")
    assert len(error.message) < 300


@pytest.mark.parametrize("value", [b"1", LONG], ids=["small", "large"])
@pytest.mark.parametrize(
    "body",
    [
        rb'{"x":%s,"a":"\\ud800"}',
        rb'{"x":%s,"a":"\ud83d\ude00 \"quoted\" \\"}',
        b'{"x":%s,"a":"NaN","b":[1e308,-0.0,123456789012345678901234567890]}',
        b'\xef\xbb\xbf{"x":%s}',
        b' [%s,{"a":[]},[{}],"",null,true]\n',
        b"%s",
        b'{"x":%s,"d":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}",
    ],
)
async def test_what_is_json_is_read_as_python_reads_it(body, value):
    body = body.replace(b"%s", value)
    assert await parse_json(body, ParseTurns()) == json.loads(body)


TOO_MUCH = [
    (b'{"messages":[],"metadata":{' + b",".join(b'"%d":1' % i for i in range(MAX_PARTS)) + b"}}", "metadata"),
    (b'{"messages":[],"metadata":[' + b"[]," * MAX_PARTS + b"1]}", "metadata"),
    (b'{"stop":[' + b'"",' * MAX_PARTS + b'""],"prompt":""}', "stop"),
    (b'{"input":[' + b"5," * (MAX_COMMAS + 1) + b"5]}", "input"),
    (b'{"prompt":[' + b"[5]," * MAX_PARTS + b"[5]]}", "prompt"),
    (b'{"a":1.5,"metadata":[' + b"0.1," * MAX_REALS + b"1]}", "metadata"),
    (b'{"metadata":[true,' + b"1E3,2e-1," * (MAX_REALS // 2 + 50) + b"1e0]}", "metadata"),
    (b"{" + b",".join(b'"%d":1' % i for i in range(MAX_PARTS)) + b"}", None),
    (b"[" + b"[]," * MAX_PARTS + b"1]", None),
]


NUMBERS = {
    "9007199254740993.0": 2**53 + 1,
    "-9007199254740993.0": -(2**53) - 1,
    "9007199254740993e0": 2**53 + 1,
    "9007199254.740993e6": 2**53 + 1,
    "123456789012345678901e-1": 12345678901234567890.1,
    "9007199254740992.0": 2.0**53,
    "1e23": 1e23,
    "1.7976931348623157e308": 1.7976931348623157e308,
    "0.12345678901234567890": 0.12345678901234568,
}


@pytest.mark.parametrize("text", NUMBERS)
async def test_integers_with_a_fraction_or_an_exponent_are_not_rounded(text):
    for padding in (b"1", LONG):
        [value] = (await parse_json(b'{"x":%s,"a":[%s]}' % (padding, text.encode()), ParseTurns()))["a"]
        assert (value, type(value)) == (NUMBERS[text], type(NUMBERS[text]))


@pytest.mark.parametrize(("body", "field"), TOO_MUCH, ids=lambda value: str(value)[:20])
async def test_what_holds_too_much_is_refused_before_it_is_parsed(body, field, monkeypatch):
    monkeypatch.setattr(json_body, "_DECODER", None)
    with pytest.raises(GatewayError) as raised:
        await parse_json(body, ParseTurns())
    assert (raised.value.status, raised.value.code) == (413, "request_too_large")
    assert any(f"{bound:,}" in raised.value.message for bound in (MAX_COMMAS, MAX_PARTS, MAX_REALS))
    if field is not None:
        assert raised.value.param == field


async def test_what_is_just_not_too_much_is_parsed():
    texts = [["a"]] * ((MAX_PARTS - 10) // 2)
    body = {"input": [5] * (MAX_COMMAS - len(texts) - MAX_REALS), "s": texts, "r": [0.5] * MAX_REALS}
    assert await parse_json(json.dumps(body).encode(), ParseTurns()) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"' + b"\\\\" * 300_000 + b'"}',
        b'{"a":"' + b"\\u00e9" * 100_000,
        b'{"a":' + b"9" * 600_000 + b"}",
        b'{"a":[' + b"1," * 300_000 + b"1]}",
        b'{"a":"' + b'\\"' * 300_000 + b'"}',
    ],
    ids=["backslashes", "unfinished", "digits", "numbers", "quotes"],
)
async def test_others_run_while_a_large_body_is_measured(body, monkeypatch):
    monkeypatch.setattr(json_body, "PORTION_S", 0.0)  # as on a machine where each piece takes a whole portion
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        with contextlib.suppress(GatewayError):
            await parse_json(body, ParseTurns())
    finally:
        counting.cancel()
    assert turns >= min(len(body) // json_body._SCAN_BYTES, 200)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_a_text_in_pieces_is_scanned_as_the_whole(step):
    text = rb'{"a\"b":[1,{"c":"]}\\"},"\\\"x",[]],"d":{"e":{"f":"' + b"\\\\" * 9 + rb"\"y"
    whole, pieces = JsonScan(), JsonScan()
    whole.feed(text)
    for begin in range(0, len(text), step):
        pieces.feed(text[begin : begin + step])
    assert pieces.path() == whole.path() == "d.e.f"
    assert (pieces.num_parts, pieces.num_commas, pieces.max_depth) == (whole.num_parts, whole.num_commas, 3)
    assert pieces.parts_of == whole.parts_of


async def test_errors_reach_callers_in_openais_shape(gateway):
    for content, headers, status, said in (
        (b'{"messages":[{"role":"user","content":"\xe9"}]}', {}, 400, "UTF-8"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400, "nested too deeply"),
        (gzip.compress(b"{}"), {"Content-Encoding": "gzip"}, 415, "Content-Encoding: gzip"),
        (b"{}", {"Content-Encoding": "br, identity"}, 415, "Content-Encoding: br, identity"),
    ):
        headers = {"Content-Type": "application/json"} | headers
        response = await gateway.http.post(CHAT, content=content, headers=headers)
        assert response.status_code == status
        assert said in response.json()["error"]["message"]
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert (await gateway.http.post("/v1/completions", content=body, headers=headers)).status_code == 200
