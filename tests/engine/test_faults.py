"""Faults stay where they happen: a step fails at a random place, and every request but the one to blame gives the
tokens of an engine in which nothing fails, in that round and in later ones.

The rigs live for many rounds with few pages and a prefix cache, so that whatever a failed step leaves behind is found
by somebody. Every blank page is poisoned before every step.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from outrider import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.base import Model
from tests.drafters.hybrid_rig import FAMILIES, hybrid_of, mtp_of
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.drafters.latent_rig import latent_of
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.fault_injector import Fault, FaultInjector
from tests.engine.harness import Ask, Rig, greedy, prompt_of, random_model, tiny_model
from tests.engine.recurrent_rig import hybrid

K = 3
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "max_position_embeddings": 256, "norm_topk_prob": True,
}


@functools.cache
def model_of(family: str) -> Model:
    if family == "moe":
        return random_model(MOE, torch.float64, 7)
    if family in FAMILIES:
        return hybrid_of(family)
    if family in LATENT:
        return latent_of(family)
    return hybrid(family) if family in ("mamba2", "gated_delta") else tiny_model(family)


@functools.cache
def asks_of(family: str) -> list[Ask]:
    """Prompts that share prefixes, greedy and drawn: more of them than the pool holds."""
    vocab, prompts = model_of(family).vocab_size, []
    for stem in (prompt_of(seed, 34, vocab) for seed in (1, 2, 3)):
        prompts += [stem, [*stem[:32], 5, 6, 7], stem[:17], stem[:5] * 6, stem[14:], [*stem, *stem[3:15]], stem[:3],
                    [*stem[:16], *stem[20:29]]]
    return [Ask(prompt, greedy(5 + i % 8) if i % 2 else SamplingParams(seed=i, max_tokens=4 + i % 8))
            for i, prompt in enumerate(prompts)]


@functools.cache
def expected_of(family: str) -> list[list[int]]:
    with Rig(model_of(family), overlap=False, enable_prefix_caching=False) as rig:
        return [output.outputs[0].token_ids for output in rig.run(asks_of(family))]


def drafter_of(name: str, family: str) -> Drafter | None:
    match name:
        case "ngram":
            return NgramDrafter(K, min_n=1, max_n=4)
        case "mtp":
            return mtp_of(model_of(family), K)
        case "scripted":  # right, but for every fourth token
            answers = {tuple(ask.prompt): answer
                       for ask, answer in zip(asks_of(family), expected_of(family), strict=True)}
            return ScriptedDrafter(K, lambda prompt, _: [
                (token + (i % 4 == 3)) % 24 for i, token in enumerate(answers.get(prompt, []))])
    return None


@dataclass
class Tally:
    num_cases: int = 0
    num_tokens: int = 0
    num_culprits: int = 0
    injected: Counter[str] = None  # type: ignore[assignment]


def run_cases(family: str, depth: int, drafter: str, num_cases: int, seed: int,
              monkeypatch: pytest.MonkeyPatch) -> Tally:
    rng, asks, expected = Random(seed), asks_of(family), expected_of(family)
    tally = Tally()
    settings: dict[str, Any] = {"max_num_seqs": 3, "num_pages": 14, "max_num_batched_tokens": 44}
    if family not in ("llama", "sliding", "moe"):  # more groups, or states
        settings |= {"num_pages": 40, "checkpoint_interval": 16}
    with Rig(model_of(family), depth=depth, drafter=drafter_of(drafter, family), **settings) as rig:
        injector = FaultInjector(rig, monkeypatch)
        for case in range(num_cases):
            chosen = [rng.randrange(len(asks)) for _ in range(rng.randint(1, 4))]
            chosen.insert(0, chosen[0])  # some share what others are computing
            blamed = rng.choice([None, None, rng.randrange(len(chosen))])
            fault = Fault(rng.choice(injector.places), rng.randrange(0, 12))
            if blamed is not None:
                rig_id = next_request_id(rig) + blamed
                prompt = len(asks[chosen[blamed]].prompt)
                fault = Fault(rng.choice([p for p in injector.places if "emit" not in p and "fold" not in p]),
                              rng.randrange(0, 2), rig_id, rng.choice([0, prompt // 2, prompt + 1]))
            injector.arm(None if case % 5 == 4 else fault)
            before = injector.num_injected.total()
            outputs = rig.run([asks[i] for i in chosen])
            injector.arm(None)
            num_injected = injector.num_injected.total() - before
            errors = [i for i, output in enumerate(outputs) if output.outputs[0].error is not None]
            allowed = [blamed] if blamed is not None else []
            if fault.place == "before emit" and num_injected:
                assert len(errors) == 1, "a sample whose text fails ends, and nobody else"
                allowed = errors
            assert set(errors) <= set(allowed), (case, fault, [o.outputs[0].error for o in outputs])
            if blamed is not None and num_injected > 1:
                assert errors == [blamed], (case, fault, num_injected, "whoever makes every step fail is found")
                tally.num_culprits += 1
            for i, output in zip(chosen, outputs, strict=True):
                sample = output.outputs[0]
                wanted = expected[i] if sample.error is None else expected[i][: len(sample.token_ids)]
                assert sample.token_ids == wanted, (case, fault, i)
                tally.num_tokens += len(sample.token_ids)
            tally.num_cases += 1
            rig.batches.clear()
            rig.results.clear()
            rig._blank.clear()
        tally.injected = injector.num_injected
        assert rig.scheduler.cache.stats.hit_tokens > 0 or num_cases < 20
        assert rig.scheduler.cache.promises.num_shared > 0 or num_cases < 20, "requests shared what others computed"
        assert rig.scheduler.stats.max_steps_in_flight == depth
    return tally


def next_request_id(rig: Rig) -> int:
    """The scheduler's id of the request that is added next."""
    return int(repr(rig.engine._requests._ids)[6:-1])


