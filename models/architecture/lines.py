"""The lines of models that people run: their architectures, and what of them is not served, and why."""

from dataclasses import dataclass

_STATE = "recurrent state is not supported"
_SPARSE = "sparse attention is not supported"
_CODE = "their code is not part of transformers"


@dataclass(frozen=True)
class ModelLine:
    """A line of models."""

    name: str
    architectures: tuple[str, ...]
    """The names in ``architectures`` of its config.json that are served."""
    left_out: str = ""
    """What of the line is not served, and why."""
    has_template: bool = True
    """Whether its models have chat templates, on which conversations, tools and reasoning depend."""


LINES = (
    ModelLine("Qwen3 and Qwen3-2507, also Thinking", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")),
    ModelLine("Qwen3-Coder-30B-A3B", ("Qwen3MoeForCausalLM",)),
    ModelLine("Qwen3-Embedding", ("Qwen3ForCausalLM",), has_template=False),
    ModelLine("Qwen1.5, Qwen2, Qwen2.5, -Coder, -Math", ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")),
    ModelLine("Qwen3-Next", ("Qwen3NextForCausalLM",)),
    ModelLine(
        "Qwen3.5, Qwen3.6, for text",
        (
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
        ),
    ),
    ModelLine(
        "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, for text",
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
        ),
    ),
    ModelLine(
        "QwQ, DeepSeek-R1-Distill, R1-0528-Qwen3-8B", ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
    ),
    ModelLine("Llama 1 to 3.3, CodeLlama, TinyLlama, Vicuna", ("LlamaForCausalLM",)),
    ModelLine("Llama 3.2 Vision, for text", ("MllamaForConditionalGeneration", "MllamaForCausalLM")),
    ModelLine(
        "Llama 4 Scout and Maverick, Llama Guard 4, for text", ("Llama4ForConditionalGeneration", "Llama4ForCausalLM")
    ),
    ModelLine("CWM", ("CwmForCausalLM",)),
    ModelLine("Gemma 2", ("Gemma2ForCausalLM",)),
    ModelLine("Gemma 3 270M and 1B", ("Gemma3ForCausalLM",)),
    ModelLine("Gemma 3 4B, 12B, 27B, for text", ("Gemma3ForConditionalGeneration",)),
    ModelLine(
        "Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B, for text",
        (
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Gemma4UnifiedForCausalLM",
        ),
    ),
    ModelLine(
        "Gemma 1, 3n, EmbeddingGemma",
        ("GemmaForCausalLM",),
        "3n: only by the backend transformers; EmbeddingGemma: bidirectional attention is not supported",
    ),
    ModelLine(
        "Mistral 7B, Nemo, Small 2409 and 2501, Codestral, Mixtral", ("MistralForCausalLM", "MixtralForCausalLM")
    ),
    ModelLine("Ministral-8B-2410", ("MistralForCausalLM", "MinistralForCausalLM")),
    ModelLine(
        "Mistral-Small-3.1 and 3.2, Magistral-2509, Devstral 2, Ministral 3, for text",
        ("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"),
    ),
    ModelLine("Phi-3, Phi-3.5-mini, Phi-4", ("Phi3ForCausalLM",)),
    ModelLine("Phi-4-mini", ("Phi3ForCausalLM",)),
    ModelLine(
        "Phi-1, Phi-1.5, Phi-2, Phi-3.5-MoE, Phi-4-multimodal",
        ("PhiForCausalLM",),
        "Phi-3.5-MoE: only by the backend transformers; Phi-4-multimodal: adapters are not supported",
        has_template=False,
    ),
    ModelLine("gpt-oss", ("GptOssForCausalLM",)),
    ModelLine(
        "DeepSeek V2, V2.5, Coder V2, V3, V3.1, R1, V3.2, V4",
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        f"V3.2 and V4: {_SPARSE}",
    ),
    ModelLine(
        "Kimi K2, Moonlight",
        ("DeepseekV3ForCausalLM",),
        "K2.5 and later: their wrapper is not supported; tiktoken.model is not read: convert it to tokenizer.json",
    ),
    ModelLine(
        "GLM-4-9B, GLM-4-0414, GLM-4.5 and later",
        ("GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
        f"GLM-5: {_SPARSE}",
    ),
    ModelLine("dots.llm1", ("Dots1ForCausalLM",)),
    ModelLine("Solar Open", ("SolarOpenForCausalLM",)),
    ModelLine("MiniMax-M2", ("MiniMaxM2ForCausalLM",)),
    ModelLine("SmolLM, SmolLM2", ("LlamaForCausalLM",)),
    ModelLine("SmolLM3", ("SmolLM3ForCausalLM",)),
    ModelLine("Granite 3, 4, 4 H", ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM")),
    ModelLine("OLMo 2", ("Olmo2ForCausalLM",)),
    ModelLine("OLMo 1, OLMo 3, OLMoE", ("OlmoForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM")),
    ModelLine("Falcon3", ("LlamaForCausalLM",)),
    ModelLine("Falcon 7B and 40B", ("FalconForCausalLM",), has_template=False),
    ModelLine("Falcon-H1", ("FalconH1ForCausalLM",)),
    ModelLine("LFM2, LFM2.5", ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")),
    ModelLine("Llama-3.1-Nemotron-70B, Nano-8B", ("LlamaForCausalLM",)),
    ModelLine(
        "Minitron, Nemotron-4, Nemotron-H, Nemotron 3, Super",
        ("NemotronForCausalLM", "NemotronHForCausalLM"),
        "Nemotron 3 Super and Ultra: experts on a smaller input are not supported; Super (DeciLM): layers of different "
        "shapes are not supported",
    ),
    ModelLine("EXAONE 3.5, EXAONE 4", ("ExaoneForCausalLM", "Exaone4ForCausalLM")),
    ModelLine("InternLM 2, 2.5, 3", ("InternLM2ForCausalLM", "InternLM3ForCausalLM")),
    ModelLine(
        "StarCoder2, GPT-2, OPT, Pythia, StableLM, Bloom, MPT",
        (
            "Starcoder2ForCausalLM",
            "GPT2LMHeadModel",
            "OPTForCausalLM",
            "GPTNeoXForCausalLM",
            "StableLmForCausalLM",
        ),
        "Bloom and MPT: ALiBi is not supported; StableLM 2 12B: its norms of queries are not supported",
        has_template=False,
    ),
    ModelLine(
        "Command-R, R+, R7B, A",
        ("CohereForCausalLM", "Cohere2ForCausalLM", "Cohere2VisionForConditionalGeneration"),
    ),
    ModelLine(
        "Hunyuan, ERNIE 4.5, Seed-OSS, Arcee, Apertus, MiniCPM, MiniMax-01 and M1, MiMo",
        (
            "HunYuanDenseV1ForCausalLM",
            "HunYuanMoEV1ForCausalLM",
            "Ernie4_5ForCausalLM",
            "SeedOssForCausalLM",
            "ArceeForCausalLM",
        ),
        "Apertus and ERNIE's MoE models: only by the backend transformers; "
        f"MiniCPM and MiMo: {_CODE}; MiniMax-01 and M1: {_STATE}",
    ),
    ModelLine("Yi-1.5, DeepSeek-coder (first), Hermes, Zephyr, SOLAR", ("LlamaForCausalLM", "MistralForCausalLM")),
    ModelLine(
        "Bielik, EuroLLM, Sarvam-1, Teuken, LLaVA and other models around Llama or Mistral",
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "LlavaForConditionalGeneration",
            "InternVLForConditionalGeneration",
        ),
    ),
)

GGUF = {
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "GlmForCausalLM": "chatglm",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "llama",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""The family, by llama.cpp's name, of an architecture whose GGUF files can be loaded."""

LATENT = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"})
"""The architectures with latent attention."""
PLAIN_ON_CUDA = LATENT | frozenset(
    {
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "Cohere2VisionForConditionalGeneration",
        "CohereForCausalLM",
        "Dots1ForCausalLM",
        "FalconForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Glm4MoeForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "MiniMaxM2ForCausalLM",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "OlmoForCausalLM",
        "PhiForCausalLM",
        "SolarOpenForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
"""The architectures with parts for which the CUDA backend has no kernels."""

COLUMNS = ("line", "architectures", "GGUF", "on cuda", "tools, reasoning", "not served")


def matrix() -> list[tuple[str, ...]]:
    """Returns a row for each line, in the order of COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for line in LINES:
        files = dict.fromkeys(GGUF[name] for name in line.architectures if name in GGUF)
        plain = [name for name in line.architectures if name in PLAIN_ON_CUDA]
        on_cuda, tools = "kernels", "by the template" if line.has_template else "no template"
        if plain:
            on_cuda = "partly plain torch"
            on_cuda += f": {', '.join(plain)}" if len(plain) < len(line.architectures) else ""
        served = (on_cuda, tools) if line.architectures else ("", "")
        rows.append((line.name, ", ".join(line.architectures), ", ".join(files), *served, line.left_out))
    return rows


def markdown() -> str:
    """Returns the matrix as a table for docs/supported_models.md."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for line, architectures, files, *others in matrix():
        names = [", ".join(f"`{name}`" for name in part.split(", ") if name) for part in (architectures, files)]
        rows.append((line, *names, *others))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
