"""Random engines of every family with every drafter have the texts of transformers, in float64 throughout.

A seed draws the pair of family and drafter, the settings and the requests. OUTRIDER_PAIR_CASES sets how many seeds run,
and OUTRIDER_PAIR_FIRST_CASE the first; as many as there are pairs meet each of them once. The greedy texts are held
against transformers; sampled ones against an engine without drafts that computes one request at a time.

Vocabularies are of 16 tokens, so that random drafters are right now and then.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.models.base import Model
from tests.drafters.blocks import FORMS, make_block
from tests.drafters.checkpoints import LAYER
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CONFIGS, Ask, Rig, tokens_of
from tests.models import oracle
from tests.models.double_oracle import DoubleOracle
from tests.models.prediction_modules import add_modules, has_modules

pytestmark = [pytest.mark.long, oracle.needs_kda]
NUM_CASES = int(os.environ.get("OUTRIDER_PAIR_CASES", "24"))
FIRST = int(os.environ.get("OUTRIDER_PAIR_FIRST_CASE", "0"))
VOCAB, HIDDEN = 16, 64
FAMILIES = sorted(oracle.ALL)
METHODS = ("ngram", "suffix", "scripted", "draft_model", "eagle", "eagle3", "learning", "block", "ngram+eagle3")
PAIRS = [(family, method) for family in FAMILIES for method in (*METHODS, *["mtp"] * has_modules(family))]
Random(0).shuffle(PAIRS)
PLAIN: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 128, "num_pages": 400,
                         "overlap": False, "enable_prefix_caching": False}


class Known(NamedTuple):
    """A family's model, requests of it, and the text of each."""

    folder: Path
    model: Model
    asks: list[Ask]
    texts: list[list[int]]


def asks_of(family: str) -> list[Ask]:
    """Requests that share their beginnings and repeat themselves; the last three are sampled."""
    random = Random(zlib.crc32(family.encode()))

    def some(count: int) -> list[int]:
        return random.choices(range(3, VOCAB), k=count)

    def asked(prompt: list[int], **fields: Any) -> Ask:
        return Ask(prompt, SamplingParams(max_tokens=12, ignore_eos=True, **({"temperature": 0} | fields)))

    shared = some(48)
    return [
        asked(shared + some(5)), asked(shared[:33] + some(9)), asked([7, 8, 9, 10] * 9), asked(some(3)),
        asked(shared[:16] + [7, 8] * 5, allowed_token_ids=[7, 8]), asked(some(17), logit_bias={7: 2.0}),
        asked(shared[:40] + some(1), temperature=0.7, seed=3),
        asked(shared[:16] + some(7), temperature=1.0, seed=6, repetition_penalty=1.2, presence_penalty=0.3),
        asked([7, 8, 9, 10] * 7, temperature=0.3, seed=5, top_p=0.9),
    ]


def assert_likeliest(transformers: DoubleOracle, ask: Ask, text: list[int]) -> None:
    """Each token of a greedy text is the one that transformers finds likeliest."""
    logits = transformers.logits(ask.prompt + text[:-1])[len(ask.prompt) - 1 :].clone()
    for token, bias in (ask.params.logit_bias or {}).items():
        logits[:, token] += bias
    if ask.params.allowed_token_ids:
        left_out = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(ask.params.allowed_token_ids), False)
        logits[:, left_out] = -torch.inf
    assert text == logits.argmax(-1).tolist(), f"margin {logits.topk(2).values.diff().abs().min():.2e}"


@pytest.fixture(scope="module")
def known_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    root = tmp_path_factory.mktemp("families")

    @lru_cache(8)
    def make(family: str) -> Known:
        if not (folder := root / family).exists():
            oracle.make_folder(family, folder, vocab_size=VOCAB)
            if has_modules(family):
                add_modules(family, folder)
        model, asks, transformers = oracle.load(folder, torch.float64), asks_of(family), DoubleOracle(folder)
        with Rig(model, **PLAIN) as rig:
            texts = [samples[0] for samples in tokens_of(rig.run_one_by_one(asks))]
        for ask, text in zip(asks, texts, strict=True):
            if ask.params.temperature == 0:
                assert_likeliest(transformers, ask, text)
        return Known(folder, model, asks, texts)

    return make


