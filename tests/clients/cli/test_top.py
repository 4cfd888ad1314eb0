"""``penstock top``: speeds from totals, a screen on a terminal, and lines everywhere else."""

import json

import pytest

import penstock.v1 as pb
from penstock.clients.cli import main as cli
from penstock.clients.cli.admin.stats_view import Rates, dashboard, line
from penstock.clients.cli.admin.top_screen import Key
from penstock.clients.cli.admin.top_terminal import keys_in
from penstock.clients.cli.as_dict import duration_of


def percentiles(count: int, p50: float, p90: float, p99: float) -> pb.LatencyPercentiles:
    """Of latencies in seconds."""
    return pb.LatencyPercentiles(count=count, p50=duration_of(p50), p90=duration_of(p90), p99=duration_of(p99))


BEFORE = pb.WatchStatsResponse(
    state=pb.SERVICE_STATE_SERVING,
    uptime=duration_of(10),
    steps=100,
    output_tokens=1000,
    prefill_tokens=500,
    cached_tokens=0,
    finished_requests=10,
    tenants=[pb.TenantStats(tenant="acme", live_requests=2, served_tokens=1000)],
)
NOW = pb.WatchStatsResponse(
    state=pb.SERVICE_STATE_RECOVERING,
    uptime=duration_of(12),
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
    step_duration=duration_of(0.0239),
    predicted_ttft=duration_of(0.12),
    loop_lag=pb.LoopLag(p50=duration_of(240e-6), p99=duration_of(3100e-6), max=duration_of(1.2509)),
    host_blocks=4100,
    restored_tokens=65_536,
    tenants=[
        pb.TenantStats(tenant="acme", live_requests=150, served_tokens=4000),
        pb.TenantStats(tenant="new-one", live_requests=40, served_tokens=99),
    ],
    last_10s=pb.StatsWindow(
        duration=duration_of(9.5),
        finished_requests=19,
        prefill_tokens=1900,
        output_tokens=9500,
        time_to_first_token=percentiles(19, 0.12, 0.099949, 1.25),
        inter_token_latency=percentiles(9000, 0.009994, 0.01234, 0.00085),
    ),
    last_60s=pb.StatsWindow(duration=duration_of(12)),
)

