"""Finds the family that a config.json names. A new family is a function with an entry in the ``FAMILIES`` below it; if
the names of its tensors are not Llama's, they are in ``tensor_layouts``."""

import difflib
from collections.abc import Mapping
from typing import Any

from penstock.models.architecture import experts, gemma, latent, layer_norm, llama
from penstock.models.architecture.decoder import Family, read_layer_types
from penstock.models.architecture.foreign import foreign_spec
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope_config import CHUNKED, FULL, SLIDING
from penstock.models.architecture.spec import ModelSpec

FAMILIES: dict[str, Family] = dict(
    sorted(
        {
            **experts.FAMILIES,
            **gemma.FAMILIES,
            **latent.FAMILIES,
            **layer_norm.FAMILIES,
            **llama.FAMILIES,
        }.items()
    )
)
"""The function that reads the config of each architecture."""

WRAPPERS = (
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Models that see images: a language model, of which only text is served, and parts that are not loaded."""

FOREIGN_WRAPPERS = ("Gemma3nForConditionalGeneration",)
"""Models that see images, around a language model without a family here. The backend ``transformers`` runs it."""

TEXT_MODELS = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""The architecture of a wrapper's language model, by its ``model_type``."""

_WITH_IMAGES = "ForConditionalGeneration"
_TEXT_ONLY = {"Gemma3TextForSequenceClassification": "Gemma3ForCausalLM"}
CLASSIFIER = "ForSequenceClassification"
"""The ending of the name of a decoder with a classification head in place of the output head."""

FIXED = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Fields with which a language model is the same as one of its own, by its ``model_type``."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the language model: of a wrapper, its ``text_config``, with what stands only outside of it;
    else the config itself. Raises ModelError."""
    fields = HfConfigReader(config)
    wrapper = next((name for name in fields.texts("architectures") if _is_wrapper(name)), None)
    if wrapper is None:
        return config
    # Older checkpoints have the language model's fields beside those of the vision tower.
    has_part = "text_config" in fields
    holder = fields.part("text_config") if has_part else fields
    model_type = holder.text("model_type")
    if model_type not in TEXT_MODELS:
        raise holder.wrong("model_type", f"names no supported language model of a {wrapper}")
    outside = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
    return {
        **(config["text_config"] if has_part else config),
        **{name: config[name] for name in outside if name in config},
        **FIXED.get(model_type, {}),
        "architectures": [TEXT_MODELS[model_type]],
    }


def find_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the decoder that a config.json describes: ``spec_from_config``, or a ``ForeignSpec`` if it has no family.
    Raises ModelError, naming the field.
    """
    foreign = None if _architecture(HfConfigReader(config)) in FAMILIES else foreign_spec(config)
    return foreign or spec_from_config(config)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Returns the decoder of a family that a config.json describes. Raises ModelError, naming the field, also for
    unsupported models.
    """
    fields = HfConfigReader(config)
    architecture = _architecture(fields)
    if architecture is None:
        raise fields.wrong(
            "architectures",
            f"names no supported architecture; the closest is {nearest(config)}, and penstock models lists all of them",
        )
    return FAMILIES[architecture](fields, architecture)


def nearest(config: Mapping[str, Any]) -> str:
    """Returns the architecture with the most similar name."""
    given = HfConfigReader(config).texts("architectures")
    name = given[0][:100] if given else ""  # A file's name may be long, and the comparison takes time.
    return difflib.get_close_matches(name, [*FAMILIES, *WRAPPERS], n=1, cutoff=0.0)[0]


def has_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a decoder with a classification head. Raises ModelError."""
    names = HfConfigReader(config).texts("architectures")
    served = next((name for name in names if _is_wrapper(name) or _family(name) is not None), "")
    return served.endswith(CLASSIFIER)


def _is_wrapper(name: str) -> bool:
    generator = f"{name.removesuffix(CLASSIFIER)}{_WITH_IMAGES}" if name.endswith(CLASSIFIER) else name
    return generator in WRAPPERS or name in FOREIGN_WRAPPERS


def _architecture(fields: HfConfigReader) -> str | None:
    return next((family for name in fields.texts("architectures") if (family := _family(name)) is not None), None)


def _family(name: str) -> str | None:
    """Returns the family of an architecture: itself, or the same decoder with an output head. A base model has no head,
    such as an embedding model."""
    if name in FAMILIES:
        return name
    base = next((name.removesuffix(ending) for ending in ("Model", CLASSIFIER) if name.endswith(ending)), None)
    named = () if base is None else (base + ending for ending in ("ForCausalLM", "LMHeadModel"))
    return next((other for other in (*named, _TEXT_ONLY.get(name)) if other in FAMILIES), None)


def ignored_layer_types(config: Mapping[str, Any], spec: ModelSpec) -> str | None:
    """A warning if ``layer_types`` contradicts what the family computes, which then ignores it; else None."""
    if spec.has_state:  # the family has read it
        return None
    windowed = CHUNKED if spec.chunked_windows else SLIDING
    kinds = read_layer_types(HfConfigReader(config), windowed)
    if kinds is None or kinds == [FULL if window is None else windowed for window in spec.windows]:
        return None
    computed = "full attention" if spec.windows[0] is None else f"a window of {spec.windows[0]}"
    return (
        f"layer_types is ignored: every layer of a {spec.architecture} has {computed} here and in transformers; "
        "remove the field, or correct architectures"
    )
