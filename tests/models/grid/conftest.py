"""Prints how many cells of the grid passed, for each line of the matrix in docs/supported_models.md."""

from collections import Counter
from collections.abc import Callable

import pytest

from penstock.models.architecture.lines import LINES

CELL = "cell of the grid"
SAME = {
    "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
    "ExaoneForCausalLM": "LlamaForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
    "InternLM2ForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "InternVLForConditionalGeneration": "Qwen2ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "LlavaForConditionalGeneration": "LlamaForCausalLM",
    "MinistralForCausalLM": "MistralForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "MllamaForCausalLM": "LlamaForCausalLM",
    "MllamaForConditionalGeneration": "LlamaForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}
"""Architectures without variants, and the one that computes the same. Tests in ``checkpoint/`` show that
their files are read correctly."""

RecordCell = Callable[[str, str], None]


@pytest.fixture(scope="session")
def same() -> dict[str, str]:
    return SAME


@pytest.fixture
def record_cell(record_property: Callable[[str, object], None]) -> RecordCell:
    """Says which cell of the table a test belongs to: ``record_cell(architecture, column)``."""
    return lambda architecture, column: record_property(CELL, (architecture, column))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a row for each architecture of each line."""
    passed, run = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, (architecture, column) in report.user_properties:
                if name == CELL and (report.when == "call" or outcome == "failed"):
                    run[architecture, column] += 1
                    passed[architecture, column] += outcome == "passed"
    columns = sorted({column for _, column in run})
    if not columns:
        return
    rows = [("line", "architecture", *columns)]
    for line in LINES:
        for name in line.architectures:
            other = SAME.get(name, name)
            shown = name if other == name else f"{name}, as {other}"
            counts = [f"{passed[other, column]} of {run[other, column]}" for column in columns]
            rows.append((line.name[:50], shown, *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("the grid of models: tests that passed")
    for row in rows:
        terminalreporter.write_line("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)))
