"""The contract between the scheduler and a worker: plain data, in the order in which it crosses.

A plan holds differences only. Between plans the worker's row state is the authority on where a row stands: a decoding
row is told to continue, and the result says what came of it. Nothing here knows tensors, sockets or gRPC.
"""

from enum import Enum

import msgspec


class Pooling(Enum):
    """Which hidden states after the model's last norm a row's vector is the mean of."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"

    def positions(self, num_tokens: int) -> range:
        """Those of a row of so many tokens."""
        if self is Pooling.MEAN:
            return range(num_tokens)
        return range(1) if self is Pooling.CLS else range(num_tokens - 1, num_tokens)

    @property
    def reads_cache(self) -> bool:
        """Whether a row may begin after a cached prefix, which has keys and values but no hidden states."""
        return self is Pooling.LAST


class SamplingParams(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a row's tokens are chosen; every id is below the tokenizer's vocabulary size, every bound already checked.

    Filters apply in this order: penalties, ``logit_bias`` and masks, temperature, top_k, top_p, min_p. Then the token
    is the argmax of logits plus Gumbel noise keyed by (seed, position, token id), position being the index that the
    token will have in the row's history; at temperature 0 it is the argmax alone, lowest id first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Unsigned 64 bits; choices of one request have different ones."""
    min_tokens: int = 0
    """No id of ``stop_token_ids`` is chosen before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Sorted; the model's end-of-sequence tokens included unless they are ignored."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is masked where the history ends with the others."""
    logprobs: int | None = None
    """None: none; k: of the chosen token and the k most likely ones, from the model's own logits."""
    prompt_logprobs: int | None = None


class AddedRow(msgspec.Struct, array_like=True, gc=False):
    """A row begins (or begins again, after preemption): everything the worker must know about it."""

    row: int
    """0 to ``num_row_numbers(max_num_seqs)`` - 1; used again only after the newest plan that names it is answered."""
    epoch: int
    """Which life of the row this is; results bear it."""
    token_ids: list[int]
    """The whole history: prompt and what was output before a preemption."""
    num_prompt_tokens: int
    num_computed: int
    """KV of ``token_ids[:num_computed]`` already lies in ``block_ids``, from the prefix cache."""
    block_ids: list[int]
    sampling: SamplingParams
    pooling: Pooling | None = None
    """Nothing is sampled: once the history is computed, the row's vector is its only result."""
    max_drafts: int = 0
    """Tokens that may be drafted for it in a step; 0: none."""
    grammar: str = ""
    """What its output, so far and from here on, must match, as llguidance writes grammars; empty: anything."""
    tenant: str = ""
    """Whose outputs drafts for it may be learned from, and who may learn from its own."""


class RowBlocks(msgspec.Struct, array_like=True, gc=False):
    """More blocks for a row, appended to its table."""

    row: int
    block_ids: list[int]


class Chunk(msgspec.Struct, array_like=True, gc=False):
    """Compute ``history[start:end]`` of a row. Where ``end`` is the length of the history, samples the next token, or
    tells the vector of a row that is pooled."""

    row: int
    start: int
    end: int


class Decode(msgspec.Struct, array_like=True, gc=False):
    """Continue a row from where it stands: one token, or up to ``max_tokens`` where drafts are accepted: it has blocks
    for them."""

    row: int
    max_tokens: int


