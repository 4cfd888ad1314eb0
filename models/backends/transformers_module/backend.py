"""Runs a module of transformers: any decoder whose attention can be replaced, slower than our own implementations."""

import logging
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.registry import nearest
from penstock.models.backends.base import context_of, shared_facts
from penstock.models.backends.memory import allocated, check_weights_fit, num_kv_blocks
from penstock.models.backends.torch_common.device import choose_dtype
from penstock.models.backends.torch_common.host_pages import HostPages, take_host_pages
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.backends.torch_common.paged_backend import PagedBackend
from penstock.models.backends.transformers_module.attention import ModuleAttention
from penstock.models.batch.batch import Batch
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import MAX_BATCHED_TOKENS, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

LANGUAGE_MODEL = {r"^model\.language_model\.": "model."}
"""Renames the language model's tensors in the checkpoint of a model that also sees images."""
ORDINARY = {"full_attention", "sliding_attention", None}
"""Kinds of layers whose KV cache is ours."""


class TransformersBackend(PagedBackend):
    """A ``Backend`` of a module's own layers, whose attention reads our pages."""

    def __init__(
        self,
        module: Any,
        attention: ModuleAttention,
        pages: KVPages,
        host_pages: HostPages,
        facts: WorkerFacts,
        num_threads: int,
        num_logits: int,
    ) -> None:
        super().__init__(pages, host_pages, facts.vocab_size)
        self.facts = facts
        self._layers = module.base_model
        self._head = _Head(module)
        self._attention = attention
        self._num_threads = num_threads
        self._num_logits = num_logits

    def forward(self, batch: Batch, features: list[Tensor]) -> Tensor:
        """Runs the module's layers. Features are not recorded: no drafter of this backend needs any."""
        torch.set_num_threads(self._num_threads)
        # Ids were checked at admission, but an id out of range must never become an address.
        token_ids = torch.from_numpy(batch.token_ids).to(self._device).clamp(0, self._vocab_size - 1)
        positions = torch.from_numpy(batch.positions).to(self._device)
        self._attention.begin(batch, torch.from_numpy(batch.slots).to(self._device))
        result = self._layers(input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
        hidden: Tensor = result.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def check_layers(self, num_layers: int) -> None:
        """Runs one token. Raises ModelError unless every layer's attention is ours."""
        self._attention.probe()
        start = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        self._layers(input_ids=start, position_ids=start, use_cache=False)
        self._pages.reset_blocks([self._pages.num_blocks])
        if self._attention.layers != set(range(num_layers)):
            raise ModelError(
                f"{type(self._layers).__name__}: {len(self._attention.layers)} of its {num_layers} layers have "
                "ordinary attention: it is not supported"
            )

    def logits(self, hidden: Tensor) -> Tensor:
        return upcast(self._head(hidden)[:, : self._num_logits])


class _Head:
    """What a module computes of its last hidden states: the output matrix, factors and caps."""

    def __init__(self, module: Any) -> None:
        """Takes the layers out of the module."""
        self._module = module
        self._states = _HiddenStates()
        setattr(module, module.base_model_prefix, self._states)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(N, hidden) -> (N, vocabulary)."""
        self._states.last_hidden_state = hidden.unsqueeze(0)
        # Some modules look at the shape of the ids.
        token_ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._module(input_ids=token_ids).logits[0]
        return logits


class _HiddenStates(torch.nn.Module):
    """Replaces a module's layers: returns the hidden states that it was given."""

    last_hidden_state: Tensor

    @property
    def decoder(self) -> "_HiddenStates":
        """OPT's layers are in an attribute of this name."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        # The output of the most kinds of layers: what is absent is None.
        output: Any = MoeModelOutputWithPast(last_hidden_state=self.last_hidden_state)
        output.cross_attentions = None  # which GPT-2 passes on
        output.shared_kv_states = None  # which Gemma 4 passes on
        return output


def unsupported_reason(config: WorkerConfig, info: CheckpointInfo) -> str | None:
    """Returns why this backend cannot run the model with this config, with the remedy; None if it can."""
    if config.tensor_parallel_size > 1:
        return (
            f"--tensor-parallel-size is {config.tensor_parallel_size}, and this backend has one process: leave it out"
        )
    if info.path.is_file():
        return "the model is a GGUF file, which this backend does not read: use the safetensors version"
    if info.config.get("quantization_config"):
        return "the checkpoint is quantised, which this backend does not support: use the unquantised one"
    if config.feature_layers:
        return "draft heads are not supported here: leave --speculative-config out, or choose another method"
    if info.spec.latent is not None:
        return "this backend does not cache latents: leave --backend out, or give --backend reference"
    if info.spec.left_out_layers:
        return "text skips some of the model's layers, and this backend runs all of them: leave --backend out"
    return None


def load(config: WorkerConfig, info: CheckpointInfo) -> TransformersBackend:
    """The factory for the backend registry; ``unsupported_reason`` must be None. Raises ModelError."""
    spec = info.spec
    dtype_name, dtype, device = choose_dtype(config, info)
    flags = {
        f"--quantization {config.quantization}": config.quantization not in ("auto", "none"),
        f"--kv-cache-dtype {config.kv_cache_dtype}": config.kv_cache_dtype not in ("auto", dtype_name),
        f"--load-format {config.load_format}": config.load_format != "auto",
    }
    for flag, is_set in flags.items():
        if is_set:
            raise ModelError(f"{flag}: is not for the transformers backend, which is in use: leave it out")
    max_model_len = context_of(config, spec)
    num_logits = min(config.tokenizer_vocab_size or spec.vocab_size, spec.vocab_size)
    check_weights_fit(config, spec.architecture, spec.num_parameters * dtype.itemsize, dtype_name)
    module_config = _find_config(info)
    block_bytes = spec.kv_bytes_per_token(dtype.itemsize) * config.block_size
    module = _load_module(info, module_config, dtype, device)
    weight_bytes = sum(parameter.nbytes for parameter in module.parameters())
    num_blocks = num_kv_blocks(config, block_bytes, max_model_len, num_spare=1)
    with allocated(num_blocks, device):
        pages = KVPages(spec, num_blocks, config.block_size, dtype, device)
    attention = ModuleAttention(pages, spec.kv_sources)
    module.set_attn_implementation(attention.name)
    host_pages = take_host_pages(config, pages.by_block, block_bytes, pages.num_bytes)
    facts = WorkerFacts(
        **shared_facts(config, info, num_blocks, default_budget=MAX_BATCHED_TOKENS),
        backend="transformers",
        dtype=dtype_name,
        kv_cache_dtype=dtype_name,
        quantization="none",
        kv_bytes=pages.num_bytes,
        weight_bytes=weight_bytes,
        num_host_blocks=host_pages.num_slots,
        copy_us_per_block=host_pages.measure_copy_us(),
        num_threads=config.num_threads if device.type == "cpu" else 0,
    )
    logger.warning(
        "SLOW: %s runs as a module of transformers, with this service's paged attention: penstock models lists the "
        "architectures that run faster",
        spec.architecture,
    )
    backend = TransformersBackend(module, attention, pages, host_pages, facts, config.num_threads, num_logits)
    backend.check_layers(spec.num_layers)
    return backend


def _find_config(info: CheckpointInfo) -> Any:
    """Returns transformers' config of a decoder with ordinary attention. Raises ModelError."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    name = info.spec.architecture
    if name not in KNOWN.values():
        raise ModelError(
            f"{info.path / 'config.json'}: architectures names {name}, which transformers does not have; the closest "
            f"is {nearest(info.config)}, and penstock models lists all of them"
        )
    kind = getattr(transformers, name)
    try:
        config = kind.config_class.from_pretrained(info.path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{info.path / 'config.json'}: transformers refuses it ({_one_line(error)})") from error
    unusual = set(getattr(config, "layer_types", None) or ()) - ORDINARY
    if unusual or kind._is_stateful or not kind._supports_attention_backend:  # noqa: SLF001
        what = f"layers of the kind {min(unusual)}" if unusual else "attention, or a state, of its own"
        raise ModelError(f"{name}: has {what}, which our KV cache does not hold: it is not supported")
    return config


def _load_module(info: CheckpointInfo, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, info.spec.architecture)
    if info.classifier is not None:  # there is no output head; tied, none is missing
        config.tie_word_embeddings = True
    try:
        module, loading = kind.from_pretrained(
            info.path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            key_mapping=LANGUAGE_MODEL,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"{info.path}: transformers cannot load it ({_one_line(error)})") from error
    # transformers would initialise these at random.
    if loading["missing_keys"]:
        raise ModelError(f"{info.path}: has no tensor {min(loading['missing_keys'])}: copy the checkpoint again")
    return module.to(device).eval().requires_grad_(False)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
