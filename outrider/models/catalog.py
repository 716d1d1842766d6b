"""Catalog: the list of served families, each with its architectures and its models on the Hugging Face hub.

Drafters and GGUF names are looked up in the tables that the engine itself uses, so the catalog cannot contradict
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outrider.models.base import Model
from outrider.models.gemma4 import Gemma4
from outrider.models.mtp import has_own_module
from outrider.models.registry import architectures
from outrider.models.sources.gguf_families import FAMILIES as GGUF_FAMILIES

# GGUF files whose models belong to another family than the one whose architecture runs them, by the family's name.
_VL = "Qwen2-VL, Qwen2.5-VL and Qwen3-VL"
GGUF_HOMES = {"qwen3next": "Qwen3-Next", "qwen2vl": _VL, "qwen3vl": _VL, "qwen3vlmoe": _VL}


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]  # names in a config's `architectures`
    hub_ids: tuple[str, ...]  # some of its models

    def model_classes(self) -> list[type[Model]]:
        return [architectures()[name] for name in self.architectures]

    @property
    def own_drafters(self) -> list[str]:
        """Return the drafters that come with the family's checkpoints or were made for them."""
        classes = self.model_classes()
        found = ["mtp"] if any(map(has_own_module, classes)) else []
        return found + (["gemma4 assistant"] if any(issubclass(each, Gemma4) for each in classes) else [])

    @property
    def seeing(self) -> list[str]:
        """Return the architectures whose image input is supported."""
        return [name for name, each in zip(self.architectures, self.model_classes(), strict=True)
                if each.may_see and name.endswith("ForConditionalGeneration")]

    @property
    def gguf_names(self) -> list[str]:
        """Return the architecture names that GGUF files use for the family's models."""
        return [name for name, family in GGUF_FAMILIES.items()
                if (GGUF_HOMES[name] == self.name if name in GGUF_HOMES else family.architecture in self.architectures)]


def _causal(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}ForCausalLM" for name in names)


def _with_head(name: str) -> tuple[str, ...]:
    """Return architecture names of a family that is served as a language model and as a classifier."""
    return f"{name}ForCausalLM", f"{name}ForSequenceClassification"


def _with_images(*names: str) -> tuple[str, ...]:
    """Return architecture names of language models that are served from text-only checkpoints and from checkpoints with
    vision."""
    return tuple(f"{name}{end}" for name in names for end in ("ForCausalLM", "ForConditionalGeneration"))


