"""``penstock top``: speeds from totals, a screen on a terminal, and lines everywhere else."""

import json

import pytest

from penstock.clients.cli import main as cli
from penstock.clients.cli.admin.stats_view import Rates, dashboard, line
from penstock.v1 import admin_pb2 as pb

BEFORE = pb.WatchStatsResponse(
    state=pb.ENGINE_STATE_SERVING,
    uptime_ms=10_000,
    steps=100,
    output_tokens=1000,
    prefill_tokens=500,
    cached_tokens=0,
    finished_requests=10,
    tenants=[pb.TenantStats(tenant="acme", live_requests=2, served_tokens=1000)],
)
NOW = pb.WatchStatsResponse(
    state=pb.ENGINE_STATE_RECOVERING,
    uptime_ms=12_000,
    live_requests=190,
    running_rows=180,
    waiting_choices=12,
    stalled_requests=3,
    kv_usage=0.5,
    cached_blocks=1203,
    retained_blocks=88,
    steps=180,
    output_tokens=3000,
    prefill_tokens=2000,
    cached_tokens=500,
    preemptions=7,
    finished_requests=30,
    refused_requests=4,
    worker_restarts=1,
    step_us=23_900,
    predicted_ttft_ms=120,
    loop_lag=pb.LoopLag(p50_us=240, p99_us=3100, max_us=1_250_900),
    host_blocks=4100,
    restored_tokens=65_536,
    tenants=[
        pb.TenantStats(tenant="acme", live_requests=150, served_tokens=4000),
        pb.TenantStats(tenant="new-one", live_requests=40, served_tokens=99),
    ],
)

LINE = (
    "RECOVERING: requests 190, rows 180, waiting 12, stalled 3, KV 50.0 %; tokens/s: output 1000, prompt 1000 "
    "(cached 25 %); step 23.9 ms; loop lag: 3.1 ms at p99; first token predicted: 120 ms; preempted 7, refused 4, "
    "workers replaced 1"
)

SCREEN = """\
penstock top   gpu1:50052   RECOVERING   up 0:00:12

requests   190 live, 3 of them stalled
rows       180 run, 12 wait
KV         ###############...............  50.0 % held; 1,203 blocks cached, 88 of them retained
           4,100 blocks in host memory; 65,536 tokens came back from it
1st token  a short request's is predicted after 120 ms
loop       late by 0.2 ms at the median, 3.1 ms at p99, 1,250.9 ms at most

output          1,000 tokens/s
prompt            750 tokens/s computed, 250 from the cache (25 %)
steps            40.0 per second, 23.9 ms at the median
requests         10.0 ended per second, 2.0 refused

in all     3,000 output tokens, 30 requests ended, 4 refused
           preempted: 7; workers replaced: 1

tenant     live    tokens/s          served
acme        150       1,500           4,000
new-one      40                          99
"""


def test_speeds_are_by_the_services_clock():
    rates = Rates.between(BEFORE, NOW)
    assert (rates.seconds, rates.steps, rates.output_tokens) == (2.0, 40.0, 1000.0)
    assert rates.cached_share == 0.25


def test_no_speed_of_nothing():
    rates = Rates.between(BEFORE, BEFORE)
    assert (rates.output_tokens, rates.cached_share) == (0.0, 0.0)


def test_a_line():
    assert line(NOW, Rates.between(BEFORE, NOW)) == LINE


def test_a_screen():
    lines = dashboard("gpu1:50052", BEFORE, NOW, [], unicode=False)
    assert "".join(f"{text.rstrip()}\n" for text in lines) == SCREEN


def test_drafts_have_a_line_where_there_are_any():
    before, now = pb.WatchStatsResponse(), pb.WatchStatsResponse()
    before.CopyFrom(BEFORE)
    now.CopyFrom(NOW)
    before.drafts, before.drafted_tokens, before.accepted_tokens = 10, 40, 10
    now.drafts, now.drafted_tokens, now.accepted_tokens = 110, 440, 110
    assert "prompt 1000 (cached 25 %), drafted 200 (accepted 25 %); step" in line(now, Rates.between(before, now))
    screen = list(dashboard("gpu1:50052", before, now, [1000.0], unicode=False))
    assert "drafts            200 tokens/s, 25 % accepted, 2.00 tokens per step with drafts" in screen


def test_the_first_screen_has_no_speeds():
    text = "\n".join(dashboard("gpu1:50052", None, BEFORE, [], unicode=False))
    assert "known with the next answer" in text
    assert text.count("nothing is known yet") == 2  # of the first token, and of the loop


def test_the_past_is_drawn_where_the_terminal_can():
    text = "\n".join(dashboard("gpu1:50052", BEFORE, NOW, [0.0, 500.0, 1000.0], unicode=True))
    assert "1,000 tokens/s  ▁▅█" in text
    assert "███████████████░░░░░░░░░░░░░░░" in text


def test_lines_where_there_is_no_terminal(admin, capsys):
    admin.stats = [BEFORE, NOW, NOW]
    assert cli.main(["top", "--interval", "0.5"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == LINE
    assert len(said.out.splitlines()) == 2
    assert said.err == f"penstock top: the service at {admin.target} has stopped\n"
    assert admin.intervals == [500]


def test_once(admin, capsys):
    admin.stats, admin.hangs = [BEFORE, NOW], True
    assert cli.main(["top", "--once"]) == 0
    assert capsys.readouterr().out == f"{LINE}\n"


def test_once_as_json(admin, capsys):
    admin.stats, admin.hangs = [NOW], True
    assert cli.main(["top", "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["kv_usage"], told["predicted_ttft_ms"]) == ("recovering", 0.5, 120)
    assert told["loop_lag"] == {"p50_us": 240, "p99_us": 3100, "max_us": 1_250_900}
    assert told["tenants"][1] == {"tenant": "new-one", "live_requests": 40, "served_tokens": 99}


def test_on_a_terminal_until_ctrl_c(admin, tool, open_terminal):
    admin.stats, admin.hangs = [BEFORE, NOW], True
    terminal = open_terminal("top", "--admin", admin.target)
    terminal.wait_for("\x1b[?1049h")
    terminal.wait_for("RECOVERING")
    terminal.wait_for("new-one")
    terminal.interrupt("\x1b[?1049l")
    assert terminal.end() == 130


def test_a_state_that_is_not_serving_is_red(admin, tool, open_terminal):
    admin.stats, admin.hangs = [BEFORE, NOW], True
    tool.environment["NO_COLOR"] = ""
    terminal = open_terminal("top", "--admin", admin.target)
    terminal.wait_for("\x1b[1;32mpenstock top")
    terminal.wait_for("\x1b[1;31mpenstock top")


@pytest.mark.parametrize("interval", ["0.05", "4000", "nan", "soon"])
def test_an_interval_that_is_none(interval, capsys):
    assert cli.main(["top", "--interval", interval]) == 2
    assert "--interval" in capsys.readouterr().err


def test_no_administration_there(capsys):
    assert cli.main(["top", "--admin", "127.0.0.1:1"]) == 1
    assert "no service answers at 127.0.0.1:1" in capsys.readouterr().err


def test_help(capsys):
    assert cli.main(["top", "--help"]) == 0
    assert "examples:" in capsys.readouterr().out