class StepPlan(msgspec.Struct, array_like=True, gc=False):
    """One step. The worker copies out, applies the lists in the order of the fields, copies in, and computes chunks and
    decodes as one batch.

    A block of a dropped row may be given out again in the same plan: plans run in order, so earlier writes came first.
    Order is the fence for copies as well: what is copied out was written by an earlier plan, and what is copied in was
    copied out by an earlier plan or by this one. In each list of copies no block and no slot comes twice.
    """

    step: int
    dropped: list[int]
    added: list[AddedRow]
    blocks: list[RowBlocks]
    chunks: list[Chunk]
    decodes: list[Decode]
    copies_out: list[tuple[int, int]] = []
    """Block and slot of the host tier: blocks that were evicted, and that a row of this plan has now."""
    copies_in: list[tuple[int, int]] = []
    """Slot of the host tier and block: blocks whose KV counts as computed in a row that this plan adds."""
    max_drafts: int = 0
    """Drafts of all its decodes together, which the step has room for."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be computed (rows may still be dropped)."""
        return not self.chunks and not self.decodes


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Flat arrays: entry t of ``chosen`` and entries t*k to (t+1)*k of the ``top`` arrays are the t-th token's. Natural
    logarithms, from the model's own logits over the tokenizer's vocabulary."""

    num_top: int
    chosen: list[float]
    top_token_ids: list[int]
    top: list[float]


class RowFailure(Enum):
    """Why a row with a grammar cannot go on."""

    COSTLY = "costly"
    """Its grammar became too costly to follow: a limit on states or items was reached."""
    DEAD_END = "dead_end"
    """Nothing can follow its output by its grammar: the same request would fail again."""
    SLOW = "slow"
    """Its grammar used up its budget of CPU time per token."""


class RowResult(msgspec.Struct, array_like=True, gc=False):
    """What a step made of one row."""

    row: int
    epoch: int
    num_computed: int
    """Confirmed KV positions now: the row's KV is valid in ``[0, num_computed)``."""
    token_ids: list[int]
    """Accepted tokens: none for a chunk that does not end the history or is pooled, nor of a row that has a grammar and
    whose mask is late; else 1 to ``max_tokens``."""
    logprobs: TokenLogprobs | None = None
    vector: bytes | None = None
    """Of a pooled row whose history is computed: ``hidden_size`` float32 numbers in the machine's byte order."""
    num_drafted: int = 0
    """Drafts that were computed with it; ``len(token_ids) - 1`` of them were accepted."""
    failure: str = ""
    """Why its output cannot go on, in words for the caller. Its tokens so far remain valid, and it is not continued."""
    failure_kind: RowFailure = RowFailure.COSTLY
    """What kind of failure that is, if there is one."""


