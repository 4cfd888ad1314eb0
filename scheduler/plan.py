"""The messages between the scheduler and a worker: plain data, in the order in which it is sent.

A plan contains only differences. Between plans the worker's row state determines a row's position: a plan continues a
decoding row, and the result contains its new tokens. This module does not depend on tensors, sockets or gRPC.
"""

from enum import Enum

import msgspec

from penstock.scheduler.reasoning_limit import ReasoningLimit


class Pooling(Enum):
    """The hidden states, after the model's last norm, whose mean is a row's vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"

    def positions(self, num_tokens: int) -> range:
        """Returns these positions for a row of ``num_tokens``."""
        if self is Pooling.MEAN:
            return range(num_tokens)
        return range(1) if self is Pooling.CLS else range(num_tokens - 1, num_tokens)

    @property
    def reads_cache(self) -> bool:
        """Whether a row may begin after a cached prefix, which has keys and values but no hidden states."""
        return self is Pooling.LAST


class SamplingParams(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a row's tokens are chosen. Every id is below the tokenizer's vocabulary size; all limits are checked.

    Filters apply in this order: penalties, ``logit_bias`` and masks, temperature, top_k, top_p, min_p. Then the token
    is the argmax of logits plus Gumbel noise keyed by (seed, position, token id), where position is the index that the
    token will have in the row's history. At temperature 0 it is the argmax of the logits, lowest id first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Unsigned 64 bits. Sequences of one request have different seeds."""
    min_tokens: int = 0
    """No id of ``stop_token_ids`` is chosen before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Sorted. Includes the model's end-of-sequence tokens unless they are ignored."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is masked where the history ends with the others."""
    logprobs: int | None = None
    """None: no log-probabilities; k: those of the chosen token and the k most likely ones, from the model's own
    logits."""
    prompt_logprobs: int | None = None
    reasoning: ReasoningLimit | None = None
    """None: there is no reasoning, or no limit on it. Where the limit closes the reasoning, no other parameter
    applies."""


NO_SLOT = -1
"""Stands for no slot of a recurrent state."""


class AddedRow(msgspec.Struct, array_like=True, gc=False):
    """A row that begins, or begins again after preemption, with everything that the worker must know about it."""

    row: int
    """0 to ``num_row_numbers(max_num_seqs)`` - 1. Used again only after the result of the newest plan that names it."""
    epoch: int
    """The number of this use of the row number; results contain it."""
    token_ids: list[int]
    """The whole history: the prompt, and the output before a preemption."""
    num_prompt_tokens: int
    num_computed: int
    """The KV of ``token_ids[:num_computed]`` is already in ``block_ids``, from the prefix cache."""
    block_ids: list[int]
    sampling: SamplingParams
    pooling: Pooling | None = None
    """If set, nothing is sampled: the row's vector is its only result, once the history is computed."""
    max_drafts: int = 0
    """The maximum number of drafts per step; 0: none."""
    grammar: str = ""
    """The grammar that its whole output must match, in llguidance's format; empty: anything."""
    tenant: str = ""
    """Its tenant. Drafts are learned only from outputs of the same tenant."""
    prediction: list[int] = []
    """The output that its caller expects, to draft from; empty: none."""
    state_slot: int = NO_SLOT
    """The slot of its recurrent state; ``NO_SLOT`` if the model has none."""
    state_source: int = NO_SLOT
    """The slot with the state after ``num_computed`` tokens, which is copied to ``state_slot`` first; perhaps they are
    the same. ``NO_SLOT``: ``num_computed`` is 0, and the state begins with zeros."""
    adapter: int = 0
    """The slot of the LoRA adapter that it is computed with; 0: none."""
    window_start: int = 0
    """The number of blocks of tokens before those of ``window_ids``."""
    window_ids: list[int] = []
    """Its blocks in the groups of layers with a window, up to ``num_computed`` tokens: those of all these groups for a
    block of tokens, then those for the next one. Empty without such groups; see docs/architecture.md."""


class AdapterLoad(msgspec.Struct, array_like=True, frozen=True):
    """Reads a LoRA adapter from a directory in peft's layout, checks it, and writes it to a slot that no row uses until
    the answer. Beside plans: neither waits for the other. Answers come in the order of the loads."""

    slot: int
    """1 to ``WorkerFacts.max_loras``; 0: the adapter is only checked."""
    path: str
    digest: bytes = b""
    """What the files must still have; empty: anything."""


class AdapterLoaded(msgspec.Struct, array_like=True, frozen=True):
    """The answer to an ``AdapterLoad``."""

    rank: int = 0
    """The largest rank of its matrices."""
    digest: bytes = b""
    """A sha256 of its files."""
    error: str = ""
    """Why it was not loaded, as a message for the operator; empty: it was."""


class RowBlocks(msgspec.Struct, array_like=True, gc=False):
    """More blocks for a row, appended to its tables."""

    row: int
    block_ids: list[int]
    window_ids: list[int] = []
    """More blocks in the groups of layers with a window, in the order of ``AddedRow.window_ids``. The row reads none of
    its earlier ones behind the window, which may belong to others by now."""


