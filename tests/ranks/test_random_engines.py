"""Engines of a random family, drafter, number of ranks, settings and requests have the texts of one rank, in float64.

A seed draws a whole case. OUTRIDER_RANK_CASES sets how many seeds run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.mtp import modules_drafter
from outrider.formats import RankGroup
from outrider.models.base import Model
from outrider.models.mtp import build_mtp_modules
from tests.drafters.checkpoints import LAYER
from tests.engine.harness import CONFIGS, CPU, VOCAB, Ask, Rig, prompt_of, save_folder, tokens_of
from tests.ranks.families import make_model
from tests.ranks.pool import RankPool
from tests.ranks.test_dummy_weights import FAMILIES

pytestmark = pytest.mark.long
NUM_CASES = int(os.environ.get("OUTRIDER_RANK_CASES", "24"))
FIRST = int(os.environ.get("OUTRIDER_RANK_FIRST_CASE", "0"))
MTP_FAMILIES = {"nemotron_h", "nemotron_h_latent", "qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe",
                "bailing_hybrid"}
HIDDEN = 64  # of every family here


class Case(NamedTuple):
    family: str
    drafter: str
    num_ranks: int
    settings: dict[str, Any]
    asks: list[Ask]
    preempts: bool


def draw_case(seed: int) -> Case:
    random = Random(seed)
    family = random.choice(FAMILIES)
    drafters = ["none", "ngram", "suffix", "draft_model", "eagle", "eagle3", *["mtp"] * (3 * (family in MTP_FAMILIES))]
    settings = {"max_num_seqs": random.randint(1, 5), "max_num_batched_tokens": random.choice([16, 24, 64, 256]),
                "max_model_len": 128, "num_pages": random.choice([60, 160]), "overlap": random.random() < 0.5,
                "enable_prefix_caching": random.random() < 0.7, "checkpoint_interval": random.choice([16, 32])}
    beginning = prompt_of(seed, 40, VOCAB)
    asks = []
    for number in range(random.randint(1, 6)):
        prompt = beginning[: random.choice([0, 16, 33, 40])] + prompt_of(number, random.randint(1, 30), VOCAB)
        asks.append(Ask(prompt, draw_params(random)))
    return Case(family, random.choice(drafters), random.choice([2, 4]), settings, asks, random.random() < 0.5)


def draw_params(random: Random) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": random.randint(1, 20), "ignore_eos": True, "temperature": 0.0}
    if random.random() < 0.6:
        given |= {"temperature": random.choice([0.4, 1.0]), "seed": random.randrange(99),
                  "top_p": random.choice([1, 0.8]), "top_k": random.choice([0, 20]), "min_p": random.choice([0, 0.02])}
    if random.random() < 0.4:
        given |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {7: 1.5}}
    if random.random() < 0.3:
        given["logprobs"] = 3
    return SamplingParams(**given)


def speculative(case: Case, folder: Path) -> dict[str, Any] | None:
    common = {"num_speculative_tokens": 3, "auto": False}
    match case.drafter:
        case "none" | "mtp":
            return None
        case "ngram":
            return common | {"method": "ngram", "prompt_lookup_min": 1}
        case "suffix":
            return common | {"method": "suffix"}
    return common | {"method": case.drafter, "model": str(folder / case.drafter)}


def modules(model: Model, group: RankGroup | None) -> Drafter:
    heads = build_mtp_modules(model, first_layer=model.num_layers, dtype=model.dtype, device=CPU)
    generator = torch.Generator().manual_seed(6)
    for head in heads:
        if group is not None:
            head.shard(group)
        for name, slot in head.weights().items():
            center = 1.0 if "norm" in name and not head.description.norm_offset else 0.0
            slot.store(torch.empty(slot.shape, dtype=torch.float64).normal_(center, 0.25, generator=generator))
        head.finalize()
    return modules_drafter(heads, 3)


def run_case(group: RankGroup | None, case: Case, folder: Path) -> Any:
    model = make_model(case.family, group)
    drafter = modules(model, group) if case.drafter == "mtp" else None
    load_format = "dummy" if case.drafter.startswith("eagle") else "auto"  # heads that ranks draw alike
    with Rig(model, drafter=drafter, speculative_config=speculative(case, folder), load_format=load_format,
             **case.settings) as rig:
        tokens = [tokens_of(rig.run(case.asks, after_step=rig.preempt if case.preempts else None)) for _ in range(2)]
        return tokens, rig.engine.stats.num_draft_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafters")
    save_folder(path / "draft_model", CONFIGS["llama"], seed=7)
    layer = LAYER | {"hidden_size": HIDDEN, "head_dim": 16}
    heads = {"eagle": layer | {"architectures": ["LlamaForCausalLM"]},
             "eagle3": layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}}
    for name, config in heads.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_CASES))
def test_a_random_engine_has_the_texts_of_one_rank(ranks: RankPool, folder: Path, seed: int) -> None:
    case = draw_case(seed)
    expected, num_drafts = run_case(None, case, folder)
    for tokens, _ in ranks.run(case.num_ranks, run_case, case, folder):
        assert tokens == expected, (case.family, case.drafter, case.num_ranks)
    assert case.drafter in ("none", "ngram", "suffix", "mtp") or num_drafts > 0 or max(
        ask.params.max_tokens or 0 for ask in case.asks) < 4
