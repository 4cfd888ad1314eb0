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


class RowBlocks(msgspec.Struct, array_like=True, gc=False):
    """More blocks for a row, appended to its table."""

    row: int
    block_ids: list[int]


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
    """The number of confirmed KV positions: the row's KV is valid in ``[0, num_computed)``."""
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


class DraftMethod(Enum):
    """The source of drafts."""

    NGRAM = "ngram"
    """The tokens that followed the same tokens earlier in the row."""
    SUFFIX = "suffix"
    """The tokens that most often followed the longest matching suffix, in the row or in recent outputs of its
    tenant."""
    DRAFT_MODEL = "draft_model"
    """A small model with the same tokenizer."""
    EAGLE3 = "eagle3"
    """A head on the model's own hidden states."""


class SpeculationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker drafts: ``--speculative-config``, with vLLM's names."""

    method: DraftMethod
    num_speculative_tokens: int
    """The maximum number of drafts of a row in a step."""
    model: str | None = None
    """A directory in Hugging Face's layout; for ``draft_model`` and ``eagle3``."""
    prompt_lookup_max: int = 4
    """The maximum number of tokens that ``ngram`` looks up."""
    prompt_lookup_min: int = 2
    """The minimum number of tokens that ``ngram`` looks up."""
    suffix_decoding_max_tree_depth: int = 24
    """The maximum number of tokens of a suffix and its continuation, for ``suffix``."""
    suffix_decoding_max_cached_requests: int = 1000
    """The maximum number of outputs that ``suffix`` keeps per tenant."""
    suffix_decoding_max_spec_factor: float = 1.0
    """The maximum number of drafts per token of the suffix that ``suffix`` found."""
    suffix_decoding_min_token_prob: float = 0.1
    """The minimum share of cases in which a draft must have followed, for ``suffix``."""


MAX_FORCED_DRAFTS = 16
"""The maximum number of drafts of a row in a step where its grammar allows only one text, whatever else may be
drafted."""

MAX_PREDICTED_DRAFTS = 32
"""The maximum number of drafts of a row with a prediction in a step, whatever else may be drafted."""

