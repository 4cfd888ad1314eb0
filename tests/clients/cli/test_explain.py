"""``penstock explain``: what it prints, to the letter, and what it says where there is nothing to explain."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import timestamp

import penstock.v1 as pb
from penstock.clients.cli import main as cli
from penstock.clients.cli.admin.timeline_view import TimelineView
from penstock.clients.cli.admin.timeline_words import end_name, event_words, hold_words, wait_words
from penstock.clients.cli.as_dict import duration_of

ID = "01KAH3Y5W7Q2R8T4V6X0Z1B3C5"
OTHER = "01KAH3Y5W7Q2R8T4V6X0Z1B3C4"
LIVE = pb.REQUEST_END_UNSPECIFIED


def waiting(cause, **numbers):
    return pb.WaitDetail(cause=pb.WaitCause.Value(f"WAIT_CAUSE_{cause}"), **numbers)


def preempted(cause, for_request_id, needed_blocks=None):
    number = pb.PreemptionCause.Value(f"PREEMPTION_CAUSE_{cause}")
    return pb.PreemptionDetail(cause=number, for_request_id=for_request_id, needed_blocks=needed_blocks)


def entry(at_us, duration_us, kind, steps=None, num_tokens=0, choice=0, **detail):
    first, last = steps or (None, None)
    return pb.TimelineEntry(
        start_offset=duration_of(at_us / 1e6),
        duration=duration_of(duration_us / 1e6),
        kind=pb.TimelineKind.Value(f"TIMELINE_KIND_{kind}"),
        first_step=first,
        last_step=last,
        num_tokens=num_tokens,
        choice=choice,
        **detail,
    )


TIMELINE = [
    entry(100, 0, "ACCEPTED", queue_position=3),
    entry(100, 1_000_000, "WAITED", wait=waiting("BLOCKS", free_blocks=12, needed_blocks=40)),
    entry(1_000_100, 0, "BEGAN", (812, 812), 2048),
    entry(1_000_100, 500_000, "PREFILLED", (812, 819), 4096),
    entry(1_500_100, 20_000, "PREFILLED", (820, 820), 120),
    entry(1_520_100, 980_000, "DECODED", (820, 868), 50),
    entry(2_500_100, 0, "PREEMPTED", (870, 870), preemption=preempted("BLOCKS", OTHER, 1)),
    entry(2_500_100, 500_000, "HELD", hold_cause=pb.HOLD_CAUSE_UNREAD),
    entry(3_000_100, 0, "RESTARTED", (880, 880)),
    entry(3_000_100, 0, "BEGAN", (881, 881)),
    entry(3_200_000, 0, "UPDATED", update=pb.UpdateDetail(priority=2)),
    entry(3_300_000, 0, "INJECTED", num_tokens=17),
    entry(4_000_000, 0, "ENDED", end=pb.REQUEST_END_STOP),
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
    3.300                                      +       injected: 17 tokens into its output
    4.000                                           +  ended: STOP
"""


def response(timeline=TIMELINE, **fields):
    facts: dict[str, Any] = {
        "request_id": ID,
        "tenant": "acme",
        "client_request_id": "order-17",
        "arrive_time": timestamp.from_microseconds(1_763_639_334_123_456),
        "prompt_tokens": 6264,
        "max_tokens": 512,
        "num_choices": 1,
        "end": pb.REQUEST_END_STOP,
        "predicted_ttft": duration_of(0.8),
        "time_to_first_token": duration_of(1.5201),
    }
    return pb.ExplainResponse(timeline=timeline, **facts | fields)


def plain(told):
    return "".join(f"{line.rstrip()}\n" for line in TimelineView(told, colours=False, unicode=False).lines())


def test_a_whole_timeline():
    assert plain(response()) == WHOLE


def test_tokens_without_a_saved_state():
    told = response([entry(0, 0, "BEGAN", (812, 812), 2048, missed_tokens=96)], end=LIVE)
    assert "began: 2,048 tokens from the cache, 96 more without a saved state (step 812)" in plain(told)


def test_bars_and_colours_where_the_terminal_has_them():
    coloured = "\n".join(TimelineView(response(), colours=True, unicode=True).lines())
    assert "\x1b[33m░░░░░░░░\x1b[0m" in coloured
    assert "\x1b[32mended: STOP, after 4.00 s\x1b[0m" in coloured
    plainly = "\n".join(TimelineView(response(), colours=False, unicode=True).lines())
    assert "░░░░░░░░" in plainly
    assert "\x1b" not in plainly
    assert "\x1b[31mended: KILLED_WORKER" in "\n".join(
        TimelineView(response(end=pb.REQUEST_END_KILLED_WORKER), colours=True, unicode=True).lines()
    )


def test_a_request_that_lives():
    timeline = [
        entry(100, 0, "ACCEPTED", queue_position=0),
        entry(100, 0, "BEGAN", (1, 1)),
        entry(100, 50_000, "PREFILLED", (1, 1), 20),
        entry(50_100, 99_900, "DECODED", (1, 11), 11),
    ]
    told = response(timeline, end=LIVE, predicted_ttft=None, time_to_first_token=duration_of(0.0501))
    text = plain(told)
    assert f"request      {ID}  live for 0.15 s\n" in text
    assert "first token  after 50.1 ms; none was predicted\n" in text
    assert "generated 11 tokens so far, 100 per second (steps 1 to 11)" in text
    queued = [timeline[0], entry(100, 70_000, "WAITED", wait=waiting("TURN", requests_ahead=3))]
    text = plain(response(queued, end=LIVE, time_to_first_token=None))
    assert "waits for its turn: 3 ahead of it" in text
    assert "first token  none yet; predicted after 0.80 s\n" in text


