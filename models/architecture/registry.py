"""Finds the family that a config.json names. A new family is a function and an entry in ``FAMILIES``; if the names of
its tensors are not Llama's, they are in ``tensor_layouts``."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from penstock.models.architecture.decoder import read_layer_types
from penstock.models.architecture.experts import (
    dots1,
    glm4_moe,
    gpt_oss,
    granite_moe,
    llama4,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from penstock.models.architecture.foreign import foreign_spec
from penstock.models.architecture.gemma import gemma, gemma2, gemma3, gemma4, gemma4_unified
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.layer_norm import (
    cohere,
    cohere2,
    falcon,
    gpt2,
    gpt_neox,
    nemotron,
    olmo,
    opt,
    phi,
    stablelm,
    starcoder2,
)
from penstock.models.architecture.llama import (
    arcee,
    ernie,
    exaone,
    exaone4,
    glm,
    glm4,
    granite,
    hunyuan,
    internlm2,
    internlm3,
    llama,
    ministral3,
    mistral,
    mllama,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
)
from penstock.models.architecture.rope_config import CHUNKED, FULL, SLIDING
from penstock.models.architecture.spec import ModelSpec

FAMILIES: dict[str, Callable[[HfConfigReader, str], ModelSpec]] = {
    "ArceeForCausalLM": arcee,
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "Dots1ForCausalLM": dots1,
    "Ernie4_5ForCausalLM": ernie,
    "Exaone4ForCausalLM": exaone4,
    "ExaoneForCausalLM": exaone,
    "FalconForCausalLM": falcon,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4_unified,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "InternLM2ForCausalLM": internlm2,
    "InternLM3ForCausalLM": internlm3,
    "Llama4ForCausalLM": llama4,
    "LlamaForCausalLM": llama,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Ministral3ForCausalLM": ministral3,
    "MinistralForCausalLM": mistral,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "MllamaForCausalLM": mllama,
    "NemotronForCausalLM": nemotron,
    "OPTForCausalLM": opt,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoForCausalLM": olmo,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "PhiForCausalLM": phi,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
}

WRAPPERS = (
    "Cohere2VisionForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
"""Models that see images: a language model, of which only text is served, and parts that are not loaded."""

FOREIGN_WRAPPERS = ("Gemma3nForConditionalGeneration",)
"""Models that see images, around a language model without a family here. The backend ``transformers`` runs it."""

TEXT_MODELS = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
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
    windowed = CHUNKED if spec.chunked_windows else SLIDING
    kinds = read_layer_types(HfConfigReader(config), windowed)
    if kinds is None or kinds == [FULL if window is None else windowed for window in spec.windows]:
        return None
    computed = "full attention" if spec.windows[0] is None else f"a window of {spec.windows[0]}"
    return (
        f"layer_types is ignored: every layer of a {spec.architecture} has {computed} here and in transformers; "
        "remove the field, or correct architectures"
    )