class PromptLogprobsPart(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of ``history[start : start + len(logprobs.chosen)]``, all of it prompt; ``start`` >= 1."""

    row: int
    epoch: int
    start: int
    logprobs: TokenLogprobs


class StepResult(msgspec.Struct, array_like=True, gc=False):
    """The answer to one plan; answers come in the order of the plans. Times by the worker's monotonic clock."""

    step: int
    rows: list[RowResult]
    prompt_logprobs: list[PromptLogprobsPart]
    waited_us: int
    """How long the worker had nothing to do before this plan reached it; 0 if the plan was there already."""
    computed_us: int
    """How long the step took; 0 if all of its rows waited for masks, and nothing was computed."""


class DraftMethod(Enum):
    """Where drafts come from."""

    NGRAM = "ngram"
    """What followed the same tokens earlier in the row."""
    SUFFIX = "suffix"
    """What followed the longest such suffix, in the row or in late outputs of its tenant, as often as it did."""
    DRAFT_MODEL = "draft_model"
    """A small model with the same tokenizer."""
    EAGLE3 = "eagle3"
    """A head on the model's own hidden states."""


class SpeculationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker drafts: ``--speculative-config``, by the names that vLLM has for it."""

    method: DraftMethod
    num_speculative_tokens: int
    """Drafts of a row in a step, at most."""
    model: str | None = None
    """Of ``draft_model`` and ``eagle3``: a directory in Hugging Face's layout."""
    prompt_lookup_max: int = 4
    """Of ``ngram``: the most tokens that are looked up."""
    prompt_lookup_min: int = 2
    """The fewest."""
    suffix_decoding_max_tree_depth: int = 24
    """Of ``suffix``: tokens of a suffix and what follows it, at most."""
    suffix_decoding_max_cached_requests: int = 1000
    """Outputs of a tenant that are remembered, at most."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts for each token of the suffix that was found, at most."""
    suffix_decoding_min_token_prob: float = 0.1
    """How often a draft must have followed, as a share."""


MAX_FORCED_DRAFTS = 16
"""Of a row in a step, where its grammar leaves one text alone; whatever else may be drafted."""

MAX_BATCHED_TOKENS = 2048
"""Tokens in a step at most, unless more are asked for."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker needs to start. The same config gives the same facts after every restart, but for times."""

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
    """None: what the backend computes in a short time, or ``MAX_BATCHED_TOKENS``."""
    kv_cache_bytes: int | None = None
    """None: ``memory_utilization`` of what the device has free after the weights are loaded."""
    num_blocks: int | None = None
    """Of the KV cache; None: as many as the memory holds."""
    block_bytes_beside: int = 0
    """What others, as a draft model, need for each block."""
    feature_layers: tuple[int, ...] = ()
    """Before which of its layers the model's hidden states may be wanted of a step."""
    memory_utilization: float = 0.5
    host_kv_cache_bytes: int = 0
    """Of host memory, for evicted blocks; 0: these are forgotten."""
    num_threads: int = 1
    """That compute, on a CPU."""
    cpu_pinning: str = "auto"
    """Whether each of those threads stays on a core: on, off, or auto, where the worker has cores of its own."""
    max_memory_bytes: int | None = None
    """Of the host: what the worker may take, all together, whatever else seems free; None: all that is free."""
    tokenizer_vocab_size: int | None = None
    """Rows of the vocabulary from here on are masked; None: the model's."""
    tokenizer_num_ids: int | None = None
    """All ids of the tokenizer lie below it, which may have more than the model has rows; None:
    ``tokenizer_vocab_size``."""
    load_format: str = "auto"
    """auto: safetensors; dummy: random weights from the config alone, for benchmarks."""
    quantization: str = "none"
    """none: as the checkpoint is; int8, int4 or fp8: made at load from a float checkpoint; gptq, awq or
    compressed-tensors: the checkpoint must be so, as it may be with fp8."""
    kv_cache_dtype: str = "auto"
    """auto, int8 or fp8; auto is the type of the activations."""
    deterministic: bool = False
    """On a GPU, a row's results are the same bits in every batch, which costs speed; on the backend cpu they always
    are."""
    log_level: str = "info"
    """What the worker logs: debug, info, warning or error."""
    log_format: str = "text"
    """text or json, a line each."""
    speculation: SpeculationConfig | None = None
    """None: only what grammars force is drafted."""
    tokenizer: str | None = None
    """The directory of the model's tokenizer, which grammars are matched by; None: there are none."""
    special_tokens: tuple[str, ...] = ()
    """Of the tokenizer, as the service knows them: no text, and so nothing that a grammar's text can match."""
    added_tokens: tuple[tuple[int, str], ...] = ()
    """Ids and contents of the tokenizer's tokens that tokenizer.json lacks."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens: what may come when a grammar's text is whole."""
    tensor_parallel_size: int = 1
    """Ranks that share the model, each a worker of its own. ``num_threads`` and ``max_memory_bytes`` are then those of
    all of them together, until each rank is told its own part."""
    tensor_parallel_rank: int = 0
    """Which of them this worker is. All get every plan; only the results of rank 0 are told."""
    rendezvous: str = ""
    """Where they meet: the path of a file that does not exist yet, in a directory of theirs alone."""
    measures_steps: bool = True
    """Whether some steps are computed for ``measured_steps``: not for a worker that replaces another."""


class MeasuredStep(msgspec.Struct, array_like=True, frozen=True):
    """What a step took: of one chunk of a history or several alike, or of rows of two tokens that are continued."""

    start: int
    end: int
    """Of the chunk; 0: there was none."""
    decodes: int
    computed_us: int
    chunks: int = 1
    """Histories with such a chunk each."""


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a started worker tells the service."""

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
    """Of the weights: none, int8, int4, fp8, gptq, awq or compressed-tensors."""
    instruction_set: str = ""
    """Of the CPU that the kernels are for; empty where that is not the backend's to choose."""
    num_threads: int = 0
    """That compute, on a CPU; 0 on a GPU."""
    hidden_size: int = 1
    """Numbers in a row's vector."""
    tensor_parallel_size: int = 1
    """Ranks that share the model; bytes and threads are those of each."""
    num_host_blocks: int = 0
    """Slots of the host tier, numbered from 0."""
    copy_us_per_block: float = 0.0
    """About what copying one block between the tiers takes, as measured at the start."""
    measured_steps: tuple[MeasuredStep, ...] = ()
    """Some steps that were computed at the start, so that times can be predicted from the first request on."""


def num_row_numbers(max_num_seqs: int) -> int:
    """Row numbers are below this: as many spare ones as rows that run, since a dropped row's number rests until the
    newest plan that names it is answered."""
    return 2 * max_num_seqs
