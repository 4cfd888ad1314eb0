"""Regular expressions of a quantisation config: those of real checkpoints, and those that would never end."""

import re

import pytest

from penstock.models.checkpoint.quantization import module_patterns
from penstock.models.checkpoint.quantization.module_patterns import Patterns
from penstock.models.errors import ModelError

NAME = "model.layers.11.mlp.gate_proj"


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        (".*gate_proj", True),
        (r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj$", True),
        (r"(.*\.)?mlp(\.|$)", True),
        ("^(?!.*experts).*$", True),
        (r"model\.layers\.[0-9]{2}\..*?proj", True),
        (".*lm_head", False),
        (r"visual.*", False),
        (r"model\.layers\.(0|1|2)\..*", False),
    ],
)
def test_expressions_as_quantisers_write_them(text, matches):
    assert Patterns((text,)).match(NAME) is matches


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+$", "(.|.)*x", "(?:.*){3}x", "(?P<x>.?)+x", ".*" * 8, ".?" * 40, "(.|.)" * 40, "(.|.)?" * 20,
        "x" * 1025, "a{99999999999}", "(" * 600 + ")" * 600, "(", "[", "*",
    ],
)  # fmt: skip
def test_expressions_that_would_not_end_are_refused(text):
    with pytest.raises(re.error):
        Patterns((text,))


def test_all_together_have_a_budget(monkeypatch):
    monkeypatch.setattr(module_patterns, "MAX_TOTAL_S", -1.0)
    for texts in (("x", "y"), ("model.*",)):
        with pytest.raises(ModelError, match="regular expressions take too long"):
            Patterns(texts).match(NAME)


def test_matches_count_in_the_budget_too(monkeypatch):
    seconds = iter(range(100))
    monkeypatch.setattr("time.thread_time", lambda: float(next(seconds)))
    patterns = Patterns(("model.*",))
    assert all(patterns.match(NAME) for _ in range(int(module_patterns.MAX_TOTAL_S)))
    with pytest.raises(ModelError, match="regular expressions take too long"):
        patterns.match(NAME)