FAMILIES = (
    Family("Llama 2, 3 and SmolLM2", _with_head("Llama"), ("meta-llama/Llama-3.1-8B-Instruct",
           "HuggingFaceTB/SmolLM2-135M-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B")),
    Family("Llama 4", _with_images("Llama4"), ("meta-llama/Llama-4-Scout-17B-16E-Instruct",
           "meta-llama/Llama-4-Maverick-17B-128E-Instruct")),
    Family("Mistral and Mistral Small 3", (*_with_head("Mistral"), "Mistral3ForConditionalGeneration"),
           ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
            "mistralai/Ministral-3-3B-Instruct-2512")),
    Family("Ministral 3", _causal("Ministral3"), ("mistralai/Ministral-3-8B-Base-2512",)),
    Family("Mistral 4", _causal("Mistral4"), ("mistralai/Mistral-Small-4-119B-2603",)),
    Family("Mixtral", _causal("Mixtral"), ("mistralai/Mixtral-8x7B-Instruct-v0.1",)),
    Family("Qwen2 and Qwen2.5", _with_head("Qwen2"), ("Qwen/Qwen2.5-7B-Instruct",)),
    Family("Qwen3", _with_head("Qwen3"), ("Qwen/Qwen3-8B",)),
    Family("Qwen3-MoE", _causal("Qwen3Moe"), ("Qwen/Qwen3-30B-A3B",)),
    Family(_VL, tuple(f"{name}ForConditionalGeneration" for name in (
               "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")),
           ("Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct",
            "Qwen/Qwen3-VL-30B-A3B-Instruct")),
    Family("Qwen3-Next", _causal("Qwen3Next"), ("Qwen/Qwen3-Next-80B-A3B-Instruct",)),
    Family("Qwen3.5, and the dense models of Qwen3.6 and Qwen3.8", _with_images("Qwen3_5", "Qwen3_5Moe"),
           ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B")),
    Family("Qwen4-Exp", _with_images("Qwen4Exp"), ("Qwen/Qwen3.8-Flash-Next",)),
    Family("gpt-oss", _causal("GptOss"), ("openai/gpt-oss-20b", "openai/gpt-oss-120b")),
    Family("Gemma 2", _causal("Gemma2"), ("google/gemma-2-9b-it",)),
    Family("Gemma 3", _with_images("Gemma3"), ("google/gemma-3-1b-it", "google/gemma-3-27b-it")),
    Family("Gemma 4", _with_images("Gemma4", "Gemma4Unified"), ("google/gemma-4-E2B-it",)),
    Family("Muse Glimmer", ("MuseGlimmerForConditionalGeneration",), ("meta-models/Muse-Glimmer-30B",)),
    Family("DeepSeek-V2", _causal("DeepseekV2"), ("deepseek-ai/DeepSeek-V2-Lite-Chat",)),
    Family("DeepSeek-V3, R1 and V3.2", _causal("DeepseekV3", "DeepseekV32"),
           ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2-Exp")),
    Family("GLM-4.5, 4.6 and 4.7", _causal("Glm4Moe"), ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.6")),
    Family("GLM-5", _causal("GlmMoeDsa"), ("zai-org/GLM-5",)),
    Family("GLM5-Next", ("Glm5NextForConditionalGeneration",), ("zai-org/GLM-5.3-Flash",)),
    Family("MiniMax-M2", _causal("MiniMaxM2"), ("MiniMaxAI/MiniMax-M2",)),
    Family("Phi-3, Phi-3.5 and Phi-4", _causal("Phi3"), ("microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4",
           "microsoft/Phi-4-mini-instruct")),
    Family("SmolLM3", _causal("SmolLM3"), ("HuggingFaceTB/SmolLM3-3B",)),
    Family("OLMo 2 and 3", _causal("Olmo2", "Olmo3"), ("allenai/OLMo-2-1124-7B-Instruct",
           "allenai/Olmo-3-7B-Instruct")),
    Family("Granite 3", _causal("Granite"), ("ibm-granite/granite-3.3-8b-instruct",)),
    Family("Seed-OSS", _causal("SeedOss"), ("ByteDance-Seed/Seed-OSS-36B-Instruct",)),
    Family("ERNIE 4.5", _causal("Ernie4_5", "Ernie4_5_Moe"), ("baidu/ERNIE-4.5-0.3B-PT",
           "baidu/ERNIE-4.5-21B-A3B-PT")),
    Family("Hunyuan", _causal("HunYuanDenseV1", "HunYuanMoEV1"), ("tencent/Hunyuan-7B-Instruct",
           "tencent/Hunyuan-A13B-Instruct")),
    Family("HY-V4 (Hy4)", _causal("HYV4"), ("tencent/Hy4-preview",)),
    Family("EXAONE 4", _causal("Exaone4"), ("LGAI-EXAONE/EXAONE-4.0-1.2B", "LGAI-EXAONE/EXAONE-4.0-32B")),
    Family("Command R and Command A", _causal("Cohere", "Cohere2"), ("CohereLabs/c4ai-command-r-v01",
           "CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025")),
    Family("Nemotron-H and Nemotron Nano", _causal("NemotronH"), ("nvidia/NVIDIA-Nemotron-Nano-9B-v2",)),
    Family("Bamba", _causal("Bamba"), ("ibm-ai-platform/Bamba-9B-v2",)),
    Family("Granite 4 hybrid", _causal("GraniteMoeHybrid"), ("ibm-granite/granite-4.0-h-tiny",)),
    Family("Falcon-H1", _causal("FalconH1"), ("tiiuae/Falcon-H1-1.5B-Deep-Instruct",)),
    Family("LFM2", (*_causal("Lfm2", "Lfm2Moe"), "Lfm2VlForConditionalGeneration"),
           ("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-8B-A1B", "LiquidAI/LFM2-VL-1.6B")),
    Family("Llava, InternVL and SmolVLM", tuple(f"{name}ForConditionalGeneration" for name in (
               "Llava", "LlavaNext", "LlavaOnevision", "InternVL", "SmolVLM", "Idefics3")),
           ("llava-hf/llava-1.5-7b-hf", "llava-hf/llava-v1.6-mistral-7b-hf", "llava-hf/llava-onevision-qwen2-7b-ov-hf",
            "OpenGVLab/InternVL3-8B-hf", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", "HuggingFaceM4/Idefics3-8B-Llama3")),
    Family("OLMo Hybrid", _causal("OlmoHybrid"), ("allenai/Olmo-Hybrid-7B",)),
    Family("Kimi-Linear", _causal("KimiLinear"), ("moonshotai/Kimi-Linear-48B-A3B-Instruct",)),
    Family("Ling and Ring 3", _causal("BailingHybrid"), ("inclusionAI/Ling-3.0-Flash",)),
)


# Architectures that the bridge serves and tests hold against transformers, with models of the hub.
BRIDGED: dict[str, tuple[str, ...]] = {
    "AXK1ForCausalLM": (),
    "AfmoeForCausalLM": ("arcee-ai/Trinity-Mini",),
    "ApertusForCausalLM": ("swiss-ai/Apertus-8B-Instruct-2509",),
    "ArceeForCausalLM": ("arcee-ai/AFM-4.5B",),
    "BeamForCausalLM": (),
    "BioGptForCausalLM": ("microsoft/biogpt",),
    "BitNetForCausalLM": (),
    "Cohere2MoeForCausalLM": ("CohereLabs/command-a-plus-05-2026",),
    "CwmForCausalLM": ("facebook/cwm",),
    "Dots1ForCausalLM": ("rednote-hilab/dots.llm1.inst",),
    "ExaoneMoeForCausalLM": ("LGAI-EXAONE/K-EXAONE-236B-A23B",),
    "FlexOlmoForCausalLM": ("allenai/FlexOlmo-7x7B-1T",),
    "FlintForCausalLM": (),
    "GPT2LMHeadModel": ("openai-community/gpt2",),
    "GPTBigCodeForCausalLM": ("bigcode/starcoder",),
    "GPTNeoXForCausalLM": ("EleutherAI/pythia-1.4b",),
    "GemmaForCausalLM": ("google/gemma-7b-it",),
    "Glm4ForCausalLM": ("zai-org/GLM-4-9B-0414",),
    "Glm4MoeLiteForCausalLM": ("zai-org/GLM-4.7-Flash",),
    "GlmForCausalLM": ("zai-org/glm-4-9b-chat-hf",),
    "GraniteMoeForCausalLM": ("ibm-granite/granite-3.1-3b-a800m-instruct",),
    "GraniteMoeSWAForCausalLM": (),
    "GraniteMoeSharedForCausalLM": (),
    "GraniteSWAForCausalLM": ("ibm-granite/granite-swash-2b",),
    "HYV3ForCausalLM": ("tencent/Hy3-preview",),
    "HeliumForCausalLM": ("kyutai/helium-1-preview",),
    "HyperCLOVAXForCausalLM": ("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",),
    "Jais2ForCausalLM": ("inceptionai/Jais-2-8B-Chat",),
    "Kolibri1ForCausalLM": (),
    "LagunaForCausalLM": ("poolside/laguna-XS.2",),
    "MellumForCausalLM": ("JetBrains/Mellum2-12B-A2.5B-Base",),
    "MiMoV2FlashForCausalLM": (),
    "MiniCPM3ForCausalLM": (),
    "MinistralForCausalLM": (),
    "NanoChatForCausalLM": ("karpathy/nanochat-d32",),
    "NemotronForCausalLM": ("nvidia/Minitron-8B-Base",),
    "OPTForCausalLM": ("facebook/opt-1.3b",),
    "OlmoForCausalLM": ("allenai/OLMo-7B-0724-Instruct-hf",),
    "OlmoeForCausalLM": ("allenai/OLMoE-1B-7B-0924-Instruct",),
    "PersimmonForCausalLM": ("adept/persimmon-8b-chat",),
    "PhiForCausalLM": ("microsoft/phi-2",),
    "PhimoeForCausalLM": (),
    "Qwen2MoeForCausalLM": ("Qwen/Qwen1.5-MoE-A2.7B-Chat",),
    "SolarOpenForCausalLM": ("upstage/Solar-Open-100B",),
    "StableLmForCausalLM": ("stabilityai/stablelm-2-zephyr-1_6b",),
    "Starcoder2ForCausalLM": ("bigcode/starcoder2-7b",),
    "VaultGemmaForCausalLM": ("google/vaultgemma-1b",),
    "YoutuForCausalLM": ("tencent/Youtu-LLM-2B",),
}


def served() -> Iterator[Family]:
    """Return the families of this list, and one more for each architecture that `register` added from outside."""
    yield from FAMILIES
    listed = {name for family in FAMILIES for name in family.architectures}
    for name, model_class in architectures().items():
        if name not in listed:
            yield Family(f"{model_class.__module__}.{model_class.__qualname__}", (name,), ())