def draw_settings(random: Random) -> dict[str, Any]:
    page_size = random.choice([16, 32, 64])
    padding = random.choice([{}, {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)}])
    return padding | {
        "page_size": page_size, "max_model_len": 128, "num_pages": 200, "max_num_seqs": random.choice([1, 3, 4, 8]),
        "max_num_batched_tokens": random.choice([16, 20, 33, 128]), "overlap": random.random() < 0.6,
        "enable_prefix_caching": random.random() < 0.8, "packed_weights": random.random() < 0.7,
        "checkpoint_interval": max(page_size, random.choice([16, 32, 64])),
        "attention_backend": random.choice(["auto", "auto", "torch"]),
    }


def draw_drafter(method: str, known: Known, random: Random, folder: Path) -> dict[str, Any]:
    """Settings of an engine with a drafter that has random weights."""
    own = {"method": method, "num_speculative_tokens": random.randint(1, 5), "auto": False}
    layer = LAYER | {"hidden_size": HIDDEN, "head_dim": random.choice([8, 16]), "vocab_size": VOCAB}
    heads = {"eagle": layer | {"architectures": ["LlamaForCausalLM"]},
             "eagle3": layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB,
                                "eagle_aux_hidden_state_layer_ids": [0, 2, known.model.num_layers]},
             "draft_model": CONFIGS["llama"] | {"vocab_size": VOCAB}}
    match method:
        case "scripted":
            texts = {tuple(ask.prompt): text for ask, text in zip(known.asks, known.texts, strict=True)}
            every = random.randint(2, 6)  # the place of an error

            def script(prompt: tuple[int, ...], _: int) -> list[int]:
                return [token if i % every else (token + 1) % VOCAB for i, token in enumerate(texts[prompt], 1)]

            return {"drafter": ScriptedDrafter(random.randint(1, 5), script)}
        case "block":
            make_block(random.choice(FORMS), known.model, folder, layer["head_dim"])
            return {"speculative_config": own | {"model": str(folder)}}
        case "mtp":
            return {"speculative_config": own | {"model": str(known.folder)}}
        case "ngram" | "suffix":
            return {"speculative_config": own | {"prompt_lookup_min": 1}}
    learns = {"adapt_drafter": True, "adapt_share": 1.0, "adapt_memory_bytes": 16 << 20}
    kind = "eagle3" if method in ("learning", "ngram+eagle3") else method
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(heads[kind]))
    config = own | {"method": method.split("+") if "+" in method else kind, "model": str(folder)}
    return {"speculative_config": config, "load_format": "dummy"} | (learns if method == "learning" else {})


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_CASES))
def test_texts_are_those_of_transformers(seed: int, known_of: Callable[[str], Known], tmp_path: Path) -> None:
    random = Random(seed)
    family, method = PAIRS[seed % len(PAIRS)]
    known = known_of(family)
    settings = draw_settings(random) | draw_drafter(method, known, random, tmp_path / "drafter")
    chosen = random.sample(range(len(known.asks)), 4)
    with Rig(known.model, **settings) as rig:
        def preempt() -> None:
            running = list(rig.scheduler._running)
            if running and random.random() < 0.1:
                rig.scheduler._preempt(random.choice(running))

        for after_step in (preempt, None):  # the second time with prefix hits, and with texts that are known
            found = tokens_of(rig.run([known.asks[i] for i in chosen], after_step=after_step))
            assert found == [[known.texts[i]] for i in chosen], (family, method)
        assert sum(part.num_drafted for result in rig.results for part in result.requests) > 0
