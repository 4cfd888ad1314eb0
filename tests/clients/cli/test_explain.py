"""``penstock explain``: what it prints, to the letter, and what it says where there is nothing to explain."""

import json
from typing import Any

import pytest

import penstock.v1 as pb
from penstock.clients.cli import main as cli
from penstock.clients.cli.admin.timeline_view import TimelineView

ID = "01KAH3Y5W7Q2R8T4V6X0Z1B3C5"
OTHER = "01KAH3Y5W7Q2R8T4V6X0Z1B3C4"


def entry(at_us, duration_us, kind, steps=None, num_tokens=0, detail="", choice=0):
    first, last = steps or (None, None)
    return pb.TimelineEntry(
        at_us=at_us,
        duration_us=duration_us,
        kind=pb.TimelineKind.Value(f"TIMELINE_KIND_{kind}"),
        first_step=first,
        last_step=last,
        num_tokens=num_tokens,
        detail=detail,
        choice=choice,
    )


TIMELINE = [
    entry(100, 0, "ACCEPTED", detail="position 3 in the queue"),
    entry(100, 1_000_000, "WAITED", detail="blocks: 12 are free, 40 needed"),
    entry(1_000_100, 0, "BEGAN", (812, 812), 2048),
    entry(1_000_100, 500_000, "PREFILLED", (812, 819), 4096),
    entry(1_500_100, 20_000, "PREFILLED", (820, 820), 120),
    entry(1_520_100, 980_000, "DECODED", (820, 868), 50),
    entry(2_500_100, 0, "PREEMPTED", (870, 870), detail=f"no block was free, and {OTHER} needed 1"),
    entry(2_500_100, 500_000, "HELD", detail="its stream is not read"),
    entry(3_000_100, 0, "RESTARTED", (880, 880), detail="the worker died: all is computed again"),
    entry(3_000_100, 0, "BEGAN", (881, 881)),
    entry(3_200_000, 0, "UPDATED", detail="priority 2"),
    entry(4_000_000, 0, "ENDED", detail="STOP"),
]

WHOLE = f"""\
request      {ID}  ended: STOP, after 4.00 s
tenant       acme  (the caller's id: order-17)
arrived      2025-11-20 11:48:54.123 UTC
prompt       6,264 tokens; up to 512 of output
first token  after 1.52 s; predicted after 0.80 s
time         25 % waiting, 12 % held back, 13 % computing its prompt, 24 % decoding

    at, s    for, s
    0.000            +                                 accepted: position 3 in the queue
    0.000     1.000  ........                          waited for blocks: 12 are free, 40 needed
    1.000                    +                         began: 2,048 tokens from the cache (step 812)
    1.000     0.500          ####                      computed 4,096 tokens in 8 chunks of 512 (steps 812 to 819)
    1.500     0.020              #                     computed 120 tokens (step 820)
    1.520     0.980              ========              generated 50 tokens, 50 per second (steps 820 to 868)
    2.500                                +             preempted: no block was free, and {OTHER} needed 1 (step 870)
    2.500     0.500                      ~~~~          was held: its stream is not read
    3.000                                    +         restarted: the worker died: all is computed again (step 880)
    3.000                                    +         began: nothing from the cache (step 881)
    3.200                                     +        changed by its caller: priority 2
    4.000                                           +  ended: STOP
"""


def response(timeline=TIMELINE, **fields):
    facts: dict[str, Any] = {
        "request_id": ID,
        "tenant": "acme",
        "client_request_id": "order-17",
        "arrived_unix_us": 1_763_639_334_123_456,
        "prompt_tokens": 6264,
        "max_tokens": 512,
        "num_choices": 1,
        "ended": "STOP",
        "predicted_ttft_ms": 800,
        "first_token_us": 1_520_100,
    }
    return pb.ExplainResponse(timeline=timeline, **facts | fields)


def plain(told):
    return "".join(f"{line.rstrip()}\n" for line in TimelineView(told, colours=False, unicode=False).lines())


def test_a_whole_timeline():
    assert plain(response()) == WHOLE


def test_bars_and_colours_where_the_terminal_has_them():
    coloured = "\n".join(TimelineView(response(), colours=True, unicode=True).lines())
    assert "\x1b[33m░░░░░░░░\x1b[0m" in coloured
    assert "\x1b[32mended: STOP, after 4.00 s\x1b[0m" in coloured
    plainly = "\n".join(TimelineView(response(), colours=False, unicode=True).lines())
    assert "░░░░░░░░" in plainly
    assert "\x1b" not in plainly
    assert "\x1b[31mended: KILLED_WORKER" in "\n".join(
        TimelineView(response(ended="KILLED_WORKER"), colours=True, unicode=True).lines()
    )