LINE = (
    "RECOVERING: requests 190, rows 180, waiting 12, stalled 3, KV 50.0 %; tokens/s: output 1000, prompt 1000 "
    "(cached 25 %); step 23.9 ms; loop lag: 3.1 ms at p99; first token predicted: 120 ms; preempted 7, refused 4, "
    "workers replaced 1; last 10 s: tokens/s 1000 output, 200 computed, requests/s 2.0, p50/p90/p99 in ms: first token "
    "120/99.9/1,250, between tokens 9.99/12.3/0.85; last 60 s: tokens/s 0 output, 0 computed, requests/s 0.0, "
    "p50/p90/p99 in ms: first token -/-/-, between tokens -/-/-"
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

                      tokens/s  requests          first token, ms       between tokens, ms
last          output  computed        /s      p50     p90     p99      p50     p90     p99
10 s           1,000       200       2.0      120    99.9   1,250     9.99    12.3    0.85
60 s               0         0       0.0        -       -       -        -       -       -

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


def test_a_dashboard():
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


def test_states_have_a_line_where_there_are_any():
    now = pb.WatchStatsResponse()
    now.CopyFrom(NOW)
    now.state_slots_used, now.state_snapshots, now.state_missed_tokens = 12, 7, 8192
    screen = list(dashboard("gpu1:50052", BEFORE, now, [], unicode=False))
    slots = "states     12 slots used, 7 by saved states"
    assert f"{slots}; 8,192 cached tokens were computed again for lack of one" in screen


def test_the_first_screen_has_no_speeds():
    text = "\n".join(dashboard("gpu1:50052", None, BEFORE, [], unicode=False))
    assert "known with the next answer" in text
    assert text.count("nothing is known yet") == 2  # of the first token, and of the loop


def test_a_service_that_does_not_report_the_last_seconds_has_no_table_of_them():
    text = "\n".join([line(BEFORE, Rates.between(BEFORE, BEFORE)), *dashboard("x", None, BEFORE, [], unicode=False)])
    assert "p90" not in text


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
    assert (told["state"], told["kv_usage"], told["predicted_ttft"]) == ("recovering", 0.5, 0.12)
    assert told["loop_lag"] == {"p50": 0.00024, "p99": 0.0031, "max": 1.2509}
    assert told["last_10s"]["time_to_first_token"] == {
        "count": 19,
        "p50": 0.12,
        "p90": 0.099949,
        "p99": 1.25,
    }
    assert told["tenants"][1] == {"tenant": "new-one", "live_requests": 40, "served_tokens": 99}


def test_on_a_terminal_until_ctrl_c(admin, tool, open_terminal):
    admin.stats, admin.hangs = [BEFORE, NOW], True
    terminal = open_terminal("top", "--admin", admin.target)
    terminal.wait_for("\x1b[?1049h")
    terminal.wait_for("RECOVERING")
    terminal.wait_for("new-one")
    terminal.interrupt("\x1b[?1049l")
    assert terminal.end() == 130


def live(number, tenant="acme"):
    state = pb.REQUEST_STATE_DECODING
    return pb.LiveRequest(request_id=f"R{number:025}", tenant=tenant, state=state, age=duration_of(1.5), num_choices=1)


def test_a_request_is_selected_and_cancelled_on_a_terminal(admin, tool, open_terminal):
    admin.stats, admin.hangs = [NOW], True
    admin.live = [live(0), live(1), live(2)]
    terminal = open_terminal("top", "--admin", admin.target)
    terminal.wait_for("r requests   q quit")
    terminal.type("r")
    terminal.wait_for(f"> {live(0).request_id}")
    terminal.type("\x1b[B\x1b[B\x1b[A")
    terminal.wait_for(f"> {live(1).request_id}")
    terminal.type("x")
    terminal.wait_for(f"cancel {live(1).request_id}? y")
    terminal.type("n")
    terminal.wait_for("x cancel")
    assert admin.cancel_calls == []
    terminal.type("x")
    terminal.wait_for("? y cancels it")
    terminal.type("y")
    terminal.wait_for(f"> {live(2).request_id}")
    terminal.wait_for(f"{live(1).request_id} was cancelled")
    [call] = admin.cancel_calls
    assert call == pb.CancelRequestsRequest(ids=pb.RequestIds(request_ids=[live(1).request_id]))
    terminal.type("r")
    terminal.wait_for("new-one")
    terminal.type("q")
    assert terminal.end() == 0


def test_keys_of_a_terminal_are_those_that_are_pressed():
    pressed = [Key.UP, Key.DOWN, Key.UP, Key.REQUESTS, Key.OTHER, Key.OTHER, Key.QUIT, Key.OTHER]
    assert list(keys_in("\x1b[A\x1b[B\x1bOAr\x1b[5~zq\x1b")) == pressed


def test_a_terminal_that_only_shows_has_no_keys(admin, tool, open_terminal):
    """As in ``penstock top < /dev/null``."""
    admin.stats, admin.hangs = [NOW], True
    tool.command[-1] = "import os, sys; os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n" + tool.command[-1]
    terminal = open_terminal("top", "--admin", admin.target)
    assert "q quit" not in terminal.wait_for("new-one")
    terminal.interrupt("\x1b[?1049l")
    assert terminal.end() == 130


def test_the_end_of_the_service_gives_the_terminal_back(admin, tool, open_terminal):
    admin.stats = [NOW]
    terminal = open_terminal("top", "--admin", admin.target)
    terminal.wait_for("new-one")
    terminal.wait_for("\x1b[?1049l")
    terminal.wait_for(f"the service at {admin.target} has stopped")
    assert terminal.end() == 1


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
