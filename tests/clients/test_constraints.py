"""What answers must match, as flags of the terminal tools."""

import argparse
import json

import pytest

import penstock.v1 as pb
from penstock.clients.constraints import add_constraint_flags, constraint_settings, is_gbnf, set_constraint
from penstock.clients.errors import InvalidOption
from penstock.clients.requests import build_start

SCHEMA = '{"type": "null"}'
LARK, GBNF = 'start: "a" | "b"\n', 'root ::= "a" | "b"\n'


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files with these texts, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("schema.json", SCHEMA), ("a.lark", LARK), ("a.gbnf", GBNF)):
        (tmp_path / name).write_text(text)
    (tmp_path / "picture").write_bytes(b"\xff\xd8\xff")


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_constraint_flags(parser)
    return dict(constraint_settings(parser.parse_args(arguments)))


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        (["--json-schema", " " + SCHEMA], pb.Constraint(json_schema=" " + SCHEMA)),
        (["--json-schema", "schema.json"], pb.Constraint(json_schema=SCHEMA)),
        (["--any-json"], pb.Constraint(any_json=pb.AnyJson())),
        (["--regex", "[0-9]+"], pb.Constraint(regex="[0-9]+")),
        (["--grammar", "a.lark"], pb.Constraint(lark=LARK)),
        (["--grammar", "a.gbnf"], pb.Constraint(gbnf=GBNF)),
        (
            ["--choice", "yes", "--choice", "no, never"],
            pb.Constraint(choices=pb.StringChoices(values=["yes", "no, never"])),
        ),
    ],
)
def test_each_kind_has_a_flag(files, arguments, made):
    assert build_start("a", parsed(*arguments)).constraint == made


@pytest.mark.parametrize("grammar", [GBNF, "# a comment\n\n  rule-1\t::= rule_2\n", 'start: "::="\r\nroot ::= "a"'])
def test_a_grammar_with_a_rule_of_gbnf_is_gbnf(grammar):
    assert is_gbnf(grammar)


@pytest.mark.parametrize("grammar", [LARK, 'start: "a ::= b"', "\n" * 1_000_000, "a\n \n" * 200_000])
def test_any_other_grammar_is_not_gbnf_however_long_it_is(grammar):
    assert not is_gbnf(grammar), "with a quadratic search, this takes hours"


def test_answers_are_unconstrained_without_a_flag():
    assert parsed() == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json-schema", "nowhere.json"], "argument --json-schema: cannot read nowhere.json: No such file"),
        (["--grammar", "picture"], "argument --grammar: picture is not a text file"),
        (["--regex", "a", "--any-json"], "not allowed with argument --regex"),
        (["--choice", "a", "--grammar", "a.lark"], "not allowed with argument --choice"),
    ],
)
def test_bad_constraint_flags_are_reported(files, capsys, arguments, said):
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert said in capsys.readouterr().err


def test_chat_and_generate_send_it(files, tool, threaded_service):
    asked = ("--target", threaded_service.target, "--json-schema", "schema.json")
    assert tool.run("chat", *asked, "--once", "hello").stdout == "hello\n"
    own = {"id": 2, "prompt": "b", "constraint": {"regex": "b"}}
    lines = "".join(json.dumps(line) + "\n" for line in ({"id": 1, "prompt": "a"}, own))
    done = tool.run("generate", *asked, "--input", "-", "--output", "-", text=lines)
    assert done.returncode == 0, done.stderr
    chat, first, second = (start.constraint for start in threaded_service.starts)
    assert chat == first == pb.Constraint(json_schema=SCHEMA)
    assert second == pb.Constraint(regex="b")


def test_where_a_constraint_begins() -> None:
    constraint = pb.Constraint()
    set_constraint(constraint, {"regex": "a", "start": "first_token"})
    assert constraint == pb.Constraint(regex="a", start=pb.CONSTRAINT_START_FIRST_TOKEN)
    with pytest.raises(InvalidOption, match=r"constraint\.start: expected after_reasoning or first_token"):
        set_constraint(constraint, {"regex": "a", "start": "later"})
