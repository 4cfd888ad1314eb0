"""docs/errors.md has every reason that there is, with its status, and no other."""

import ast
import re
from pathlib import Path

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.errors import from_failure
from penstock.service.errors import Reason

ROOT = Path(__file__).parents[2]
RETRIES = {
    pb.RETRY_RULE_NEVER: "never",
    pb.RETRY_RULE_AFTER_DELAY: "after a delay",
    pb.RETRY_RULE_OTHER_REPLICA: "elsewhere",
}
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The table below a heading: the other cells of each row, by its first one."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    assert len(cells) == len({row[0] for row in cells}), "a reason comes twice"
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_reason_of_the_service_has_a_row_with_its_status() -> None:
    expected = {}
    for reason in Reason:
        failure = RequestFailed(reason.code, reason.message)
        failure.reason = reason.name
        expected[reason.name] = [reason.code.name, str(from_failure(failure).status), RETRIES[reason.retry_rule]]
    listed = rows("Reasons of the service")
    assert {name: row[:3] for name, row in listed.items()} == expected
    assert all(meaning and remedy for _, _, _, meaning, remedy in listed.values())


def test_every_code_of_the_gateway_has_a_row_with_its_statuses() -> None:
    """Codes and statuses are constants at the places that raise them; ``invalid`` is 400."""
    raised: dict[str, set[int]] = {}
    for path in (ROOT / "clients/gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            code = next((word.value for word in node.keywords if word.arg == "code"), None)
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                status = getattr(node.args[0], "value", None)
                raised.setdefault(code.value, set()).add(status if isinstance(status, int) else 400)
    listed = rows("What the HTTP gateway adds")
    assert {code: set(map(int, row[0].split(","))) for code, row in listed.items()} == raised
    assert all(meaning and remedy for _, meaning, remedy in listed.values())


def test_reasons_that_have_another_name_over_http_are_named() -> None:
    for reason in Reason:
        failure = RequestFailed(reason.code, reason.message)
        failure.reason = reason.name
        if (code := from_failure(failure).code) != reason.name.lower():
            assert re.search(rf"`{reason.name}` is\s+`{code}`", PAGE)
