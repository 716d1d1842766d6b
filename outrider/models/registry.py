"""The table from architectures to model classes, and build_model: from a config to a model without its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from outrider.models.bailing_hybrid import BailingHybrid
from outrider.models.bamba import Bamba
from outrider.models.base import Model
from outrider.models.classifier import LlamaClassifier, MistralClassifier, Qwen2Classifier, Qwen3Classifier
from outrider.models.cohere import Cohere, Cohere2
from outrider.models.conditional import Gemma3Conditional, Mistral3Conditional
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.deepseek_v2 import DeepseekV2
from outrider.models.deepseek_v3 import DeepseekV3, DeepseekV32, GlmMoeDsa
from outrider.models.ernie import Ernie, ErnieMoe
from outrider.models.exaone4 import Exaone4
from outrider.models.falcon_h1 import FalconH1
from outrider.models.gemma2 import Gemma2
from outrider.models.gemma3 import Gemma3
from outrider.models.gemma4 import Gemma4
from outrider.models.glm4_moe import Glm4Moe
from outrider.models.gpt_oss import GptOss
from outrider.models.granite import Granite
from outrider.models.granite_hybrid import GraniteHybrid
from outrider.models.hunyuan import Hunyuan, HunyuanMoe
from outrider.models.kimi_linear import KimiLinear
from outrider.models.lfm2 import Lfm2
from outrider.models.llama import Llama, Mistral, Qwen2, Qwen3
from outrider.models.minimax_m2 import MiniMaxM2
from outrider.models.mixtral import Mixtral
from outrider.models.nemotron_h import NemotronH
from outrider.models.olmo2 import Olmo2, Olmo3
from outrider.models.phi3 import Phi3
from outrider.models.qwen3_5 import Qwen3_5
from outrider.models.qwen3_moe import Qwen3Moe
from outrider.models.qwen3_next import Qwen3Next
from outrider.models.seed_oss import SeedOss
from outrider.models.smollm3 import SmolLM3

_ARCHITECTURES: dict[str, type[Model]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "Mistral3ForConditionalGeneration": Mistral3Conditional,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "SmolLM3ForCausalLM": SmolLM3,
    "SeedOssForCausalLM": SeedOss,
    "GraniteForCausalLM": Granite,
    "Phi3ForCausalLM": Phi3,
    "Olmo2ForCausalLM": Olmo2,
    "Olmo3ForCausalLM": Olmo3,
    "Exaone4ForCausalLM": Exaone4,
    "CohereForCausalLM": Cohere,
    "Cohere2ForCausalLM": Cohere2,
    "Ernie4_5ForCausalLM": Ernie,
    "Ernie4_5_MoeForCausalLM": ErnieMoe,
    "HunYuanDenseV1ForCausalLM": Hunyuan,
    "HunYuanMoEV1ForCausalLM": HunyuanMoe,
    "GptOssForCausalLM": GptOss,
    "MixtralForCausalLM": Mixtral,
    "MiniMaxM2ForCausalLM": MiniMaxM2,
    "Glm4MoeForCausalLM": Glm4Moe,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3_5ForCausalLM": Qwen3_5,
    "Qwen3_5ForConditionalGeneration": Qwen3_5,
    "Qwen3_5MoeForCausalLM": Qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5,
    "NemotronHForCausalLM": NemotronH,
    "BambaForCausalLM": Bamba,
    "DeepseekV2ForCausalLM": DeepseekV2,
    "KimiLinearForCausalLM": KimiLinear,
    "BailingHybridForCausalLM": BailingHybrid,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "FalconH1ForCausalLM": FalconH1,
    "Lfm2ForCausalLM": Lfm2,
    "DeepseekV3ForCausalLM": DeepseekV3,
    "DeepseekV32ForCausalLM": DeepseekV32,
    "GlmMoeDsaForCausalLM": GlmMoeDsa,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3Conditional,
    "Gemma4ForCausalLM": Gemma4,
    "Gemma4ForConditionalGeneration": Gemma4,
    "Gemma4UnifiedForCausalLM": Gemma4,
    "Gemma4UnifiedForConditionalGeneration": Gemma4,
    "LlamaForSequenceClassification": LlamaClassifier,
    "MistralForSequenceClassification": MistralClassifier,
    "Qwen2ForSequenceClassification": Qwen2Classifier,
    "Qwen3ForSequenceClassification": Qwen3Classifier,
}


def architectures() -> Mapping[str, type[Model]]:
    """Every architecture that is served, with its class."""
    return _ARCHITECTURES


def register(architecture: str, model_class: type[Model]) -> None:
    """Serve `architecture` (a name in a config's `architectures`) with `model_class` from now on."""
    _ARCHITECTURES[architecture] = model_class


def build_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_len: int | None = None,
    source: str = "config.json",
) -> Model:
    """A model without its weights. max_len: positions it must serve, the config's own by default. Its config is checked
    first, without memory for weights. source: the file, for messages."""
    reader = ConfigReader(config, source)
    make = partial(_family(reader), reader, dtype=dtype)
    try:
        outline = make(device=torch.device("meta"), max_len=1)  # a table of one position, not of all
    except NotImplementedError:  # a family from outside that looks at the values of its tensors
        outline = None
    except (RuntimeError, OverflowError) as error:
        raise ConfigError(f"{source}: its sizes are too large for a model ({str(error).splitlines()[0]})") from error
    if outline is not None:
        reader.refuse_unread()
        if max_len is not None and max_len > outline.max_positions:  # before tables of that length are made
            raise ValueError(f"max_model_len ({max_len}) exceeds the {outline.max_positions} positions the model was "
                             f"made for ({source}: max_position_embeddings)")
    if torch.device(device).type == "meta" and outline is not None:
        return outline
    model = make(device=torch.device(device), max_len=max_len)
    reader.refuse_unread()
    return model


def _family(reader: ConfigReader) -> Callable[..., Model]:
    architectures = reader.required("architectures", list)
    if not architectures or str(architectures[0]) not in _ARCHITECTURES:
        raise reader.refusal("architectures", f"known are {', '.join(sorted(_ARCHITECTURES))}")
    return _ARCHITECTURES[architectures[0]]