class StateSnapshot(msgspec.Struct, array_like=True, gc=False):
    """Has a row's recurrent state copied to ``slot`` once the row has computed ``position`` tokens, in this plan or a
    later one. ``position`` is a multiple of the block size, beyond what the row has computed."""

    row: int
    position: int
    slot: int


class Chunk(msgspec.Struct, array_like=True, gc=False):
    """Computes ``history[start:end]`` of a row. If ``end`` is the length of the history, samples the next token, or
    returns the vector of a pooled row."""

    row: int
    start: int
    end: int


class Decode(msgspec.Struct, array_like=True, gc=False):
    """Continues a row from its current position by one token, or by up to ``max_tokens`` if drafts are accepted. The
    row has blocks for them."""

    row: int
    max_tokens: int


class StepPlan(msgspec.Struct, array_like=True, gc=False):
    """One step. The worker copies out, applies the lists in the order of the fields, copies in, and computes chunks and
    decodes as one batch.

    A block of a dropped row may be given out again in the same plan: plans run in order, so earlier writes came first.
    The order protects copies as well: a block that is copied out was written by an earlier plan, and a slot that is
    copied in was written by an earlier plan or by this one. In each list of copies no block and no slot occurs twice.
    """

    step: int
    dropped: list[int]
    added: list[AddedRow]
    blocks: list[RowBlocks]
    chunks: list[Chunk]
    decodes: list[Decode]
    copies_out: list[tuple[int, int]] = []
    """Block and host tier slot: evicted blocks that a row of this plan now has."""
    copies_in: list[tuple[int, int]] = []
    """Host tier slot and block: blocks whose KV counts as computed in a row that this plan adds."""
    max_drafts: int = 0
    """The maximum number of drafts of all its decodes together, for which the step has room."""
    repeating: list[int] = []
    """The rows whose text repeats itself. With ``DraftMethod.AUTO``, only they have drafts from their own text."""
    snapshots: list[StateSnapshot] = []
    """Slots for the recurrent states of rows that this plan has or adds; see docs/architecture.md."""

    @property
    def is_empty(self) -> bool:
        """Whether the plan computes nothing. It may still drop rows."""
        return not self.chunks and not self.decodes


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Flat arrays: entry t of ``chosen`` and entries t*k to (t+1)*k of the ``top`` arrays belong to the t-th token.
    Natural logarithms, from the model's own logits over the tokenizer's vocabulary."""

    num_top: int
    chosen: list[float]
    top_token_ids: list[int]
    top: list[float]

    def part(self, start: int, stop: int) -> "TokenLogprobs":
        """Returns the log-probabilities of the tokens in [start, stop)."""
        tops = slice(start * self.num_top, stop * self.num_top)
        return TokenLogprobs(self.num_top, self.chosen[start:stop], self.top_token_ids[tops], self.top[tops])

    def extend(self, other: "TokenLogprobs") -> None:
        """Appends those of more tokens."""
        self.chosen += other.chosen
        self.top_token_ids += other.top_token_ids
        self.top += other.top


class RowFailure(Enum):
    """Why a row with a grammar cannot continue."""

    COSTLY = "costly"
    """Its grammar became too costly to match: a limit on states or items was reached."""
    DEAD_END = "dead_end"
    """Its grammar allows no continuation of its output. The same request would fail again."""
    SLOW = "slow"
    """Its grammar used up its budget of CPU time per token."""


class RowResult(msgspec.Struct, array_like=True, gc=False):
    """The result of a step for one row."""

    row: int
    epoch: int
    num_computed: int
    """The number of confirmed KV positions: the row's KV is valid in ``[0, num_computed)``, and its recurrent states at
    positions up to ``num_computed`` are in the slots that plans named for them."""
    token_ids: list[int]
    """The accepted tokens: none for a pooled row, a chunk that does not end the history, or a row whose grammar mask is
    late; otherwise 1 to ``max_tokens``."""
    logprobs: TokenLogprobs | None = None
    vector: bytes | None = None
    """The vector of a pooled row whose history is computed: ``hidden_size`` float32 numbers in the machine's byte
    order."""
    num_drafted: int = 0
    """The number of drafts that were computed for it; ``len(token_ids) - 1`` of them were accepted."""
    is_predicted: bool = False
    """Whether these drafts came from the row's prediction."""
    failure: str = ""
    """Why its output cannot continue, as a message for the caller. Its tokens so far remain valid, and it is not
    continued."""
    failure_kind: RowFailure = RowFailure.COSTLY
    """The kind of failure, if there is one."""


class PromptLogprobsPart(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of ``history[start : start + len(logprobs.chosen)]``, which is all prompt; ``start`` >= 1."""

    row: int
    epoch: int
    start: int
    logprobs: TokenLogprobs


class StepResult(msgspec.Struct, array_like=True, gc=False):
    """The result of one plan; results come in the order of the plans. Times are by the worker's monotonic clock."""

    step: int
    rows: list[RowResult]
    prompt_logprobs: list[PromptLogprobsPart]
    waited_us: int
    """How long the worker was idle before this plan arrived; 0 if the plan was there already."""
    computed_us: int
    """How long the step took; 0 if all of its rows waited for masks, and nothing was computed."""


def num_row_numbers(max_num_seqs: int) -> int:
    """Returns how many row numbers there are: a dropped row's stays unused until the result of its last plan."""
    return 2 * max_num_seqs
