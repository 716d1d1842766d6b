"""Random tiny models of every family, saved as checkpoint folders, with random drafters for them.

Families come from the tables of the tests. Where transformers has the family, transformers makes and saves the model,
and is the oracle of its tokens. A vocabulary of 16 tokens lets random drafters be right now and then.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig
from outrider.formats import RankGroup
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.models.sources.folder import read_config
from outrider.runner.target import load_target
from tests.drafters.blocks import FORMS, make_block
from tests.drafters.checkpoints import LAYER
from tests.engine.harness import CONFIGS
from tests.models import gemma4, oracle
from tests.models.bridged import BRIDGED, make_bridged, model_class_of
from tests.models.prediction_modules import add_modules, has_modules
from tests.models.quantized_files import FORMS as WEIGHT_FORMS
from tests.models.quantized_files import GROUP
from tests.ranks import families as own

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "block")
GEMMA4, BRIDGE = "Gemma4", "bridge"
TEXT_VOCAB, SMALL_VOCAB = 256, 16  # 256: a token is a byte, so texts have forms and stop strings

# Config keys that are drawn, if the family's config has a number there.
DRAWN: dict[str, tuple[int, ...]] = {
    "sliding_window": (4, 7, 16, 31, 50), "attention_chunk_size": (8, 16, 24), "intermediate_size": (64, 96, 160),
    "num_experts_per_tok": (1, 2, 3), "moe_k": (1, 2, 3), "moe_topk": (1, 2, 3), "index_topk": (4, 12, 40),
    "num_attention_heads": (2, 4, 8), "num_key_value_heads": (1, 2, 4), "num_hidden_layers": (1, 2, 3, 5, 6),
    "mamba_chunk_size": (8, 16, 32), "index_kpool": (2, 4, 8),
}
HEADS_ARE_FIXED = ("kv_lora_rank", "linear_num_key_heads", "mamba_num_heads", "mamba_n_heads")


def _variants() -> dict[str, list[str]]:
    """The names of a family's tiny configs, by the name of its class in transformers."""
    found = defaultdict(list)
    for variant, (name, _) in oracle.ALL.items():
        found[name].append(variant)
    return found | {GEMMA4: list(gemma4.TARGETS), BRIDGE: list(BRIDGED)}


VARIANTS = _variants()
OWN_DRAFTERS = {name: "mtp" for name, variants in VARIANTS.items() if any(map(has_modules, variants))} | {
    GEMMA4: "gemma4_assistant"}


def all_pairs() -> list[tuple[str, str]]:
    """Every family with every drafter that can serve it, in an order that mixes them."""
    pairs = [(name, method) for name in VARIANTS for method in METHODS] + list(OWN_DRAFTERS.items())
    Random(0).shuffle(pairs)
    return pairs


PAIRS = all_pairs()


@dataclass
class Target:
    """A saved model."""

    variant: str
    folder: Path
    vocab_size: int
    changes: dict[str, Any]  # values of the config that were drawn
    has_oracle: bool  # transformers has the family
    form: str | None = None  # how weights are stored, if not as numbers

    def load(self, dtype: torch.dtype, group: RankGroup | None = None) -> Model:
        source = resolve(self.folder)
        if group is not None:
            return load_model(source, dtype=dtype, device="cpu", keep_quantized=True, group=group)
        name = str(dtype).removeprefix("torch.")
        made = self.form if self.form in ("fp8", "int4") else None
        return load_target(EngineConfig(str(self.folder), dtype=name, device="cpu", quantization=made), source)


def make_target(family: str, method: str, random: Random, folder: Path) -> Target:
    """Save a random model. If the drawn sizes do not go together, the family's own sizes are taken."""
    variants = [each for each in VARIANTS[family] if method != "mtp" or has_modules(each)]
    vocab = random.choice([SMALL_VOCAB, SMALL_VOCAB, TEXT_VOCAB])
    if family == GEMMA4:
        name = random.choice(variants)
        return Target(name, gemma4.save_target(name, folder), gemma4.VOCAB, {}, True)
    if family == BRIDGE:
        name = random.choice([each for each in variants if _is_installed(each)])
        return Target(name, make_bridged(name, folder, vocab_size=TEXT_VOCAB), TEXT_VOCAB, {}, True)
    variant = random.choice(variants)
    changes = _draw_changes(oracle.BASE | oracle.ALL[variant][1], random)
    for drawn in (changes, {}):
        try:
            has_oracle = _save(variant, folder, random, drawn | {"vocab_size": vocab})
            build_model(read_config(folder), dtype=torch.float32, device="meta")
        except Exception:
            if not drawn:
                raise
            continue
        break
    if method == "mtp":
        add_modules(variant, folder)
    return Target(variant, folder, vocab, drawn, has_oracle)


