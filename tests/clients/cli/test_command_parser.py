"""What the commands report about wrong arguments: the flag that was misspelt, and never an endless argument."""

import pytest

from penstock.clients.cli import main as cli
from penstock.clients.cli.command_parser import CommandParser, misspelt, shortened


def said(capsys, *arguments, status=2):
    """What a command reports, in one line."""
    assert cli.main(list(arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("generate --inptu a --output b", "--input; did you mean --input instead of --inptu?"),
        ("generate demo --input a --outptu=b", "--output; did you mean --output instead of --outptu?"),
        ("generate --input a --output b --taget=x", "; did you mean --target instead of --taget?"),
        ("generate --target x --input a --output b --retry-faild", "--retry-faild; did you mean --retry-failed?"),
        ("generate demo --input a --output b --concurency 5", "or did you mean --concurrency instead of --concurency?"),
        ("explain --admn x", "unrecognized arguments: --admn; did you mean --admin?"),
        ("explain --jsno", "unrecognized arguments: --jsno; did you mean --json?"),
        ("explain -json", "unrecognized arguments: -json; did you mean --json?"),
        ("explain --frobnicate", "penstock explain: unrecognized arguments: --frobnicate; penstock explain --help"),
        ("explain a b --frobnicate --admn x --jsno", "; did you mean --admin and --json?"),
        ("settings --tenants a", "unrecognized arguments: --tenants a; did you mean --tenant?"),
        ("drain --resume --wiat", "did you mean --wait?"),
    ],
)
def test_a_misspelt_flag_is_named(capsys, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    status = 1 if "concurency" in arguments else 2
    assert expected in said(capsys, *arguments.split(), status=status)


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "demo", "--output", "b", "--max-model-len", "512", "--threads=2"],  # flags of penstock serve
        ["generate", "demo", "--output", "b", "--", "--inptu"],
        ["explain"],
    ],
)
def test_only_what_is_missing_is_named_where_nothing_is_misspelt(capsys, arguments):
    text = said(capsys, *arguments)
    assert "are required" in text
    assert "did you mean" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "x", "--" + "a" * 100_000],
        ["explain", "--" + "a" * 100_000],
        ["explain", "x", *["y"] * 50_000],
        ["top", "--interval", "9" * 100_000],
        ["settings", "--policy", "a" * 100_000],
        ["settings", "--policy", "a " * 50_000],
        ["a" * 100_000],
    ],
)
def test_an_endless_argument_is_not_echoed(capsys, arguments):
    assert len(said(capsys, *arguments)) < 2500


@pytest.mark.parametrize("arguments", [["--tenant", "a", "x" * 100_000], ["--tenant", "x" * 100_000, "speed=1"]])
def test_nor_in_what_is_wrong_with_its_value(capsys, arguments):
    assert len(said(capsys, "settings", *arguments, status=1)) < 500


def test_a_non_number_is_refused_in_plain_words(capsys):
    assert "--target-itl: must be a number; it is 'x'" in said(capsys, "settings", "--target-itl", "x")


def test_values_and_negative_numbers_are_not_flags():
    assert misspelt(["-1", "-.5", "-", "--known=--unknwon", "--", "--knwon"], ["--known", "-h"]) == {}
    assert misspelt(["--knwon=1", "-h", "--zzz"], ["--known", "-h"]) == {"--knwon": "--known"}


def test_a_short_message_stays_as_it_is():
    assert shortened("cannot read /a/b: No such file") == "cannot read /a/b: No such file"
    assert shortened(f"bad: {'x' * 300}; give another") == f"bad: {'x' * 60}...; give another"


def test_arguments_that_were_parsed_well_are_returned():
    parser = CommandParser("x", "Does.", "examples:")
    parser.add_argument("--flag")
    assert parser.parse_args(["--flag", "1"]).flag == "1"
    assert parser.parse_known_args(["--other"])[1] == ["--other"]


def test_a_model_that_runs_here_is_named_once(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").touch()
    arguments = ["generate", "demo", "--input", "a", "--output", "b", "--model", "other"]
    assert "--model: a private service has its own" in said(capsys, *arguments, status=1)
