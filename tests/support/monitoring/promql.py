"""Finds the metrics and labels in a PromQL expression. Reads only the part of the language that this needs: promtool
and Prometheus check the rest."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
      (?P<string>"(?:\\.|[^"\\])*"|'[^']*')
    | (?P<range>\[[^\]]*\])
    | (?P<labels>\b(?:by|without|on|ignoring|group_left|group_right)\s*\((?P<names>[^)]*)\))
    | (?P<number>\b\d[\w.]*)
    | (?P<function>[a-zA-Z_]\w*)(?=\s*(?:\(|(?:by|without)\b))
    | (?P<word>[a-zA-Z_:][\w:]*)
    | (?P<matchers>\{(?:"(?:\\.|[^"\\])*"|[^}"])*\})
    """,
    re.VERBOSE,
)
_KEYWORDS = {"and", "or", "unless", "offset", "bool", "by", "on", "ignoring", "without", "group_left", "group_right"}
_MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*"(?:\\.|[^"\\])*"')


@dataclass
class Selector:
    """One use of a metric."""

    metric: str
    labels: set[str]
    """The labels that it is selected by."""


@dataclass
class Names:
    """The names in an expression."""

    selectors: list[Selector]
    grouping: set[str]
    """The labels of ``by``, ``on`` and so on."""


def names_in(expression: str) -> Names:
    """Returns the names of an expression, in which Grafana's variables may be."""
    found = Names([], set())
    is_after_metric = False
    for token in _TOKEN.finditer(expression):
        kind = token.lastgroup if token.lastgroup != "names" else "labels"
        if kind == "labels":
            found.grouping |= set(re.findall(r"\w+", token["names"]))
        elif kind == "word" and token[0] not in _KEYWORDS:
            found.selectors.append(Selector(token[0], set()))
        elif kind == "matchers":
            assert is_after_metric, f"a selector without the name of its metric: {token[0]}"
            found.selectors[-1].labels |= {match[1] for match in _MATCHER.finditer(token[0])}
        is_after_metric = kind == "word"
    return found
