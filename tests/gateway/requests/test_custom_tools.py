"""The input of custom tools' calls, read out of a function's arguments however these are cut into parts."""

import json

import pytest

from penstock.clients.gateway.requests.custom_tools import CustomInput, custom_arguments, custom_function

TEXTS = ["", "a", '*** Begin Patch\n+x = "\\n"\n*** End Patch', "\t\\ \u2028 é 𝄞", "{}", '"']


def read(arguments: str, size: int) -> str:
    """The input in parts of this size, which is never taken back."""
    reader = CustomInput()
    text = "".join(reader.append_arguments(arguments[at : at + size]) for at in range(0, len(arguments), size))
    return text + reader.end()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_the_input_is_read_in_parts(text: str, size: int) -> None:
    for arguments in (custom_arguments(text), json.dumps({"input": text}), json.dumps({"input": text}, indent=1)):
        assert read(arguments, size) == text


def test_the_input_comes_as_it_is_written() -> None:
    reader = CustomInput()
    parts = [reader.append_arguments(part) for part in ('{"inp', 'ut": "a', "b\\", "nc", '"}')]
    assert parts == ["", "a", "b", "\nc", ""]
    assert reader.end() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "cut\\ud83d', "cut"),
        ('{"input": "half \\ud83d pair"}', "half \ufffd pair"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ("{}", ""),
        ("", ""),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("no object", "no object"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_other_arguments_lose_nothing(arguments: str, text: str) -> None:
    assert read(arguments, 3) == text


def test_the_model_is_shown_a_grammar_of_the_input() -> None:
    function = custom_function("patch", "Edits files.", "lark", 'start: "a"')
    assert function["description"] == 'Edits files.\n\nThe input must match this Lark grammar:\nstart: "a"'
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    function = custom_function("date", None, "regex", r"\d+")
    assert function["parameters"]["properties"] == {"input": {"type": "string", "pattern": r"^(?:\d+)$"}}
    assert "description" not in custom_function("patch", None, None, None)