MAX_BATCHED_TOKENS = 2048
"""The maximum number of tokens in a step, unless the operator sets a higher one."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """The settings of a worker. The same config gives the same facts after every restart, except for times."""

    model: str
    """A directory in Hugging Face's layout."""
    device: str = "cpu"
    dtype: str = "auto"
    """auto, float32, bfloat16, float16 or float64; auto is the checkpoint's."""
    backend: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    """None: the model's own context."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """None: the number that the backend computes in a short time, or ``MAX_BATCHED_TOKENS``."""
    kv_cache_bytes: int | None = None
    """None: ``memory_utilization`` of the device memory that is free after the weights are loaded."""
    num_blocks: int | None = None
    """The size of the KV cache in blocks; None: as many as the memory holds."""
    block_bytes_beside: int = 0
    """Bytes that others, such as a draft model, need for each block."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the model for which a step may need the hidden states before them."""
    memory_utilization: float = 0.5
    host_kv_cache_bytes: int = 0
    """Host memory for evicted blocks; 0: they are discarded."""
    num_threads: int = 1
    """The number of compute threads, on a CPU."""
    cpu_pinning: str = "auto"
    """Whether each of those threads is pinned to a core: on, off, or auto, if the worker has cores of its own."""
    max_memory_bytes: int | None = None
    """The maximum host memory that the worker may use in total, however much is free; None: all that is free."""
    tokenizer_vocab_size: int | None = None
    """Rows of the vocabulary from this one on are masked; None: the model's size."""
    tokenizer_num_ids: int | None = None
    """All ids of the tokenizer are below this number, which may exceed the model's rows; None:
    ``tokenizer_vocab_size``."""
    load_format: str = "auto"
    """auto: safetensors; dummy: random weights from the config alone, for benchmarks."""
    quantization: str = "none"
    """none: as in the checkpoint; int8, int4 or fp8: quantized at load from a float checkpoint; gptq, awq,
    compressed-tensors, mxfp4 or modelopt: the checkpoint must have this format, which it may also have with fp8."""
    kv_cache_dtype: str = "auto"
    """auto, int8 or fp8; auto is the type of the activations."""
    deterministic: bool = False
    """On a GPU, a row's results are bitwise the same in every batch, at the cost of speed. On the backend cpu they
    always are."""
    log_level: str = "info"
    """The worker's log level: debug, info, warning or error."""
    log_format: str = "text"
    """text or json, one line per message."""
    speculation: SpeculationConfig | None = None
    """None: only tokens that grammars force or callers predict are drafted."""
    uses_predictions: bool = True
    """Whether rows may have drafts from their predictions."""
    tokenizer: str | None = None
    """The directory of the model's tokenizer, which grammars need; None: no grammars."""
    special_tokens: tuple[str, ...] = ()
    """The tokenizer's special tokens, as the service knows them. They are not text, so a grammar's text cannot match
    them."""
    added_tokens: tuple[tuple[int, str], ...] = ()
    """Ids and contents of the tokenizer's tokens that tokenizer.json lacks."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens, which may follow once a grammar's text is complete."""
    tensor_parallel_size: int = 1
    """The number of ranks that share the model, each a worker of its own. ``num_threads`` and ``max_memory_bytes`` are
    totals for all of them until each rank receives its part."""
    tensor_parallel_rank: int = 0
    """This worker's rank. All ranks get every plan; only rank 0 returns results."""
    rendezvous: str = ""
    """The meeting point of the ranks: the path of a file that does not exist yet, in a directory that only they use."""
    measures_steps: bool = True
    """Whether the worker computes some steps for ``measured_steps``; false for a worker that replaces another."""

    @property
    def drafts_predictions(self) -> bool:
        """Whether it drafts from predictions. Tensor parallel ranks do not: each would choose by its own clock."""
        return self.uses_predictions and self.tensor_parallel_size == 1


class MeasuredStep(msgspec.Struct, array_like=True, frozen=True):
    """The time of a step with one chunk of a history, several equal chunks, or decoding rows of two tokens."""

    start: int
    end: int
    """The end of the chunk; 0: there was none."""
    decodes: int
    computed_us: int
    chunks: int = 1
    """The number of histories with such a chunk."""


class WorkerFacts(msgspec.Struct, frozen=True):
    """The properties of a started worker, which it reports to the service."""

    num_blocks: int
    block_size: int
    vocab_size: int
    """Rows of the logits."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    architecture: str
    backend: str
    device: str
    dtype: str
    kv_cache_dtype: str
    """The type of keys and values."""
    weight_bytes: int
    kv_bytes: int
    quantization: str = "none"
    """The format of the weights: none, int8, int4, fp8, gptq, awq, compressed-tensors, mxfp4, modelopt or gguf."""
    instruction_set: str = ""
    """The CPU instruction set of the kernels; empty where the backend does not choose one."""
    num_threads: int = 0
    """The number of compute threads, on a CPU; 0 on a GPU."""
    hidden_size: int = 1
    """The length of a row's vector."""
    tensor_parallel_size: int = 1
    """The number of ranks that share the model. Bytes and threads are those of each rank."""
    num_host_blocks: int = 0
    """The number of slots of the host tier, numbered from 0."""
    copy_us_per_block: float = 0.0
    """The approximate time to copy one block between the tiers, measured at the start."""
    measured_steps: tuple[MeasuredStep, ...] = ()
    """Steps that were computed at the start, so that times can be predicted from the first request on."""


def num_row_numbers(max_num_seqs: int) -> int:
    """Returns how many row numbers there are: a dropped row's stays unused until the result of its last plan."""
    return 2 * max_num_seqs
