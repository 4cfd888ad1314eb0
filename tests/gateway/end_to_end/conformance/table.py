"""The list as docs/http.md has it."""

from . import CASES
from .case import EVERYWHERE, UNKNOWN, Case


def table() -> str:
    """A line for each field, and what it does; a field that means another thing elsewhere has another line there."""
    fields: dict[tuple[str, tuple[str, ...]], list[Case]] = {}
    for case in CASES:
        if case.field == UNKNOWN:
            continue
        fields.setdefault((case.field, case.endpoints), []).append(case)
    lines = [f"| field | {' | '.join(EVERYWHERE)} | |", "|---" * (len(EVERYWHERE) + 2) + "|"]
    for (name, endpoints), cases in sorted(fields.items()):
        shown = cases[0].support.value
        columns = [shown if endpoint in endpoints else "" for endpoint in EVERYWHERE]
        words = [case.what if case.support is cases[0].support else f"refused: {case.what}" for case in cases]
        lines.append(f"| `{name}` | {' | '.join(columns)} | {'; '.join(filter(None, words))} |")
    return "\n".join(lines)