def test_a_request_that_lives():
    timeline = [
        entry(100, 0, "ACCEPTED", detail="position 0 in the queue"),
        entry(100, 0, "BEGAN", (1, 1)),
        entry(100, 50_000, "PREFILLED", (1, 1), 20),
        entry(50_100, 99_900, "DECODED", (1, 11), 11),
    ]
    told = response(timeline, ended="", predicted_ttft_ms=None, first_token_us=50_100)
    text = plain(told)
    assert f"request      {ID}  live for 0.15 s\n" in text
    assert "first token  after 50.1 ms; none was predicted\n" in text
    assert "generated 11 tokens so far, 100 per second (steps 1 to 11)" in text
    waiting = [timeline[0], entry(100, 70_000, "WAITED", detail="its turn: 3 ahead of it")]
    text = plain(response(waiting, ended="", first_token_us=None))
    assert "waits for its turn: 3 ahead of it" in text
    assert "first token  none yet; predicted after 0.80 s\n" in text


def test_what_became_of_drafts():
    drafted = entry(0, 1_000_000, "DECODED", (1, 40), 50, "10 of 30 drafts accepted")
    assert "generated 50 tokens, 49 per second, 10 of 30 drafts accepted (steps 1 to 40)" in plain(response([drafted]))


def test_choices_have_a_column():
    timeline = [entry(0, 10, "PREFILLED", (1, 1), 20), entry(10, 90, "DECODED", (1, 5), 5, choice=2)]
    text = plain(response(timeline, num_choices=3))
    assert "up to 512 of output for each of 3 choices" in text
    assert "  #0      computed 20 tokens" in text
    assert "  #2      generated 5 tokens" in text


def test_omitted_entries_are_shown_in_their_place():
    timeline = [entry(index, 0, "UPDATED", detail=str(index)) for index in range(6)]
    lines = plain(response(timeline, omitted_entries=1234)).splitlines()
    gap = next(index for index, line in enumerate(lines) if "... 1,234 more entries are not kept ..." in line)
    assert lines[gap - 1].endswith(": 2")
    assert lines[gap + 1].endswith(": 3")


def test_what_a_terminal_would_obey_is_not_printed():
    timeline = [entry(0, 5, "WAITED", detail="\x1b[2J\nwell")]
    assert "waited for ?[2J?well" in plain(response(timeline))


def test_the_command(admin, capsys):
    admin.explained[ID] = response()
    assert cli.main(["explain", ID]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:6] == WHOLE.splitlines()[:6]
    assert "\x1b" not in out
    assert len(out.splitlines()) == len(WHOLE.splitlines())


def test_as_json(admin, capsys):
    admin.explained[ID] = response(client_request_id="", predicted_ttft_ms=None)
    assert cli.main(["explain", ID, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["request_id"], told["first_token_us"], told["predicted_ttft_ms"]) == (ID, 1_520_100, None)
    assert [each["kind"] for each in told["timeline"]][:4] == ["accepted", "waited", "began", "prefilled"]
    assert told["timeline"][0]["first_step"] is None
    assert told["timeline"][3] == {
        "at_us": 1_000_100,
        "duration_us": 500_000,
        "choice": 0,
        "kind": "prefilled",
        "first_step": 812,
        "last_step": 819,
        "num_tokens": 4096,
        "detail": "",
    }


def test_an_id_of_which_nothing_is_known(admin, capsys):
    assert cli.main(["explain", OTHER]) == 1
    said = capsys.readouterr().err
    assert said == f"penstock explain: {OTHER}: it is not among the last 1,000; --explain-requests keeps more\n"


def test_no_administration_there(capsys):
    assert cli.main(["explain", ID, "--admin", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "no service answers at 127.0.0.1:1" in said
    assert "--admin HOST:PORT, or $PENSTOCK_ADMIN" in said


@pytest.mark.parametrize("arguments", [[], [ID, "--no-such-flag"]])
def test_wrong_arguments(arguments, capsys):
    assert cli.main(["explain", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("penstock explain: ")
    assert said.endswith("; penstock explain --help lists the flags\n")
    assert said.count("\n") == 1


def test_help_shows_where_to_find_ids(capsys):
    assert cli.main(["explain", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "accepted.request_id" in out


def test_inputs_to_embed_are_no_prompt_with_an_output():
    text = plain(response(TIMELINE[:5], max_tokens=0, num_choices=3, first_token_us=None))
    assert "inputs       3, with 6,264 tokens in total; no output\n" in text
    assert "of output" not in text
    assert "first token " not in text


def test_a_mistyped_flag_gets_a_suggestion(capsys):
    assert cli.main(["explain", ID, "--admn=127.0.0.1:1"]) == 2
    assert "--admn=127.0.0.1:1; did you mean --admin?" in capsys.readouterr().err
