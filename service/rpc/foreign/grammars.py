"""Grammars in the contracts of other engines, which have one field for several notations."""

import re

import penstock.v1 as pb

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""A grammar rule in EBNF, which vLLM accepts besides Lark."""


def set_grammar(constraint: pb.Constraint, grammar: str) -> None:
    """Sets a grammar as GBNF if it has a rule with ``::=``, otherwise as Lark."""
    if _GBNF_RULE.search(grammar):
        constraint.gbnf = grammar
    else:
        constraint.lark = grammar