def test_what_became_of_drafts():
    drafted = entry(0, 1_000_000, "DECODED", (1, 40), 50, drafts=pb.DraftDetail(drafted_tokens=30, accepted_tokens=10))
    assert "generated 50 tokens, 49 per second, 10 of 30 drafts accepted (steps 1 to 40)" in plain(response([drafted]))


def test_choices_have_a_column():
    timeline = [entry(0, 10, "PREFILLED", (1, 1), 20), entry(10, 90, "DECODED", (1, 5), 5, choice=2)]
    text = plain(response(timeline, num_choices=3))
    assert "up to 512 of output for each of 3 choices" in text
    assert "  #0      computed 20 tokens" in text
    assert "  #2      generated 5 tokens" in text


def test_omitted_entries_are_shown_in_their_place():
    timeline = [entry(index, 0, "UPDATED", update=pb.UpdateDetail(priority=index)) for index in range(6)]
    lines = plain(response(timeline, omitted_entries=1234)).splitlines()
    gap = next(index for index, line in enumerate(lines) if "... 1,234 more entries are not kept ..." in line)
    assert lines[gap - 1].endswith(": priority 2")
    assert lines[gap + 1].endswith(": priority 3")


def test_what_a_terminal_would_obey_is_not_printed():
    timeline = [entry(0, 0, "PREEMPTED", preemption=preempted("ORDER", "\x1b[2J\nwell"))]
    assert "there was no room for ?[2J?well, which" in plain(response(timeline))


def test_a_request_that_needed_the_blocks_itself():
    timeline = [entry(0, 0, "PREEMPTED", preemption=preempted("BLOCKS", ID, 2))]
    assert "no block was free, and it needed 2\n" in plain(response(timeline))


def test_what_a_caller_changed():
    update = pb.UpdateDetail(priority=-3, timeout=duration_of(2.5), max_tokens=2000)
    text = plain(response([entry(0, 0, "UPDATED", update=update)]))
    assert "changed by its caller: priority -3, deadline in 2.5 s, at most 2,000 tokens\n" in text


def test_causes_of_a_newer_service():
    timeline = [
        entry(0, 5, "WAITED", wait=pb.WaitDetail(cause=99)),  # type: ignore[arg-type]
        entry(5, 5, "HELD", hold_cause=99),
        entry(10, 0, "PREEMPTED", preemption=pb.PreemptionDetail(cause=99)),  # type: ignore[arg-type]
        entry(10, 0, "ENDED", end=99),
    ]
    text = plain(response(timeline, end=99))
    assert text.count("that this version of penstock does not know") == 3
    assert "ended: 99, after" in text


def documented(words):
    """Whether the page about timelines has these words, with any numbers."""
    pattern = re.sub(r"\d+", r"[\\d,]+", re.escape(words))
    page = (Path(__file__).parents[3] / "docs/explain.md").read_text(encoding="utf-8")
    return re.search(f"`{pattern}`", page) is not None


def test_every_cause_is_in_the_documentation():
    for cause in pb.WaitCause.values()[1:]:
        numbers = pb.WaitDetail(cause=cause, requests_ahead=1, max_rows=1, free_blocks=1, needed_blocks=1)
        numbers.step_tokens = numbers.state_slots = 1
        assert documented(wait_words(numbers)), cause
    for hold_cause in pb.HoldCause.values()[1:]:
        assert documented(hold_words(hold_cause)), hold_cause
    for name in pb.PreemptionCause.keys()[1:]:
        event = entry(0, 0, "PREEMPTED", preemption=preempted(name.removeprefix("PREEMPTION_CAUSE_"), "ID", 1))
        assert documented(event_words(event, ID).removeprefix("preempted: ")), name
    page = (Path(__file__).parents[3] / "docs/explain.md").read_text(encoding="utf-8")
    for end in pb.RequestEnd.values()[1:]:
        assert f"`{end_name(end)}`" in page


def test_the_command(admin, capsys):
    admin.explained[ID] = response()
    assert cli.main(["explain", ID]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:6] == WHOLE.splitlines()[:6]
    assert "\x1b" not in out
    assert len(out.splitlines()) == len(WHOLE.splitlines())


def test_as_json(admin, capsys):
    admin.explained[ID] = response(client_request_id="", predicted_ttft=None)
    assert cli.main(["explain", ID, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["request_id"], told["time_to_first_token"], told["predicted_ttft"]) == (ID, 1.5201, None)
    assert (told["arrive_time"], told["end"]) == ("2025-11-20T11:48:54.123456Z", "stop")
    assert told["timeline"][1]["wait"]["cause"] == "blocks"
    assert [each["kind"] for each in told["timeline"]][:4] == ["accepted", "waited", "began", "prefilled"]
    assert told["timeline"][0]["first_step"] is None
    assert told["timeline"][3] == {
        "start_offset": 1.0001,
        "duration": 0.5,
        "choice": 0,
        "kind": "prefilled",
        "first_step": 812,
        "last_step": 819,
        "num_tokens": 4096,
        **dict.fromkeys(("queue_position", "wait", "drafts", "preemption", "hold_cause", "update", "end")),
        "missed_tokens": None,
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
    text = plain(response(TIMELINE[:5], max_tokens=0, num_choices=3, time_to_first_token=None))
    assert "inputs       3, with 6,264 tokens in total; no output\n" in text
    assert "of output" not in text
    assert "first token " not in text


def test_a_mistyped_flag_gets_a_suggestion(capsys):
    assert cli.main(["explain", ID, "--admn=127.0.0.1:1"]) == 2
    assert "--admn=127.0.0.1:1; did you mean --admin?" in capsys.readouterr().err
