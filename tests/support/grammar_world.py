"""Rows with every kind of grammar on one runner, and a drafter whose proposals may be right."""

import json
import random
import threading
from pathlib import Path

from penstock.models.speculative.drafter import Drafter, Proposal
from penstock.models.structured_output.compiler import to_grammar
from penstock.models.structured_output.mask_work import MaskTools
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan

DEMO = Path(__file__).parents[2] / "models" / "demo"
EOS = (4093, 4095)
VOCAB_SIZE = 4096
MAX_TOKENS = 60
LONG = "The gate of a penstock meters the flow. " * 20
KINDS = {
    "choices": to_grammar("choices", json.dumps(["an apple a day", "a pear", LONG])),
    "forced": to_grammar("choices", json.dumps([LONG])),
    "regex": to_grammar("regex", r"[ab]{10}(cd|ef)+[0-9]{4,30}"),
    "JSON schema": to_grammar(
        "json_schema",
        '{"type": "object", "properties": {"a rather long name": {"enum": ["apple", "pear"]}, "number": {"type":'
        ' "integer", "minimum": 0, "maximum": 999}}, "required": ["a rather long name", "number"]}',
    ),
    "any JSON": to_grammar("any_json", ""),
    "Lark": to_grammar("lark", 'start: "<call>" body "</call>"\nbody: /[a-z ]{5,20}/ | "(" body ")"'),
    "ambiguous": to_grammar("lark", "start: s\ns: s s s | s s | /[a-e]/"),
    "not forced": to_grammar("choices", json.dumps([LONG]), forces=False),
}


class Guesses(Drafter):
    """Proposes tokens that may be right, and often are not."""

    def __init__(self, tokenizer):
        self.random = random.Random(1)
        self.texts = [tokenizer.tokenize_str(text) for text in ("ababab", '"number": 1', " gate of", "aaaa", "0123")]

    def propose(self, wanted):
        proposals = [self.random.choice(self.texts)[:most] for _, most in wanted]
        return [Proposal(token_ids, [0.9] * len(token_ids)) for token_ids in proposals]

    def drop_row(self, row):
        pass


class World:
    """Rows of one runner, all of them in each step, from their prompts to their ends."""

    def __init__(self, runner, tokenizer):
        self.runner, self.prompt = runner, tokenizer.tokenize_str("The fruit:")
        self.outputs, self.failures, self.ended = {}, {}, set()
        self.num_idle, self._added = 0, []

    def add(self, number, grammar, seed=5, max_drafts=0, output=(), tenant=""):
        history = [*self.prompt, *output]
        blocks = list(range(number * 16, number * 16 + 16))
        sampling = SamplingParams(temperature=1.0, seed=seed, stop_token_ids=EOS)
        self._added.append(
            AddedRow(
                number, 0, history, len(self.prompt), 0, blocks, sampling, None, max_drafts, grammar, tenant=tenant
            )
        )
        self.outputs[number] = list(output)

    def step(self):
        added, self._added = self._added, []
        chunks = [Chunk(row.row, 0, len(row.token_ids)) for row in added]
        running = self.outputs.keys() - self.ended - {row.row for row in added}
        decodes = [Decode(number, 1 + self.max_drafts(number)) for number in sorted(running)]
        plan = StepPlan(0, [], added, [], chunks, decodes, max_drafts=100)
        for row in self.runner.run(plan).rows:
            output = self.outputs[row.row]
            output += row.token_ids
            self.num_idle += not row.token_ids
            stops = [index for index, token_id in enumerate(output) if token_id in EOS]
            if stops:
                del output[stops[0] + 1 :]
            if row.failure:
                self.failures[row.row] = (row.failure, row.failure_kind)
            if row.failure or stops or len(output) >= MAX_TOKENS:
                del output[MAX_TOKENS:]
                self.ended.add(row.row)

    def max_drafts(self, number):
        return self.runner._rows[number].max_drafts

    def run(self, until=lambda: False):
        while self.outputs.keys() - self.ended and not until():
            self.step()
        return self.outputs

    def drop(self):
        self.runner.run(StepPlan(0, list(self.outputs), [], [], [], []))


def add_all(world, max_drafts=0):
    for number, grammar in enumerate(KINDS.values()):
        world.add(number, grammar, seed=number, max_drafts=max_drafts)


def block_masks(monkeypatch, world, number):
    """Returns events: one is set when a mask of the row is being computed, which waits for the other one."""
    blocked, go_on, fill = threading.Event(), threading.Event(), MaskTools.fill

    def fill_blocked(self, plain, drafted, words):
        row = world.runner._rows[number]
        if row.matcher.library is not None and any(one is row.matcher.library for one, *_ in [*plain, *drafted]):
            blocked.set()
            go_on.wait()
        fill(self, plain, drafted, words)

    monkeypatch.setattr(MaskTools, "fill", fill_blocked)
    return blocked, go_on


def check(world, oracle):
    assert not world.failures
    assert dict(zip(KINDS, (world.outputs[number] for number in range(len(KINDS))), strict=True)) == oracle
