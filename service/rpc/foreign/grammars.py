"""Grammars in the contracts of other engines, which have one field for several notations."""

import penstock.v1 as pb
from penstock.clients.constraints import is_gbnf
from penstock.service.config.limits import MAX_GRAMMAR_BYTES


def set_grammar(constraint: pb.Constraint, grammar: str) -> None:
    """Sets a grammar as GBNF if it has a rule with ``::=``, as vLLM accepts besides Lark; otherwise as Lark."""
    if is_gbnf(grammar[:MAX_GRAMMAR_BYTES]):  # a longer one is refused later
        constraint.gbnf = grammar
    else:
        constraint.lark = grammar
