"""``penstock profile``, on the built-in model."""

import json

import pytest

from penstock.clients.errors import PenstockError
from penstock.service.app.profile import main

SMALL = ["--rows", "2", "--prompt-tokens", "20", "--output-tokens", "4", "--rounds", "1", "--threads", "1"]


def test_the_stages_of_the_demo_add_up(tmp_path, capsys):
    file = tmp_path / "profile.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["bytes_per_s"] > 0
    assert report["operations_per_s"]["bfloat16"] > 0
    decode, prefill = report["steps"]
    assert (decode["tokens"], prefill["tokens"]) == (2, 40)
    for step in report["steps"]:
        assert sum(stage["seconds"] for stage in step["stages"]) == pytest.approx(step["seconds"])
        assert sum(stage["share"] for stage in step["stages"]) == pytest.approx(1)
        assert {"qkv", "attention", "gate and up", "head"} <= {stage["name"] for stage in step["stages"]}
    printed = capsys.readouterr().out
    assert "a step of decoding, 2 rows, context 22" in printed
    assert "the prompts, 2 of 20 tokens" in printed
    assert printed.count("| gate and up |") == 2


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--output-tokens", "1"], "--output-tokens: must be at least 2"),
        (["--dtype", "float16"], "only the CPU library counts the time of stages, .* --dtype is float16"),
        (["--prompt-tokens", "1000000"], "^--prompt-tokens plus --output-tokens 1000064: "),
        (["./no-such-model"], "no such directory"),
        (["--cpu-pinning", "on", "--threads", "100000"], "--cpu-pinning on: 100000 threads"),
    ],
)
def test_what_cannot_be_profiled_is_refused(flags, problem):
    with pytest.raises(PenstockError, match=problem):
        main(flags)


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "penstock profile Qwen/Qwen3-0.6B --quantization int8" in capsys.readouterr().out
