"""The exactness matrix with drafters, in float64: any difference is a bug.

Every lookup drafter and the draft model over chunking, prefix cache, overlap, padding and preemption; and a scripted
drafter whose errors hypothesis places, so that every pattern of acceptance is met, across pages, chunks and the end of
the model's length. Every cell asserts that its condition occurred.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import Drafter
from outrider.drafters.combined import CombinedDrafter
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.drafters.ngram import NgramDrafter
from tests.covering import grid, num_examples
from tests.drafters.checkpoints import make_drafter
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import Ask, Rig, prompt_of, tiny_model, tokens_of

FAMILIES = ("llama", "gemma3")
DRAFTERS = ("ngram", "suffix", "draft_model", "ngram+draft_model")
HEADS = ("eagle", "eagle3", "mtp")  # from checkpoints with random weights
K = 3
# A period in the prompt gives lookups something to find; lengths lie around page boundaries.
PROMPTS = [prompt_of(1, 7) * 3, prompt_of(2, 15), prompt_of(3, 16) * 2, prompt_of(4, 5) * 8]
PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 11},
    "all": {"temperature": 0.9, "seed": 3, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2,
            "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {9: 2.0}, "min_tokens": 5,
            "bad_words_token_ids": ((11,), (12, 13))},
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 9},
    "no overlap": {"overlap": False},
    "overlap": {"overlap": True},
    "padded": {"pad_requests": (4, 8), "pad_tokens": (16, 32, 64)},
    "no prefix cache": {"enable_prefix_caching": False},
}


def asks(kind: str, max_tokens: int = 20) -> list[Ask]:
    return [Ask(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **PARAMS[kind])) for prompt in PROMPTS]


@cache
def expected(family: str, kind: str, max_tokens: int = 20) -> list[list[list[int]]]:
    with Rig(tiny_model(family)) as rig:
        return tokens_of(rig.run(asks(kind, max_tokens)))


def drafter_of(name: str, family: str) -> Drafter | None:
    model = tiny_model(family)
    network = DraftModelNetwork(tiny_model(family), model.num_layers, model.vocab_size)
    draft = AutoregressiveDrafter("draft_model", network, K)
    match name:
        case "ngram":
            return NgramDrafter(K, min_n=1, max_n=3)
        case "draft_model":
            return draft
        case "ngram+draft_model":
            return CombinedDrafter([NgramDrafter(K, min_n=2, max_n=3), draft])
    return None


# Every two of these meet in a quick cell.
ALL = grid(list(product(FAMILIES, DRAFTERS, PARAMS, CONDITIONS)), strength=2)


@pytest.mark.parametrize(("family", "name", "kind", "condition"), ALL)
def test_tokens_do_not_depend_on_the_drafter(family: str, name: str, kind: str, condition: str) -> None:
    config = {"method": "suffix" if name == "suffix" else "ngram", "num_speculative_tokens": K, "auto": False}
    options = {"num_pages": 160, **CONDITIONS[condition]}
    with Rig(tiny_model(family), drafter=drafter_of(name, family), speculative_config=config, **options) as rig:
        first = rig.run(asks(kind))
        again = rig.run(asks(kind))  # the second time prefixes hit, where they may
        assert tokens_of(first) == tokens_of(again) == expected(family, kind)
        metrics = [output.metrics for output in first + again]
        hits = sum(output.metrics.num_cached_tokens for output in again)
        assert (hits > 0) == (condition != "no prefix cache")
        assert sum(m.num_draft_tokens for m in metrics) > 0
        if name == "suffix":  # the second time it has seen the outputs
            assert sum(output.metrics.num_accepted_tokens for output in again) > 0
        if "draft_model" in name and kind != "all":  # a copy of the target, with the target's noise: nearly all stand
            assert sum(m.num_accepted_tokens for m in metrics) > 0.6 * sum(m.num_draft_tokens for m in metrics)
        assert (rig.runner.num_padded_steps > 0) == (condition == "padded")
        assert (rig.scheduler.stats.max_steps_in_flight == 2) == (condition == "overlap")
        if condition == "chunks":
            assert max(batch.num_tokens for batch in rig.batches) <= 9


ALONE: list[dict[str, Any]] = [
    {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.8},
    {"frequency_penalty": 0.4}, {"logit_bias": {token: 2.0 for token in range(30)}},
    {"bad_words_token_ids": ((11,), (12, 13))}, {"allowed_token_ids": list(range(0, 256, 5))},
    {"min_tokens": 9, "stop_token_ids": list(range(60))}, {"logprobs": 3}, {"temperature": 0},
    {key: value for key, value in PARAMS["all"].items() if key not in ("temperature", "seed")},
]


def asks_alone() -> list[Ask]:
    """One request for each parameter, and one for all of them: each has the others for mates."""
    params = [{"temperature": 0.8, "seed": i, "max_tokens": 12} | one for i, one in enumerate(ALONE)]
    return [Ask(PROMPTS[i % len(PROMPTS)], SamplingParams(**one)) for i, one in enumerate(params)]


@cache
def expected_alone() -> list[list[list[int]]]:
    with Rig(tiny_model("llama")) as rig:
        return tokens_of(rig.run_one_by_one(asks_alone()))


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("name", [*DRAFTERS, *HEADS])
def test_every_parameter_with_every_drafter(name: str, preempts: bool, tmp_path: Path) -> None:
    config = {"method": "suffix" if name == "suffix" else "ngram", "num_speculative_tokens": K, "auto": False}
    if name in HEADS:
        config = make_drafter(name, "llama", tmp_path).speculative(K)
    with Rig(tiny_model("llama"), drafter=drafter_of(name, "llama"), speculative_config=config, num_pages=160) as rig:
        outputs = rig.run(asks_alone(), after_step=rig.preempt if preempts else None)
        assert tokens_of(outputs) == expected_alone()
        assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
        assert (rig.scheduler.stats.num_preemptions > 0) == preempts


def script_of(family: str, kind: str, errors: frozenset[int], max_tokens: int) -> Any:
    """The true continuation of each prompt, wrong at the chosen places."""
    truth = {tuple(p): run[0] for p, run in zip(PROMPTS, expected(family, kind, max_tokens), strict=True)}

    def script(prompt: tuple[int, ...], sample_index: int) -> list[int]:
        return [token if i not in errors else (token + 1) % 256 for i, token in enumerate(truth[prompt])]

    return script


@settings(max_examples=num_examples(20))
@given(
    errors=st.frozensets(st.integers(0, 59), max_size=30), k=st.integers(1, 5),
    offered=st.lists(st.integers(0, 5), min_size=1, max_size=7), budget=st.sampled_from([8, 11, 64]),
    overlap=st.booleans(), preempt=st.booleans(), page=st.sampled_from([16, 32]),
    kind=st.sampled_from(["greedy", "sampled"]), family=st.sampled_from(FAMILIES),
)
def test_any_pattern_of_acceptance_gives_the_same_tokens(
    errors: frozenset[int], k: int, offered: list[int], budget: int, overlap: bool, preempt: bool, page: int, kind: str,
    family: str,
) -> None:
    """60 tokens run past several pages and, for the longest prompt, into the end of the model's length."""
    drafter = ScriptedDrafter(k, script_of(family, kind, errors, 60), lambda position: offered[position % len(offered)])
    config = {"method": "ngram", "num_speculative_tokens": k, "auto": False}
    with Rig(tiny_model(family), drafter=drafter, speculative_config=config, overlap=overlap, page_size=page,
             max_num_batched_tokens=budget, num_pages=160) as rig:
        outputs = rig.run(asks(kind, 60), after_step=rig.preempt if preempt else None)
        assert tokens_of(outputs) == expected(family, kind, 60)
        assert not preempt or rig.scheduler.stats.num_preemptions > 0


def test_every_accepted_count_occurs_and_lengths_end_exactly() -> None:
    counts: set[tuple[int, int]] = set()
    for every in (2, 3, 4, 5, 100):
        errors = frozenset(range(every - 1, 60, every))
        drafter = ScriptedDrafter(4, script_of("llama", "greedy", errors, 60))
        config = {"method": "ngram", "num_speculative_tokens": 4, "auto": False}
        with Rig(tiny_model("llama"), drafter=drafter, speculative_config=config, num_pages=160) as rig:
            outputs = rig.run(asks("greedy", 60))
            assert tokens_of(outputs) == expected("llama", "greedy", 60)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert len(output.outputs[0].token_ids) == min(60, 96 - len(prompt))
            parts = [part for result in rig.results for part in result.requests if part.run]
            counts |= {(part.num_drafted, part.num_accepted) for part in parts}
    assert {accepted for drafted, accepted in counts if drafted == 4} == {0, 1, 2, 3, 4}
