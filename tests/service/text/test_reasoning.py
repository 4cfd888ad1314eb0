"""Grammars that begin after reasoning."""

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.models.structured_output.compiler import GrammarError, to_grammar
from penstock.service.text.reasoning import Reasoning, Section

BYTES = LLTokenizer("byte")
EOS = BYTES.eos_token
OPENS, CLOSES = ord("<"), ord(">")
"""Bytes that stand for marks which are single tokens."""
TEMPLATE = ["<think>"]
CASES = json.loads(Path(__file__).parents[1].joinpath("constraints.json").read_text())
of_bytes = Reasoning(TEMPLATE, {}, ["<|end|>"], [EOS])
of_tokens = Reasoning(TEMPLATE, {"<think>": OPENS, "</think>": CLOSES}, ["<|end|>"], [EOS])
ANSWERS = {
    "lark": to_grammar("lark", 'start: "yes" | "no"'),
    "own options": '%llguidance {"no_forcing": true}\nstart: /yes|no/',
}


def takes(grammar, text):
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text if isinstance(text, bytes) else text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("answer", ANSWERS)
def test_marks_of_several_tokens(answer):
    grammar = of_bytes.grammar(ANSWERS[answer], Section.OPEN, 100)
    for text in ("</think>yes", "a < b </thin</think>\n\nno", "<think>Ümlaut</think> \nyes"):
        assert takes(grammar, text)
    for text in ("yes", "a</think>\n\n\nno", "a</think>maybe", "a</think>"):
        assert not takes(grammar, text)
    grammar = of_bytes.grammar(ANSWERS[answer], Section.POSSIBLE, 100)
    for text in ("yes", "<think>a</think>no", "\n<think>a</think>no"):
        assert takes(grammar, text)
    for text in ("\nyes", "\n\n\n<think>a</think>no", "a</think>no", "<think>yes"):
        assert not takes(grammar, text)


@pytest.mark.parametrize("answer", ANSWERS)
def test_marks_of_one_token(answer):
    """Anything may come before it, also what is no text."""
    grammar = of_tokens.grammar(ANSWERS[answer], Section.OPEN, 100)
    for text in (">yes", b"a \xff\xc3 >no", "<a>\n\nno"):
        assert takes(grammar, text)
    for text in ("yes", ">\n\n\nno", ">", "a>maybe", ">>yes"):
        assert not takes(grammar, text)
    grammar = of_tokens.grammar(ANSWERS[answer], Section.POSSIBLE, 100)
    for text in ("yes", "<a>no", "\n<a>no"):
        assert takes(grammar, text)
    for text in ("\nyes", "a>no", "<yes"):
        assert not takes(grammar, text)


@pytest.mark.parametrize(("max_tokens", "most"), [(100, 74), (8, 5), (2, 1), (1, 0), (100_000, 98_975)])
def test_room_for_the_answer_is_kept(max_tokens, most):
    matcher = LLMatcher(BYTES, of_tokens.grammar(ANSWERS["lark"], Section.OPEN, max_tokens), log_level=0)
    assert matcher.consume_tokens([ord("a")] * most) or not most
    assert int.from_bytes(matcher.compute_bitmask(), "little") == 1 << CLOSES


def test_no_end_of_sequence_comes_in_reasoning():
    matcher = LLMatcher(BYTES, of_tokens.grammar(ANSWERS["lark"], Section.OPEN, 100), log_level=0)
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    assert not allowed >> EOS & 1


@pytest.mark.parametrize("section", [Section.OPEN, Section.POSSIBLE])
@pytest.mark.parametrize("reasoning", [of_bytes, of_tokens], ids=["text", "tokens"])
def test_every_grammar_may_come_after_it(reasoning, section):
    for case in CASES[::3]:
        text = json.dumps(case["text"]) if case["kind"] == "choices" else case["text"] or ""
        try:
            answer = to_grammar(case["kind"], text)
        except GrammarError:
            continue
        if not LLMatcher(BYTES, answer, log_level=0).is_error():
            whole = LLMatcher(BYTES, reasoning.grammar(answer, section, 100), log_level=0)
            assert not whole.is_error(), (case["name"], whole.get_error())


def test_sections():
    assert of_bytes.after_template("x<think>\n") is Section.OPEN
    assert of_bytes.after_template("<think>\n\n</think>\n\n") is Section.NONE
    assert of_bytes.after_template("assistant\n") is Section.POSSIBLE
    assert of_bytes.after_message("<think>a") is Section.OPEN
    assert of_bytes.after_message("<think>a</think>b") is Section.NONE
    assert of_bytes.after_message("b") is Section.NONE
    assert of_bytes.after_text("what is <think>?<|end|>") is Section.POSSIBLE
    assert of_bytes.after_text("q<|end|><think>so") is Section.OPEN
    assert of_bytes.after_text("<think>a</think>") is Section.NONE


def test_a_model_whose_template_shows_no_reasoning():
    plain = Reasoning(["{{ messages }}"], {"</think>": CLOSES}, [], [EOS])
    assert plain.after_template("assistant\n") is Section.NONE
    assert plain.after_text("a") is Section.NONE
    assert plain.after_text("a<think>") is Section.OPEN
    assert plain.grammar("start: /a/", Section.NONE, 9) == "start: /a/"


def test_channels_of_gpt_oss():
    """The answer is in a channel of its own, with or without reasoning before it."""
    start, channel, message, end = (ord(letter) for letter in "SCME")
    ids = {"<|start|>": start, "<|channel|>": channel, "<|message|>": message, "<|end|>": end}
    template = ["'<|start|>assistant<|channel|>analysis<|message|>' + message.thinking"]
    gpt_oss = Reasoning(template, ids, ["<|end|>"], [EOS])
    assert gpt_oss.after_template("<|start|>assistant") is Section.POSSIBLE
    assert gpt_oss.after_text("q<|end|><|start|>assistant") is Section.POSSIBLE
    assert gpt_oss.after_text("{") is Section.NONE
    grammar = gpt_oss.grammar('start: "yes"', Section.POSSIBLE, 100)
    for text in ("CfinalMyes", "CanalysisMHm {<E" + "SassistantCfinalMyes"):
        assert takes(grammar, text)
    for text in ("yes", "CanalysisMHmE", "CanalysisMHmEyes", "CanalysisMHmESassistantCfinalMno"):
        assert not takes(grammar, text)
    assert takes(gpt_oss.grammar('start: "yes"', Section.OPEN, 100), "HmESassistantCfinalMyes")
    assert takes(gpt_oss.grammar('start: "yes"', Section.POSSIBLE, 100, shows_marks=False), "yes")


def test_a_mark_that_begins_with_a_special_token():
    gemma = Reasoning(["<|channel>thought"], {"<|channel>": OPENS, "<channel|>": CLOSES}, [], [EOS])
    grammar = gemma.grammar('start: "yes"', Section.POSSIBLE, 100)
    assert takes(grammar, "<thought\nHm.>\nyes")
    assert takes(grammar, "yes")
    assert not takes(grammar, "<yes")
    assert gemma.after_template("<|channel>thought\n<channel|>") is Section.NONE


def test_mistrals_marks():
    mistral = Reasoning(["[THINK]"], {}, [], [EOS])
    assert mistral.after_template("[THINK]") is Section.OPEN
    assert takes(mistral.grammar("start: /a/", Section.OPEN, 9), "x[/THINK]a")