def _is_installed(bridged: str) -> bool:
    try:
        model_class_of(bridged)
    except AttributeError:
        return False
    return True


def _draw_changes(values: dict[str, Any], random: Random) -> dict[str, Any]:
    has_layout = any(isinstance(value, list) or "pattern" in key for key, value in values.items())
    changes = {}
    for key, choices in DRAWN.items():
        is_fixed = key == "num_hidden_layers" and has_layout or (
            key in ("num_attention_heads", "num_key_value_heads") and any(fixed in values for fixed in HEADS_ARE_FIXED))
        if isinstance(values.get(key), int) and not is_fixed and random.random() < 0.4:
            changes[key] = random.choice(choices)
    return changes


def _save(variant: str, folder: Path, random: Random, changes: dict[str, Any]) -> bool:
    """Write the folder. Returns whether transformers made it."""
    try:
        oracle.make_folder(variant, folder, **changes)
    except AttributeError as error:  # transformers lacks the family
        if "transformers" not in str(error):
            raise
        model = own.make_model(variant, None, torch.float32, **changes)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(own.config_of(variant) | changes))
        save_file({name: slot.target.reshape(slot.shape).clone(memory_format=torch.contiguous_format)
                   for name, slot in model.weights().items()}, folder / "model.safetensors", {"format": "pt"})
        return False
    return True


def store_in_form(target: Target, form: str) -> None:
    """Bring the projections of a saved model into a form of quantised files. fp8 and int4 are made at load."""
    target.form = form
    if form in ("fp8", "int4"):
        return
    tensors, coded = load_file(target.folder / "model.safetensors"), WEIGHT_FORMS[form]
    matrices = [name for name, tensor in tensors.items() if "_proj." in name and tensor.ndim == 2]
    if any(tensors[name].shape[1] % GROUP for name in matrices):  # no group of weights divides the inputs
        target.form = "fp8"
        return
    for name in matrices:
        parts, _ = coded.write(tensors.pop(name))
        tensors |= {name.removesuffix(".weight") + end: part.clone() for end, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target.folder / "model.safetensors",
              {"format": "pt"})
    config = json.loads((target.folder / "config.json").read_text())
    (target.folder / "config.json").write_text(json.dumps(config | {"quantization_config": coded.settings}))


def make_drafter(method: str, target: Target, model: Model, random: Random, folder: Path) -> dict[str, Any]:
    """Settings of an engine with a random drafter of this method. model: the target, whole."""
    own_settings = {"method": method, "num_speculative_tokens": random.randint(1, 6), "auto": random.random() < 0.15}
    match method:
        case "ngram" | "suffix":
            return {"speculative_config": own_settings | {"prompt_lookup_min": 1}}
        case "mtp":
            return {"speculative_config": own_settings | {"model": str(target.folder)}}
        case "block":
            make_block(random.choice(FORMS), model, folder, random.choice([8, 16]))
            return {"speculative_config": own_settings | {"model": str(folder)}}
        case "gemma4_assistant":
            gemma4.save_assistant(target.variant, folder, centroids=random.random() < 0.5)
            return {"speculative_config": own_settings | {"model": str(folder)}}
        case "draft_model" if not model.recurrent_layers and random.random() < 0.6:  # almost always right
            return {"speculative_config": own_settings | {"model": str(target.folder)}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_head_config(method, model, random)))
    more: dict[str, Any] = {"load_format": "dummy"}  # of the drafter: the model is loaded already
    if method == "eagle3" and random.random() < 0.2:
        own_settings["method"] = ["ngram", "eagle3"]
    elif method == "eagle3" and random.random() < 0.2:
        more |= {"adapt_drafter": True, "adapt_share": 1.0, "adapt_memory_bytes": 16 << 20}
    return more | {"speculative_config": own_settings | {"model": str(folder)}}


def _head_config(method: str, model: Model, random: Random) -> dict[str, Any]:
    vocab = model.vocab_size
    if method == "draft_model":
        return CONFIGS[random.choice(["llama", "gemma3", "sliding"])] | {"vocab_size": vocab}
    layer = LAYER | {"hidden_size": model.hidden_size, "head_dim": random.choice([8, 16]), "vocab_size": vocab}
    if method == "eagle":
        return layer | {"architectures": ["LlamaForCausalLM"]}
    aux_layers = sorted({0, random.randint(0, model.num_layers), model.num_layers})
    return layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": vocab,
                    "eagle_aux_hidden_state_layer_ids": aux_layers}