CELLS = {  # family, steps in flight, drafter -> cases
    ("llama", 1, ""): 40, ("llama", 2, ""): 70, ("llama", 3, "ngram"): 50, ("sliding", 3, ""): 50,
    ("gemma3", 2, "ngram"): 50, ("moe", 2, ""): 40, ("mamba2", 2, ""): 40, ("gated_delta", 3, "ngram"): 30,
    ("qwen3_5", 2, "mtp"): 40, ("nemotron_h", 3, "scripted"): 30, ("deepseek_v3", 2, "mtp"): 30,
    ("deepseek_v32", 3, "ngram"): 30, ("deepseek_v32", 2, "mtp"): 20, ("deepseek_v32_modules", 2, "mtp"): 12,
    ("glm_moe_dsa", 3, "mtp"): 12, ("hy_v4", 2, "mtp"): 12,
}


# Others of the same kind of cache and drafter are among the quick ones.
LONG = {("moe", 2, ""), ("deepseek_v3", 2, "mtp"), ("llama", 3, "ngram"), ("sliding", 3, ""), ("mamba2", 2, ""),
        ("qwen3_5", 2, "mtp"), ("deepseek_v32", 3, "ngram"), ("deepseek_v32_modules", 2, "mtp"),
        ("hy_v4", 2, "mtp")}
QUICK = [pytest.param(cell, marks=pytest.mark.long if cell in LONG else ()) for cell in CELLS]


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: "-".join(map(str, cell)).rstrip("-"))
def test_every_request_but_the_culprit_gives_the_references_tokens(
    cell: tuple[str, int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = run_cases(*cell, CELLS[cell], 1, monkeypatch)
    assert tally.injected.total() > CELLS[cell] // 3 and tally.num_culprits > 0
    print(f"{cell}: {tally.num_cases} cases, {tally.injected.total()} faults, {tally.num_culprits} culprits, "
          f"{tally.num_tokens} tokens")


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)).rstrip("-"))
def test_many_faults(cell: tuple[str, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    places: Counter[str] = Counter()
    for seed in range(2, 12):
        with monkeypatch.context() as patch:
            places += run_cases(*cell, CELLS[cell], seed, patch).injected
    assert len(places) >= 20, "some places never failed"
