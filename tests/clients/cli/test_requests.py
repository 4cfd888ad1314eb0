"""``penstock requests`` and ``penstock cancel``: what they ask the service for, and what they say."""

import io
import json

import pytest

import penstock.v1 as pb
from penstock.clients.cli import main as cli
from penstock.clients.cli.admin import requests as commands
from penstock.clients.cli.as_dict import duration_of


def live(number, tenant="acme", **fields):
    known = {
        "request_id": f"R{number:025}",
        "tenant": tenant,
        "state": pb.REQUEST_STATE_WAITING,
        "age": duration_of(1.5 * number),
        "prompt_tokens": 100 + number,
        "max_tokens": 64,
        "num_choices": 1,
    }
    return pb.LiveRequest(**known | fields)


TABLE = """\
request                     state          age, s    prompt    output   at most  tenant
R0000000000000000000000001  waiting           1.5       101         0        64  acme
R0000000000000000000000002  decoding          3.0       102     1,200    64 x 2  zenith  mine
"""


@pytest.fixture
def two(admin):
    decoding = pb.REQUEST_STATE_DECODING
    second = live(2, "zenith", state=decoding, output_tokens=1200, num_choices=2, client_request_id="mine")
    admin.live = [live(1), second]
    return admin


def said(capsys, *arguments, status=0):
    assert cli.main(list(arguments)) == status
    return capsys.readouterr()


class TestRequests:
    """`penstock requests`."""

    def test_a_table(self, two, capsys):
        assert said(capsys, "requests").out == TABLE

    def test_without_requests_there_is_only_its_head(self, admin, capsys):
        assert said(capsys, "requests").out == TABLE.splitlines(keepends=True)[0]

    def test_json_has_an_object_in_each_line(self, two, capsys):
        first, second = map(json.loads, said(capsys, "requests", "--json").out.splitlines())
        assert (first["request_id"], first["state"], first["age"]) == (live(1).request_id, "waiting", 1.5)
        assert (second["state"], second["client_request_id"], second["num_choices"]) == ("decoding", "mine", 2)

    def test_filters_are_the_services(self, two, capsys):
        flags = ("--tenant", "zenith", "--state", "held", "--state", "waiting", "--state", "held", "--min-age", "0.25")
        assert len(said(capsys, "requests", *flags).out.splitlines()) == 2
        [call] = two.list_calls
        states = [pb.REQUEST_STATE_HELD, pb.REQUEST_STATE_WAITING]
        assert call.filter == pb.RequestFilter(tenant="zenith", states=states, min_age=duration_of(0.25))

    def test_every_page_is_read(self, admin, capsys):
        admin.live = [live(number) for number in range(2001)]
        lines = said(capsys, "requests", "--json").out.splitlines()
        assert [json.loads(line)["request_id"] for line in lines] == [each.request_id for each in admin.live]
        assert [call.page_token for call in admin.list_calls] == ["", "1000", "2000"]

    @pytest.mark.parametrize(
        ("flags", "problem"),
        [
            (["--state", "lost"], "--state: invalid choice: 'lost'"),
            (["--min-age", "-1"], "--min-age: must be a number of seconds, from 0; it is '-1'"),
            (["--min-age", "nan"], "must be a number of seconds"),
            (["--min-age", "1e300"], "must be a number of seconds"),
            (["--tenant", ""], "--tenant: must be 1 to 64 ASCII characters; it is ''"),
            (["--tenant", "x" * 65], "must be 1 to 64 ASCII"),
            (["--tenant", "\udcff"], "must be 1 to 64 ASCII"),
        ],
    )
    def test_what_is_no_filter(self, capsys, flags, problem):
        assert problem in said(capsys, "requests", *flags, status=2).err


class TestCancel:
    """`penstock cancel`."""

    def test_by_id(self, two, capsys):
        assert said(capsys, "cancel", live(1).request_id).out == "1 request cancelled\n"
        assert [each.tenant for each in two.live] == ["zenith"]
        assert not two.list_calls

    def test_unknown_ids_are_named_and_the_others_cancelled(self, two, capsys):
        done = said(capsys, "cancel", "x", live(1).request_id, live(2).request_id, "y", status=1)
        assert done.out == "2 requests cancelled\n"
        assert done.err == "".join(
            f"penstock cancel: {name}: no live request has this id; it may have ended\n" for name in "xy"
        )

    def test_thousands_of_ids_take_several_calls(self, admin, capsys):
        admin.live = [live(number) for number in range(2500)]
        ids = [each.request_id for each in admin.live]
        assert said(capsys, "cancel", *ids, ids[0]).out == "2,500 requests cancelled\n"
        assert [len(call.ids.request_ids) for call in admin.cancel_calls] == [1000, 1000, 500]

    def test_a_script_says_yes(self, two, capsys):
        assert said(capsys, "cancel", "--tenant", "zenith", "--yes").out == "1 request cancelled\n"
        assert said(capsys, "cancel", "--all", "--yes").out == "1 request cancelled\n"
        assert two.cancel_calls == [
            pb.CancelRequestsRequest(filter=pb.RequestFilter(tenant="zenith")),
            pb.CancelRequestsRequest(all=pb.AllRequests()),
        ]

    def test_a_script_that_does_not_is_told(self, two, capsys, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        done = said(capsys, "cancel", "--all", status=1)
        assert done.err == (
            "penstock cancel: the input is not a terminal, so cancelling cannot be confirmed; pass --yes\n"
        )
        assert not two.cancel_calls

    @pytest.mark.parametrize(
        ("answer", "is_yes"), [("y", True), ("YES ", True), ("", False), ("n", False), (None, False)]
    )
    def test_an_operator_is_asked(self, two, capsys, monkeypatch, answer, is_yes):
        def ask(question):
            assert question == "cancel 2 requests? [y/N] "
            if answer is None:
                raise EOFError
            return answer

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr(commands, "input", ask, raising=False)
        done = said(capsys, "cancel", "--all", status=0 if is_yes else 1)
        assert done.out == ("2 requests cancelled\n" if is_yes else "nothing was cancelled\n")
        assert bool(two.cancel_calls) is is_yes

    def test_the_question_has_the_number(self, admin, capsys, monkeypatch):
        asked: list[str] = []

        def decline(question):
            asked.append(question)
            return ""

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr(commands, "input", decline, raising=False)
        for number in (1, 1000, 1001):
            admin.live = [live(each) for each in range(number)]
            said(capsys, "cancel", "--all", status=1)
        assert asked == [
            f"cancel {what}? [y/N] " for what in ("1 request", "1,000 requests", "more than 1,000 requests")
        ]

    @pytest.mark.parametrize(
        "arguments",
        [[], ["--yes"], ["x", "--all"], ["x", "--tenant", "a"], ["--all", "--state", "held"], ["--min-age", "0"]],
    )
    def test_what_to_cancel_is_said_in_one_way(self, capsys, arguments):
        error = said(capsys, "cancel", *arguments, status=2).err
        assert "name requests by their ids, or by --tenant, --state and --min-age, or give --all" in error

    @pytest.mark.parametrize("name", ["", "x" * 65, "\udcff"])
    def test_what_is_no_id(self, capsys, name):
        assert "ID: must be 1 to 64 ASCII characters" in said(capsys, "cancel", name, status=2).err


class Terminal(io.StringIO):
    """Standard input at a terminal."""

    def isatty(self):
        return True
