"""The table of model classes by architecture, and build_model, which builds a model from a config, without its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from outrider.models.base import Model
from outrider.models.config import ConfigError, ConfigReader

# By the names in configs; those of the package as "module:class" of outrider.models, imported when they are needed.
_ARCHITECTURES: dict[str, type[Model] | str] = {
    "LlamaForCausalLM": "llama:Llama",
    "MistralForCausalLM": "llama:Mistral",
    "Mistral3ForConditionalGeneration": "conditional:Mistral3Conditional",
    "Qwen2ForCausalLM": "llama:Qwen2",
    "Qwen3ForCausalLM": "llama:Qwen3",
    "SmolLM3ForCausalLM": "smollm3:SmolLM3",
    "SeedOssForCausalLM": "seed_oss:SeedOss",
    "GraniteForCausalLM": "granite:Granite",
    "Phi3ForCausalLM": "phi3:Phi3",
    "Olmo2ForCausalLM": "olmo2:Olmo2",
    "Olmo3ForCausalLM": "olmo2:Olmo3",
    "OlmoHybridForCausalLM": "olmo_hybrid:OlmoHybrid",
    "Exaone4ForCausalLM": "exaone4:Exaone4",
    "CohereForCausalLM": "cohere:Cohere",
    "Cohere2ForCausalLM": "cohere:Cohere2",
    "Ernie4_5ForCausalLM": "ernie:Ernie",
    "Ernie4_5_MoeForCausalLM": "ernie:ErnieMoe",
    "HunYuanDenseV1ForCausalLM": "hunyuan:Hunyuan",
    "HunYuanMoEV1ForCausalLM": "hunyuan:HunyuanMoe",
    "GptOssForCausalLM": "gpt_oss:GptOss",
    "MixtralForCausalLM": "mixtral:Mixtral",
    "MiniMaxM2ForCausalLM": "minimax_m2:MiniMaxM2",
    "Glm4MoeForCausalLM": "glm4_moe:Glm4Moe",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3Moe",
    "Qwen2VLForConditionalGeneration": "conditional:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "conditional:Qwen2VL",
    "Qwen3VLForConditionalGeneration": "conditional:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "conditional:Qwen3VLMoe",
    "Qwen3NextForCausalLM": "qwen3_next:Qwen3Next",
    "Qwen3_5ForCausalLM": "qwen3_5:Qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:Qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5:Qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5:Qwen3_5",
    "Qwen4ExpForCausalLM": "qwen4_exp:Qwen4Exp",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp:Qwen4Exp",
    "Glm5NextForConditionalGeneration": "glm5_next:Glm5Next",
    "NemotronHForCausalLM": "nemotron_h:NemotronH",
    "BambaForCausalLM": "bamba:Bamba",
    "DeepseekV2ForCausalLM": "deepseek_v2:DeepseekV2",
    "KimiLinearForCausalLM": "kimi_linear:KimiLinear",
    "BailingHybridForCausalLM": "bailing_hybrid:BailingHybrid",
    "GraniteMoeHybridForCausalLM": "granite_hybrid:GraniteHybrid",
    "FalconH1ForCausalLM": "falcon_h1:FalconH1",
    "Lfm2ForCausalLM": "lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "lfm2:Lfm2Moe",
    "DeepseekV3ForCausalLM": "deepseek_v3:DeepseekV3",
    "DeepseekV32ForCausalLM": "deepseek_v3:DeepseekV32",
    "GlmMoeDsaForCausalLM": "deepseek_v3:GlmMoeDsa",
    "HYV4ForCausalLM": "hy_v4:HYV4",
    "Mistral4ForCausalLM": "mistral4:Mistral4",
    "Ministral3ForCausalLM": "ministral3:Ministral3",
    "Llama4ForCausalLM": "llama4:Llama4",
    "Llama4ForConditionalGeneration": "llama4:Llama4Conditional",
    "Gemma2ForCausalLM": "gemma2:Gemma2",
    "Gemma3ForCausalLM": "gemma3:Gemma3",
    "Gemma3ForConditionalGeneration": "conditional:Gemma3Conditional",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer:MuseGlimmer",
    "Gemma4ForCausalLM": "gemma4:Gemma4",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4:Gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4:Gemma4",
    "LlavaForConditionalGeneration": "conditional:LlamaPart",
    "LlavaNextForConditionalGeneration": "conditional:LlamaPart",
    "LlavaOnevisionForConditionalGeneration": "conditional:Qwen2Part",
    "InternVLForConditionalGeneration": "conditional:Qwen2Part",
    "SmolVLMForConditionalGeneration": "conditional:SmolVLM",
    "Idefics3ForConditionalGeneration": "conditional:SmolVLM",
    "Lfm2VlForConditionalGeneration": "conditional:Lfm2VL",
    "LlamaForSequenceClassification": "classifier:LlamaClassifier",
    "MistralForSequenceClassification": "classifier:MistralClassifier",
    "Qwen2ForSequenceClassification": "classifier:Qwen2Classifier",
    "Qwen3ForSequenceClassification": "classifier:Qwen3Classifier",
}
# Model classes of architectures that may have one of several language models, by the `model_type` of the `text_config`.
_LLAVA = {"llama": "conditional:LlamaPart", "mistral": "conditional:Mistral3Conditional",
          "qwen2": "conditional:Qwen2Part"}
_BY_TEXT: dict[str, dict[str, str]] = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "conditional:Mistral3Conditional", "ministral3": "conditional:Ministral3Conditional",
        "mistral4": "conditional:Mistral4Conditional"},
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": _LLAVA,
    "InternVLForConditionalGeneration": _LLAVA | {"qwen3": "conditional:Qwen3Part"},
    "SmolVLMForConditionalGeneration": {"llama": "conditional:SmolVLM"},
    "Idefics3ForConditionalGeneration": {"llama": "conditional:SmolVLM"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "conditional:Lfm2VL"},
}


def architectures() -> Mapping[str, type[Model]]:
    """Return every served architecture with its class."""
    return {name: _class_of(name) for name in _ARCHITECTURES}


def _class_of(architecture: str) -> type[Model]:
    found = _ARCHITECTURES[architecture]
    return _class_at(found) if isinstance(found, str) else found


def _class_at(place: str) -> type[Model]:
    module, _, name = place.partition(":")
    loaded: type[Model] = getattr(import_module(f"outrider.models.{module}"), name)
    return loaded


def register(architecture: str, model_class: type[Model]) -> None:
    """Serve `architecture` (a name in a config's `architectures`) with `model_class` from now on. The class is used for
    any language model that the config names."""
    _ARCHITECTURES[architecture] = model_class
    _BY_TEXT.pop(architecture, None)


def build_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    source: str = "config.json",
    model_impl: str = "auto",
) -> Model:
    """Build a model without its weights. The config is checked first, before memory for weights is taken. max_len: the
    number of positions that it must serve, by default the config's. source: the file, for messages. model_impl: see
    `EngineConfig`."""
    reader = ConfigReader(config, source)
    make = partial(_family(reader, model_impl), reader, dtype=dtype)
    try:
        outline = make(device=torch.device("meta"), max_len=1)  # a table of one position, not of all
    except NotImplementedError:  # a family from outside that looks at the values of its tensors
        outline = None
    except (RuntimeError, OverflowError) as error:
        raise ConfigError(f"{source}: its sizes are too large to build a model ({str(error).splitlines()[0]}). Correct "
                          "them, or fetch the file again") from error
    if outline is not None:
        reader.refuse_unread()
        if max_len is not None and max_len > outline.max_positions:  # before tables of that length are made
            raise ValueError(f"max_model_len ({max_len}) exceeds the {outline.max_positions} positions the model was "
                             f"made for ({source}: max_position_embeddings). Lower max_model_len")
    model = outline
    if torch.device(device).type != "meta" or model is None:
        model = make(device=torch.device(device), max_len=max_len)
        reader.refuse_unread()
    model.file_values, model.file_name = config, source
    return model


def named_architectures(reader: ConfigReader) -> list[Any]:
    """Return the `architectures` of a config. If it has none, the family that `model_type` names is used: tools that
    convert files to folders write only that."""
    if reader.has("architectures"):
        return reader.required("architectures", list)
    model_type = reader.get("model_type", str, "")
    end = "ForConditionalGeneration" if reader.has("text_config") else "ForCausalLM"
    wanted = _plain(model_type.removesuffix("_text") + end)
    found = [name for name in _ARCHITECTURES if _plain(name) == wanted]
    if len(found) != 1:
        named = f", and model_type={model_type!r} names no supported family" if model_type else ""
        raise ConfigError(f"{reader.source}: architectures is missing{named}. Add one of "
                          f"{', '.join(sorted(_ARCHITECTURES))}")
    return found


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def has_family(architectures: Sequence[object]) -> bool:
    """Whether a family here serves a config with these `architectures`, rather than transformers."""
    return bool(architectures) and str(architectures[0]) in _ARCHITECTURES


def _family(reader: ConfigReader, model_impl: str) -> Callable[..., Model]:
    architectures = named_architectures(reader)
    if has_family(architectures) and model_impl != "transformers":
        return _class_around_text(architectures[0], reader)
    if not architectures or model_impl == "outrider":
        raise reader.refusal("architectures", f"supported: {', '.join(sorted(_ARCHITECTURES))}")
    return _class_at("bridge.model:BridgedModel")


def _class_around_text(architecture: str, reader: ConfigReader) -> type[Model]:
    """Return the class of an architecture, or of its language model if the architecture allows several. If the config
    does not name the language model, the architecture's default is used."""
    classes, text = _BY_TEXT.get(architecture, {}), reader.text_section()
    kind = text.get("model_type", str, "") if classes and text is not reader else ""
    if not kind:
        return _class_of(architecture)
    if kind not in classes:
        raise text.refusal("model_type", f"supported language models of this architecture: {', '.join(classes)}")
    return _class_at(classes[kind])
