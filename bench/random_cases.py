"""One random engine: drawn by a seed, run, and its tokens judged.

A greedy token is wrong if its logit in transformers lies below the largest one by more than rounding explains. Every
request is also held against a plain engine: without drafts, chunks, prefix hits and preemptions, in exact mode where
the drawn engine is. In exact mode and in float64 every difference is wrong, otherwise every difference that is no
near-tie.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from bench.random_targets import BRIDGE, PAIRS, TEXT_VOCAB, Target, make_drafter, make_target, store_in_form
from outrider.commands.compare import TOLERANCE
from outrider.core.outputs import CompletionOutput, RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.formats import RankGroup
from outrider.kernels import cpu as native
from outrider.models.base import Model
from outrider.sample.philox import gumbel
from tests.engine.harness import Ask, Rig, byte_tokenizer
from tests.models.double_oracle import DoubleOracle
from tests.models.oracle import hf_model
from tests.ranks.threads import run_threads

PROMPT, TOKENS, MOST_STEPS = 64, 60, 4000  # longest prompt and text of a request, and most steps of a round
FORMS = ("fp8", "int4", "W8A8", "W8A16", "W4A16", "FP8_DYNAMIC", "MXFP4")
GRAMMARS: list[dict[str, Any]] = [{"regex": "[ab]{3,20}c"}, {"choice": ["red", "green tea"]}, {"json_object": True}]
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
# Fields whose effect on a greedy token can be computed from logits alone.
COMPARABLE = {"max_tokens", "temperature", "ignore_eos", "logit_bias", "allowed_token_ids", "logprobs", "stop",
              "speculative", "stop_token_ids", "prompt_logprobs", "skip_reading_prefix_cache"}


class Wrong(AssertionError):
    """What the engine did that it must not do, in words."""


@dataclass
class Case:
    """A drawn engine: everything but its requests."""

    seed: int
    family: str
    drafter: str
    target: Target
    dtype: torch.dtype
    ranks: int
    is_tight: bool  # the pool holds the longest request and little more
    settings: dict[str, Any]
    drafting: dict[str, Any]

    def described(self) -> dict[str, Any]:
        named = {**self.settings, **self.drafting, "dtype": str(self.dtype).removeprefix("torch."), "ranks": self.ranks,
                 "tight": self.is_tight, "form": self.target.form, "config": self.target.changes}
        return {key: value for key, value in named.items() if key != "tokenizer"}


@dataclass
class Found:
    """Results of a case."""

    texts: list[tuple[Ask, list[int]]] = field(default_factory=list)  # of greedy requests that transformers can judge
    tokens: int = 0
    near_ties: int = 0
    drafts: int = 0
    accepted: int = 0
    hits: int = 0
    preemptions: int = 0
    aborted: int = 0


def run_case(seed: int, folder: Path) -> dict[str, Any]:
    """The line of results of one seed."""
    begin, random = time.monotonic(), Random(seed)
    family, method = PAIRS[seed % len(PAIRS)]
    line: dict[str, Any] = {"seed": seed, "family": family, "drafter": method}
    try:
        case = draw_case(seed, family, method, random, folder)
    except Refused as error:
        return line | {"refused": str(error)}
    line |= {"variant": case.target.variant}
    try:
        found = _run_served(case)
        line |= {key: value for key, value in vars(found).items() if key != "texts"}
        if case.target.has_oracle and case.target.form is None:
            line["against_transformers"] = judge_greedy(case, found.texts)
    except Wrong as error:
        line["failure"] = str(error)
    except Refused as error:
        line["refused"] = str(error)
    return line | {"settings": case.described(), "seconds": round(time.monotonic() - begin, 1)}


class Refused(Exception):
    """The combination is refused at start-up, by name."""


def draw_case(seed: int, family: str, method: str, random: Random, folder: Path) -> Case:
    try:
        target = make_target(family, method, random, folder / "target")
    except Exception as error:  # versions of transformers name the parts of a young family differently
        raise Refused(f"transformers {transformers.__version__} makes no such model: {error}") from error
    is_exact = native.available() and random.random() < 0.5
    dtype = torch.float32 if is_exact or family == BRIDGE or random.random() < 0.6 else torch.float64
    if dtype == torch.float32 and method != "mtp" and random.random() < 0.15:
        store_in_form(target, random.choice(FORMS))
    ranks = 2 if target.form is None and random.random() < 0.12 else 1
    settings = draw_settings(random) | {"exact": is_exact} | ({"attention_backend": "auto"} if is_exact else {})
    if target.vocab_size >= TEXT_VOCAB:
        settings["tokenizer"] = byte_tokenizer()
    drafting = make_drafter(method, target, _load(target, dtype), random, folder / "drafter")
    if ranks > 1:
        drafting = {key: value for key, value in drafting.items() if not key.startswith("adapt")}
        drafting["speculative_config"]["auto"] = False  # measured times differ between the ranks of this tool
    return Case(seed, family, method, target, dtype, ranks, random.random() < 0.3, settings, drafting)


def _load(target: Target, dtype: torch.dtype, group: RankGroup | None = None) -> Model:
    """The model. If its weights cannot be stored in the drawn form, they are numbers."""
    try:
        return target.load(dtype, group)
    except ValueError as error:
        if target.form in ("fp8", "int4") and "quantization=" in str(error):
            target.form = None
            return target.load(dtype, group)
        raise Refused(str(error)) from error


def draw_settings(random: Random) -> dict[str, Any]:
    padding = random.choice([{}, {}, {"pad_requests": (4, 8), "pad_tokens": (6, 24, 72)}])
    backend = random.choice(["auto"] * 16 + ["torch"] * 3 + ["flex"])
    page_size = 16 if backend == "flex" else random.choice([16, 16, 32, 64])
    return padding | {
        "page_size": page_size, "max_model_len": random.choice([100, 200]), "eos_ids": (2,),
        "max_num_seqs": random.choice([1, 2, 3, 5, 8, 16]),
        "max_num_batched_tokens": random.choice([16, 20, 33, 64, 200]),
        "overlap": random.random() < 0.5, "enable_prefix_caching": random.random() < 0.8,
        "packed_weights": random.random() < 0.7, "checkpoint_interval": max(page_size, random.choice([16, 32, 64])),
        "attention_backend": backend, "num_pages": 600,
        "logprobs_mode": random.choice(["raw", "processed"]),
    }


# Requests


def draw_asks(random: Random, vocab: int, max_len: int) -> list[Ask]:
    """Requests of which some share their beginnings, and some repeat themselves, which lookup drafters guess well."""
    shared = random.choices(range(3, min(vocab, 128)), k=PROMPT)
    asks = []
    for _ in range(random.randint(5, 12)):
        own = random.choices(range(3, min(vocab, 128)), k=random.choice([1, 2, 5, 17, 30]))
        prompt = random.choice([shared[: random.choice([15, 16, 32, 33, 48])] + own, own * 3, own])[:PROMPT]
        asks.append(Ask(prompt[: max_len - 1], draw_params(random, vocab), priority=random.choice([0, 0, 0, 1])))
    return asks


def draw_params(random: Random, vocab: int) -> SamplingParams:
    has_text = vocab >= TEXT_VOCAB
    fields: dict[str, Any] = {"max_tokens": random.choice([1, 3, 8, 8, 16, 16, 30, TOKENS]), "temperature": 0.0,
                              "ignore_eos": random.random() < 0.8}
    rare: dict[str, Any] = {
        "logit_bias": {random.randrange(vocab): random.choice([-100.0, 2.0]) for _ in range(3)},
        "allowed_token_ids": random.sample(range(3, vocab), 6), "logprobs": random.choice([0, 3]),
        "speculative": random.choice([False, 1, 3]), "stop_token_ids": random.sample(range(vocab), 2),
        "min_tokens": random.randint(0, fields["max_tokens"]), "repetition_penalty": random.choice([0.8, 1.3]),
        "frequency_penalty": 0.6, "presence_penalty": -0.4, "prompt_logprobs": 1, "skip_reading_prefix_cache": True,
    }
    if has_text:
        rare |= {"stop": ["e", "xy"], "bad_words": ["a", "bc"]}
        if HAS_GRAMMARS:
            rare["structured_outputs"] = StructuredOutputsParams(**random.choice(GRAMMARS))
    if random.random() < 0.35:
        fields |= {"temperature": random.choice([0.3, 0.8, 1.0, 2.0]), "seed": random.randrange(1 << 40),
                   "n": random.choice([1, 1, 1, 2, 3])}
        rare |= {"top_k": random.choice([1, 5, 50]), "top_p": random.choice([0.5, 0.9]), "min_p": 0.05}
    fields |= {name: value for name, value in rare.items() if random.random() < 0.04}
    if "structured_outputs" in fields:
        for name in ("allowed_token_ids", "logit_bias", "bad_words"):
            fields.pop(name, None)
    return SamplingParams(**fields)


def next_turns(random: Random, asks: Sequence[Ask], outputs: Sequence[RequestOutput], vocab: int,
               max_len: int) -> list[Ask]:
    """The requests again, some of them as the next turn: prompt and answer begin the next prompt."""
    turns = list(asks)
    for ask, output in zip(asks, outputs, strict=True):
        answer = output.outputs[0].token_ids
        prompt = [*ask.prompt, *answer, *random.choices(range(3, min(vocab, 128)), k=3)]
        if len(prompt) < max_len and random.random() < 0.3:
            turns.append(Ask(prompt, draw_params(random, vocab)))
    return turns


# Engines


def _run_served(case: Case) -> Found:
    """Run the case. What its model does not serve is left out of its settings, by the name in the refusal."""
    without: dict[str, tuple[dict[str, Any], Any]] = {
        "exact=True": ({"exact": False}, None), "attention_backend": ({"attention_backend": "auto"}, None),
        "rank": ({}, 1)}
    for _ in range(4):
        try:
            if case.ranks == 1:
                return run_engines(None, case)
            first, second = run_threads(case.ranks, run_engines, case)
            if [tokens for _, tokens in first.texts] != [tokens for _, tokens in second.texts]:
                raise Wrong("the ranks have different tokens")
            return first
        except (ValueError, NotImplementedError) as error:
            name = next((name for name in without if name in str(error)), None)
            if name is None:
                raise Refused(str(error)) from error
            settings, ranks = without.pop(name)
            case.settings |= settings
            case.ranks = ranks or case.ranks
    raise AssertionError("every refused setting is left out once")


def run_engines(group: RankGroup | None, case: Case) -> Found:
    """The requests in a plain engine without drafts, then in the drawn engine, twice. group: of a rank, which does the
    same as the others."""
    random, found = Random(case.seed), Found()
    model = _load(case.target, case.dtype, group)
    vocab, max_len = case.target.vocab_size, case.settings["max_model_len"]
    asks = draw_asks(random, vocab, max_len)
    if case.settings["attention_backend"] == "flex":  # reads the whole pool in every step
        asks, case.settings["num_pages"] = asks[:3], 60
    plain = case.settings | {"max_num_seqs": 4, "max_num_batched_tokens": 200, "overlap": False, "num_pages": 600,
                             "enable_prefix_caching": False, "pad_requests": (), "pad_tokens": ()}
    if plain["attention_backend"] == "flex":
        plain["attention_backend"] = "torch"
    with make_rig(model, plain) as rig:
        wanted = rig.run(asks)
        turns = next_turns(random, asks, wanted, vocab, max_len)
        wanted += rig.run(turns[len(asks) :])
    settings = case.settings | case.drafting
    if case.is_tight:
        longest = max(min(max_len, len(ask.prompt) + (ask.params.max_tokens or 0)) for ask in turns)
        with make_rig(model, settings) as rig:
            limits, groups = rig.engine.limits, rig.scheduler.cache.layout.groups
            settings["num_pages"] = 1 + random.randint(0, 3) + sum(
                each.kind.pages_to_start(max(longest, max_len), limits) for each in groups)
    with make_rig(model, settings) as rig:
        for requests, aborts in ((asks, True), (turns, False)):
            outputs, aborted = serve(rig, requests, random, aborts)
            for index, output in outputs.items():
                _compare(case, model, plain, requests[index], wanted[index], output, index in aborted, found)
            found.aborted += len(aborted)
        stats = rig.engine.stats
        found.drafts, found.accepted, found.hits = (stats.num_draft_tokens, stats.num_accepted_tokens,
                                                    stats.num_hit_tokens)
        found.preemptions = rig.scheduler.stats.num_preemptions
    return found


def make_rig(model: Model, settings: dict[str, Any]) -> Rig:
    return Rig(model, **settings)


def serve(rig: Rig, asks: Sequence[Ask], random: Random, aborts: bool) -> tuple[dict[int, RequestOutput], set[int]]:
    """Run the requests, which come a few at a time in any order, while some are preempted and some aborted. Returns
    their outputs, and which were aborted."""
    order = random.sample(range(len(asks)), len(asks))
    outputs: dict[int, RequestOutput] = {}
    aborted: set[int] = set()
    for _ in range(MOST_STEPS):
        for _ in range(random.choice([0, 0, 1, 2, 5]) if order else 0):
            if order:
                index = order.pop()
                rig.outputs.add(str(index), asks[index].prompt, asks[index].params, priority=asks[index].priority)
                outputs[index] = rig.outputs._outputs[str(index)]
        if not order and not rig.engine.has_work:
            break
        rig.outputs.step()
        running = list(rig.scheduler._running)
        if running and random.random() < 0.03:
            rig.scheduler._preempt(random.choice(running))
        live = [index for index, output in outputs.items() if not output.finished and index not in aborted]
        if aborts and live and random.random() < 0.02:
            chosen = random.choice(live)
            aborted.add(chosen)
            rig.engine.abort(str(chosen))
    else:
        raise Wrong(f"requests have not ended after {MOST_STEPS} steps")
    rig.assert_clean()
    return outputs, aborted


# Judging


def _compare(case: Case, model: Model, plain: dict[str, Any], ask: Ask, wanted: RequestOutput, output: RequestOutput,
             is_aborted: bool, found: Found) -> None:
    """Hold every sample of a request against that of the plain engine."""
    for index, (expected, sample) in enumerate(zip(wanted.outputs, output.outputs, strict=True)):
        found.tokens += len(sample.token_ids)
        if sample.error or expected.error:
            raise Wrong(f"{_named(ask)} ended with an error: {sample.error or expected.error}")
        theirs = expected.token_ids[: len(sample.token_ids)] if is_aborted else expected.token_ids
        place = _first_difference(theirs, sample.token_ids)
        if place is not None:
            told = _explain(case, model, plain, ask, index, place, theirs, sample.token_ids)
            if told is not None:
                raise Wrong(told)
            found.near_ties += 1
        elif not is_aborted:
            _compare_rest(case, ask, expected, sample)
        if place is None and index == 0 and ask.params.is_greedy and _is_comparable(ask.params):
            found.texts.append((ask, list(sample.token_ids)))


def _compare_rest(case: Case, ask: Ask, expected: CompletionOutput, sample: CompletionOutput) -> None:
    for name in ("text", "finish_reason", "stop_reason"):
        one, other = getattr(expected, name), getattr(sample, name)
        if one != other:
            raise Wrong(f"{_named(ask)}: {name} is {other!r} where the plain engine has {one!r}")
    if case.settings["exact"] and expected.logprobs is not None:
        both = [[{token: own.logprob for token, own in entry.items()} for entry in each.logprobs or []]
                for each in (expected, sample)]
        if both[0] != both[1]:
            raise Wrong(f"{_named(ask)}: log-probabilities differ in exact mode")


def _is_comparable(params: SamplingParams) -> bool:
    default = SamplingParams()
    return all(getattr(params, name) == getattr(default, name) for name in params.__dataclass_fields__
               if name not in COMPARABLE and name != "guided_decoding" and hasattr(default, name))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if list(one) == list(other):
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _explain(case: Case, model: Model, plain: dict[str, Any], ask: Ask, index: int, place: int,
             theirs: Sequence[int], ours: Sequence[int]) -> str | None:
    """What is wrong with the first different token; None if the two tokens are a near-tie."""
    told = (f"{_named(ask)}, sample {index}: output token {place} is {ours[place : place + 1]} where the plain engine "
            f"has {theirs[place : place + 1]}")
    if case.settings["exact"] or case.dtype == torch.float64 or max(len(theirs), len(ours)) == place:
        return told
    if place >= min(len(theirs), len(ours)):
        return told
    known, two, temperature = [*ask.prompt, *theirs[:place]], [theirs[place], ours[place]], ask.params.temperature
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    with make_rig(model, plain | {"logprobs_mode": "raw"}) as rig:
        (entry,) = rig.run([Ask(known, params)])[0].outputs[0].logprobs or [{}]
    scores = [entry[token].logprob + ask.params.effective_bias.get(token, 0.0) for token in two]
    if temperature > 0:
        seed, number, at = (torch.tensor([value]) for value in (ask.params.seed or 0, index, len(known)))
        noise = gumbel(seed, number, at, torch.tensor(two), 2, torch.float32)[0].tolist()
        scores = [score / temperature + one for score, one in zip(scores, noise, strict=True)]
    apart = abs(scores[0] - scores[1])
    return None if apart <= TOLERANCE["float32"] else f"{told}; scores {scores[0]:.5f} and {scores[1]:.5f}"


def judge_greedy(case: Case, texts: Sequence[tuple[Ask, list[int]]]) -> int:
    """Raise Wrong if transformers, given the same tokens, favours another token at some place. Returns the number of
    tokens that were judged."""
    transformers, single, count, judged = DoubleOracle(case.target.folder), None, 0, set()
    for ask, tokens in texts:
        if not tokens or (key := (*ask.prompt, -1, *tokens, repr(ask.params))) in judged:
            continue
        judged.add(key)
        known = [*ask.prompt, *tokens[:-1]]
        logits = edited(transformers.logits(known)[len(ask.prompt) - 1 :], ask.params)
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        finite = logits.masked_fill(logits.isinf(), 0).abs().amax(-1).clamp_min(1.0)
        allowed = finite * (1e-7 if case.dtype == torch.float64 else 2e-4)
        if bool((gaps > allowed).any()):
            single = single or hf_model(case.target.folder, attn_implementation="eager")
            with torch.no_grad():
                rounded = edited(single(torch.tensor([known])).logits[0][len(ask.prompt) - 1 :].double(), ask.params)
            noise = (rounded - logits).nan_to_num(0.0).abs().amax(-1)  # a place where single numbers go another way
            allowed = allowed + 4 * noise * (case.dtype == torch.float32)
        for place, (gap, most) in enumerate(zip(gaps.tolist(), allowed.tolist(), strict=True)):
            if gap > most:
                raise Wrong(f"{_named(ask)}: output token {place} is {tokens[place]}, and transformers favours "
                            f"{int(logits[place].argmax())} by {gap:.2e}, where rounding explains {most:.2e}")
        count += len(tokens)
    return count


def edited(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits with the request's biases, and without the tokens that it forbids."""
    logits = logits.clone()
    for token, bias in params.effective_bias.items():
        logits[:, token] += bias
    if params.allowed_token_ids:
        left_out = torch.ones(logits.shape[1], dtype=torch.bool)
        logits[:, left_out.index_fill_(0, torch.tensor(params.allowed_token_ids), False)] = -torch.inf
    return logits


def _named(ask: Ask) -> str:
    default = SamplingParams()
    given = {name: getattr(ask.params, name) for name in ask.params.__dataclass_fields__ if hasattr(default, name)
             and getattr(ask.params, name) != getattr(default, name)}
    return f"request of {len(ask.prompt)} tokens {ask.prompt[:4]}... with {given}"
