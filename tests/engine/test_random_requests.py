"""Random requests in random engines: each has the tokens, the text and the log-probabilities that it has alone.

Whatever parameters are combined, and whichever its mates ask for: a stage of the sampler runs for a whole batch once
one request needs it. In float64, where any difference is a bug; a token of the models is a byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.drafters.base import Drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.base import Model
from tests.drafters.hybrid_rig import FAMILIES as HYBRIDS
from tests.drafters.hybrid_rig import mtp_of
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CONFIGS, VOCAB, Ask, Rig, byte_tokenizer, prompt_of, random_model

pytest.importorskip("llguidance")

MODELS = {**CONFIGS, "nemotron_h": HYBRIDS["nemotron_h"], "qwen3_next": HYBRIDS["qwen3_next"], **LATENT}
WITH_MODULES = ("qwen3_next", *LATENT)
FORMS: list[dict[str, Any]] = [{"regex": "[ab]{3,9}c"}, {"choice": ["red", "green tea"]}, {"json_object": True}]
SHARED = prompt_of(0, 80)
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 150))]


def random_params(draw: random.Random) -> SamplingParams:
    """Each parameter in one of three requests or so."""
    max_tokens = draw.choice([1, 5, 9, 16])
    given: dict[str, Any] = {
        "top_k": draw.choice([1, 5, 50, 300]), "top_p": draw.choice([1e-9, 0.5, 0.9]),
        "min_p": draw.choice([0.01, 1.0]), "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2), "repetition_penalty": draw.choice([0.5, 1.3]),
        "min_tokens": draw.randint(0, max_tokens),
        "logit_bias": {draw.randrange(VOCAB): draw.choice([-100.0, 5.0, 1e9]) for _ in range(draw.choice([1, 60]))},
        "bad_words": ["a", "bc"], "stop_token_ids": draw.sample(range(VOCAB), 20), "stop": ["e", "xy"],
        "include_stop_str_in_output": True, "ignore_eos": True, "logprobs": draw.choice([0, 3, -1]),
        "prompt_logprobs": 1, "speculative": draw.choice([False, 1]), "skip_reading_prefix_cache": True,
        "structured_outputs": StructuredOutputsParams(**draw.choice(FORMS)),
        "allowed_token_ids": draw.sample(range(3, 20), 3),
    }
    chosen = {name: value for name, value in given.items() if draw.random() < 0.3}
    if "structured_outputs" in chosen:
        chosen.pop("allowed_token_ids", None)  # no text would have both
    temperature = draw.choice([0.0, 0.0, 0.5, 1.0, 3.0])
    return SamplingParams(temperature=temperature, seed=draw.randrange(1 << 40), max_tokens=max_tokens, **chosen)


def random_asks(draw: random.Random) -> list[Ask]:
    prompts = [[*SHARED[: draw.choice([0, 15, 16, 33, 64])], *draw.choices(range(97, 103), k=draw.choice([1, 5, 30]))]
               for _ in range(draw.randint(2, 4))]
    return [Ask(prompt, random_params(draw), priority=draw.choice([0, 0, 1])) for prompt in prompts]


def random_drafter(draw: random.Random, family: str, model: Model,
                   right: dict[tuple[int, ...], list[int]]) -> Drafter | None:
    most = draw.randint(1, 4)

    def script(prompt: tuple[int, ...], _: int) -> list[int]:
        """The right text with every fourth token wrong."""
        return [token if i % 4 else (token + 1) % VOCAB for i, token in enumerate(right.get(prompt, []), 1)]

    match draw.choice(["none", "ngram", "scripted", "mtp"]):
        case "ngram":
            return NgramDrafter(most, min_n=1, max_n=3)
        case "mtp" if family in WITH_MODULES:
            return mtp_of(model, most)
        case "none":
            return None
    return ScriptedDrafter(most, script)


def facts(output: RequestOutput) -> Any:
    """Everything that a caller sees, with log-probabilities as far as another order of additions leaves them alike."""

    def logprobs(places: Any) -> Any:
        return places and [entry and {token: (round(max(own.logprob, -1e9), 5) + 0.0, own.rank)
                                      for token, own in entry.items()} for entry in places]

    sample = output.outputs[0]
    return (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, sample.error,
            logprobs(sample.logprobs), logprobs(output.prompt_logprobs))


def growing_asks(draw: random.Random) -> list[Ask]:
    """Requests that grow by a page or two, and end by their length alone."""
    asks = []
    for _ in range(draw.randint(3, 4)):
        params = replace(random_params(draw), max_tokens=draw.randint(17, 24), min_tokens=0, ignore_eos=True, stop=(),
                         stop_token_ids=(), structured_outputs=None)
        asks.append(Ask([*SHARED[: draw.choice([0, 13])], *draw.choices(range(97, 103), k=draw.choice([2, 15, 16]))],
                        params, priority=draw.choice([0, 0, 1])))
    return asks


class RandomEngine:
    """A random model with random requests, and the settings of a random engine that runs them together."""

    def __init__(self, seed: int, make_asks: Callable[[random.Random], list[Ask]]) -> None:
        self.draw = draw = random.Random(seed)
        self.family = draw.choice(sorted(MODELS))
        self.model = random_model(MODELS[self.family] | {"vocab_size": VOCAB}, torch.float64, seed)
        self.asks = make_asks(draw)
        common: dict[str, Any] = {"tokenizer": byte_tokenizer(), "eos_ids": (2,), "max_model_len": 128,
                                  "logprobs_mode": draw.choice(["raw", "processed"])}
        with Rig(self.model, max_num_batched_tokens=128, enable_prefix_caching=False, overlap=False, **common) as rig:
            alone = rig.run_one_by_one(self.asks)
        self.wanted = [facts(output) for output in alone]
        right = {tuple(ask.prompt): output.outputs[0].token_ids for ask, output in zip(self.asks, alone, strict=True)}
        kind = draw.randrange(1 << 30)
        # A drafter belongs to one engine, so each rig gets its own.
        self.make_drafter = lambda: random_drafter(random.Random(kind), self.family, self.model, right)
        self.settings = common | draw.choice([{}, {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)}]) | {
            "max_num_seqs": draw.choice([2, 4]), "max_num_batched_tokens": draw.choice([20, 33, 64]),
            "overlap": draw.random() < 0.5,
        }

    def rig(self, **changes: Any) -> Rig:
        return Rig(self.model, drafter=self.make_drafter(), **(self.settings | changes))

    def check(self, rig: Rig, after_step: Callable[[], None] | None = None) -> None:
        for _ in range(2):  # the second time with prefix hits
            order = self.draw.sample(range(len(self.asks)), len(self.asks))
            together = rig.run([self.asks[i] for i in order], after_step=after_step)
            assert [facts(output) for output in together] == [self.wanted[i] for i in order]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_has_what_it_has_alone(seed: int) -> None:
    random_engine = RandomEngine(seed, random_asks)
    draw = random_engine.draw
    with random_engine.rig() as rig:
        def preempt() -> None:
            running = list(rig.scheduler._running)
            if running and draw.random() < 0.2:
                rig.scheduler._preempt(draw.choice(running))

        random_engine.check(rig, preempt)


@pytest.mark.parametrize("seeds", [[0, 5, 9], pytest.param(range(60), marks=pytest.mark.long)], ids=["few", "many"])
def test_a_pool_that_is_too_small_for_all_changes_nothing(seeds: Iterable[int]) -> None:
    """It holds the longest request and little more, so that the scheduler has to preempt."""
    counts = []
    for seed in seeds:
        random_engine = RandomEngine(seed, growing_asks)
        longest = max(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in random_engine.asks)
        with random_engine.rig(max_num_seqs=4, max_model_len=longest) as rig:
            groups, limits = rig.scheduler.cache.layout.groups, rig.engine.limits
            num_pages = 1 + sum(group.kind.pages_to_start(longest, limits) for group in groups)
        with random_engine.rig(max_num_seqs=4, max_model_len=longest, num_pages=num_pages + seed % 3) as rig:
            random_engine.check(rig)
            counts.append(rig.scheduler.stats.num_preemptions)
    assert sum(count > 0 for count in counts) > 0.8 * len(counts) and sum(counts) > 2 * len(counts), counts
