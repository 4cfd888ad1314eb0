"""``penstock models`` prints the lines that a text selects."""

import json

import pytest

from penstock.models.architecture.lines import COLUMNS, LINES
from penstock.service.app.supported_models import main


def test_lines_with_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["SMOLLM3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SmolLM3"
    assert [line.strip() for line in lines[1:4]] == [
        "architectures: SmolLM3ForCausalLM", "GGUF: smollm3", "on cuda: kernels",
    ]  # fmt: skip


def test_all_lines_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["line"] for line in found] == [line.name for line in LINES]
    assert all(tuple(line) == COLUMNS for line in found)


def test_no_column_is_the_same_for_all_that_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json"])
    served = [line for line in json.loads(capsys.readouterr().out) if line["architectures"]]
    assert [name for name in COLUMNS if len({line[name] for line in served}) == 1] == []


def test_a_text_that_no_line_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing like it"]) == 1
    assert capsys.readouterr().err.startswith(f"penstock models: none of {len(LINES)} lines has 'nothing like it'")
