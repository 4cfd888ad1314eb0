"""How a worker is started: its settings, and the facts that it reports. Plain data, without tensors and sockets."""

from enum import Enum

import msgspec

from penstock.kv.block_groups import BlockGroups


class DraftMethod(Enum):
    """The source of drafts."""

    AUTO = "auto"
    """The drafts of ``NGRAM``, only for rows whose text repeats itself."""
    NGRAM = "ngram"
    """The tokens that followed the same tokens earlier in the row."""
    SUFFIX = "suffix"
    """The tokens that most often followed the longest matching suffix, in the row or in recent outputs of its
    tenant."""
    DRAFT_MODEL = "draft_model"
    """A small model with the same tokenizer."""
    EAGLE3 = "eagle3"
    """A head on the model's own hidden states."""
    MTP = "mtp"
    """The head for multi-token prediction in the model's own checkpoint."""


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

MAX_LORA_RANK = 256
"""The limit of ``max_lora_rank``."""

MAX_BATCHED_TOKENS = 2048
"""The maximum number of tokens in a step, unless the operator sets a higher one."""


class Meeting(msgspec.Struct, frozen=True):
    """How the ranks of a model find each other: in a directory if all run on one host, else by TCP at rank 0."""

    directory: str = ""
    """A directory that only the service's user can enter, for sockets and files of the ranks; empty: by TCP."""
    host: str = ""
    """The host of rank 0, as this rank reaches it."""
    store_port: int = 0
    """The port of the TCPStore of torch.distributed; 0 where ranks do not share matrices."""
    store_descriptor: int = -1
    """The socket that listens at ``store_port``, in rank 0's process only."""
    stage_port: int = 0
    """The port at which rank 0 accepts the others; 0 with one stage."""
    stage_descriptor: int = -1
    """The socket that listens at ``stage_port``, in rank 0's process only."""
    secret: bytes = b""
    """What a rank of a model in stages shows to rank 0 to be accepted."""
    interface: str = ""
    """The network interface of collectives; empty: loopback with a directory, else the one that routes to ``host``."""


class MeetingPorts(msgspec.Struct, frozen=True):
    """The ports at which rank 0 waits for the others, if they meet by TCP. See ``Meeting``."""

    store_port: int = 0
    stage_port: int = 0


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
    """Whether each of those threads is pinned to a core: on, off, or auto, if the worker has cores of its own. The next
    two follow from it."""
    thread_cpus: tuple[tuple[int, ...], ...] = ()
    """For each thread, the logical CPUs on which it may run; empty: the system moves threads freely."""
    thread_nodes: tuple[int, ...] = ()
    """The NUMA node of each thread, in ascending order; empty: memory is not placed."""
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
    """auto, int8, fp8, or the type of the activations, which auto is too unless the CPU backend quantises weights at
    load."""
    deterministic: bool = False
    """On a GPU, a row's results are bitwise the same in every batch, at the cost of speed. On the backend cpu they
    always are."""
    attention_backend: str = "triton"
    """On a GPU, what computes attention: triton, for the project's kernels, or a library: flashinfer or fa."""
    log_level: str = "info"
    """The worker's log level: debug, info, warning or error."""
    log_format: str = "text"
    """text or json, one line per message."""
    max_loras: int = 0
    """The number of slots for LoRA adapters; 0: none can be used."""
    max_lora_rank: int = 16
    """The largest rank of an adapter."""
    speculation: SpeculationConfig | None = None
    """None: only tokens that grammars force or callers predict are drafted."""
    frees_windows: bool = False
    """Whether plans name blocks for each group of layers, so that layers with a window keep only what they read."""
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
    """The number of ranks that share each matrix, each a worker of its own. ``num_threads`` and ``max_memory_bytes``
    are totals for all ranks of a host until each one receives its part."""
    tensor_parallel_rank: int = 0
    """This worker's part of the matrices. Without stages, all ranks get every plan; only rank 0 returns results."""
    pipeline_parallel_size: int = 1
    """The number of stages, each of which has a part of the layers. Rank r is the part r % ``tensor_parallel_size`` of
    the matrices in stage r // ``tensor_parallel_size``."""
    pipeline_parallel_rank: int = 0
    """This worker's stage. With several, only rank 0 gets plans, and has the embedding and the head."""
    stage_layers: tuple[int, ...] = ()
    """The number of layers of each stage; empty: as many as make all stages take the same time."""
    meeting: Meeting = Meeting()
    measures_steps: bool = True
    """Whether the worker computes some steps for ``measured_steps``; false for a worker that replaces another."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.pipeline_parallel_rank * self.tensor_parallel_size + self.tensor_parallel_rank

    @property
    def only_computes_layers(self) -> bool:
        """Whether this rank gets no plans, and computes layers for rank 0."""
        return self.pipeline_parallel_size > 1 and self.rank > 0

    @property
    def shares_plans(self) -> bool:
        """Whether several ranks run each plan. Their batches must be the same, so none may depend on a rank's clock."""
        return self.tensor_parallel_size > 1 and self.pipeline_parallel_size == 1

    @property
    def drafts_predictions(self) -> bool:
        """Whether it drafts from predictions. Ranks that share plans do not: each would choose by its own clock."""
        return self.uses_predictions and not self.shares_plans


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
    max_loras: int = 0
    """The number of slots for LoRA adapters, numbered from 1."""
    hidden_size: int = 1
    """The length of a row's vector."""
    tensor_parallel_size: int = 1
    """The number of ranks that share each matrix. Bytes and threads are those of each rank."""
    stage_layers: tuple[int, ...] = ()
    """The number of layers of each stage; empty: there are no stages. Bytes and threads are those of the first one."""
    num_host_blocks: int = 0
    """The number of slots of the host tier, numbered from 0."""
    num_state_slots: int = 0
    """The number of slots for recurrent states, numbered from 0; 0 for a model without recurrent layers."""
    state_bytes: int = 0
    """The bytes of a slot."""
    num_window_groups: int = 0
    """The number of groups of layers with a window, which have blocks of their own; 0: a block has all layers."""
    window: int = 1
    """The largest window of these layers, in tokens."""
    copy_us_per_block: float = 0.0
    """The approximate time to copy one block between the tiers, measured at the start."""
    measured_steps: tuple[MeasuredStep, ...] = ()
    """Steps that were computed at the start, so that times can be predicted from the first request on."""

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of stages."""
        return max(1, len(self.stage_layers))

    @property
    def groups(self) -> BlockGroups:
        """The groups of layers that have blocks of their own."""
        return BlockGroups(self.num_window_groups, self.window, self.block_size, self.max_num_batched_tokens)

    @property
    def num_kv_tokens(self) -> int:
        """The number of tokens that the KV cache holds, whatever the lengths of their sequences."""
        return self.num_blocks // (1 + self.num_window_groups) * self.block_size

    @property
    def longest_in_cache(self) -> int:
        """The number of tokens of the longest sequence that the KV cache holds."""
        return self.groups.longest(self.num_blocks)
