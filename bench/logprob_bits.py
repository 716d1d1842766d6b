"""Counts sampled tokens whose log-probabilities are not the bits that `prompt_logprobs` gives for the same ids.

    python bench/logprob_bits.py smollm2
    python bench/logprob_bits.py bench/configs/llama8b --load-format dummy --speculative-config \\
        '{"method": "eagle3", "model": "bench/configs/llama8b-eagle3", "num_speculative_tokens": 3}'

In exact mode, with n-gram drafts and with those of the model's own drafter, or of the one that --speculative-config
names. Every engine samples requests of different lengths, parameters and numbers of log-probabilities: fresh ones, the
same again with prefix hits, and some beside a request that asks for more log-probabilities than kernels report. Then
the same engine reports on every prompt with its answer. Values, ranks and likeliest tokens are compared, bit for bit.

With --load-format dummy weights are drawn from N(0, 0.02) and norms are one, as in `bench/exact.py`.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.exact import NGRAM, happened_in, load_random, make_asks
from outrider.commands.loading import Loaded, load
from outrider.commands.parser import Parser, add_engine_flags, add_model, engine_config
from outrider.commands.run_prompts import Ask, run_prompts
from outrider.config import EngineConfig
from outrider.core import SamplingParams
from outrider.core.outputs import Logprob
from outrider.llm import LLM

ROUNDS = ("fresh", "prefix hits", "a mate with many")
NUMS = (0, 20, 1, 5)  # of the likeliest tokens
MANY = 200  # more than kernels report
TEMPERATURES: tuple[dict[str, Any], ...] = (  # parameters of the requests, in turn
    {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 1.5, "top_k": 50},
    {"temperature": 0.9, "frequency_penalty": 0.3},
)
Place = dict[int, Logprob] | None


@dataclass
class Result:
    """The counts of one case."""

    model: str
    case: str
    tokens: int
    differing_chosen: int  # tokens whose own log-probability or rank has other bits
    differing_likeliest: int  # tokens beside which one of the likeliest tokens has
    happened: dict[str, int]
    is_met: bool  # whether there were drafts, and prefix hits where the case is about them
    seconds: float

    @property
    def num_differing(self) -> int:
        return self.differing_chosen + self.differing_likeliest


def vary(asks: Sequence[Ask], tokens: int, seed: int) -> list[Ask]:
    """The asks with parameters of many kinds, and lengths that come to `tokens` at least."""
    chance, made = random.Random(seed), []
    for index, ask in enumerate(asks):
        length = max(2, round(2 * tokens / len(asks) * (0.2 + 0.6 * chance.random())))
        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, seed=seed + index,
                                logprobs=NUMS[index % len(NUMS)], **TEMPERATURES[index % len(TEMPERATURES)])
        made.append(replace(ask, params=params))
    last, so_far = made[-1], sum(ask.params.max_tokens or 0 for ask in made)
    length = (last.params.max_tokens or 0) + max(0, tokens - so_far)
    return [*made[:-1], replace(last, params=replace(last.params, max_tokens=length))]


def run_round(llm: LLM, asks: Sequence[Ask], name: str) -> Result:
    """Sample the asks, then ask for the log-probabilities of their prompts with their answers."""
    begin, before = time.monotonic(), happened_in(llm)
    if name == ROUNDS[2]:  # of the same kinds as the others, and as long as the longest
        loud = max(asks, key=lambda ask: ask.params.max_tokens or 0)
        asks = [*asks, replace(loud, params=replace(loud.params, logprobs=min(MANY, llm.engine.limits.vocab_size)))]
    answers = [output.outputs[0] for output in run_prompts(llm, asks).outputs]
    happened = {event: count - before[event] for event, count in happened_in(llm).items()}
    whole = [Ask([*ask.token_ids, *answer.token_ids],
                 SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=ask.params.logprobs))
             for ask, answer in zip(asks, answers, strict=True)]
    prompts = [output.prompt_logprobs or [] for output in run_prompts(llm, whole).outputs]
    chosen = likeliest = 0
    for ask, answer, places in zip(asks, answers, prompts, strict=True):
        pairs = zip(answer.token_ids, answer.logprobs or [], places[len(ask.token_ids) :], strict=True)
        for token, sampled, reported in pairs:
            ours, theirs = bits(sampled), bits(reported)
            chosen += ours.pop(token) != theirs.pop(token, None)
            likeliest += [*ours.items()] != [*theirs.items()]
    is_met = happened["drafts"] > 0 and (name == ROUNDS[0] or happened["hits"] > 0)
    return Result("", name, sum(len(answer.token_ids) for answer in answers), chosen, likeliest, happened, is_met,
                  round(time.monotonic() - begin, 1))


def bits(place: Place) -> dict[int, tuple[str, int | None]]:
    return {token: (entry.logprob.hex(), entry.rank) for token, entry in (place or {}).items()}


def run_engine(loaded: Loaded, config: EngineConfig, kind: str, asks: Sequence[Ask]) -> list[Result]:
    drafts = NGRAM if kind == "n-gram" else {"auto": False} | (config.drafter_settings or {})
    results = []
    with loaded.llm(replace(config, speculative_config=drafts)) as llm:
        for name in ROUNDS:
            result = run_round(llm, asks, name)
            results.append(replace(result, model=loaded.name, case=f"{kind} drafts, {name}"))
            print(describe(results[-1]), flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return results


def describe(result: Result) -> str:
    happened = ", ".join(f"{name} {count}" for name, count in result.happened.items() if count)
    return (f"{result.case:<34} {result.tokens:>6} tokens; other bits: {result.differing_chosen} of the tokens, "
            f"{result.differing_likeliest} of the likeliest beside them; {result.seconds:.0f} s; {happened}"
            + ("" if result.is_met else " (NOT TRIED: its condition did not occur)"))


def make_parser() -> Parser:
    parser = Parser(description=__doc__)
    add_model(parser)
    add_engine_flags(parser, skip=("exact",))
    parser.add_argument("--tokens", type=int, default=20_000, help="sampled tokens in all (default: 20000)")
    parser.add_argument("--requests", type=int, default=48, help="at once (default: 48)")
    parser.add_argument("--prompt-len", type=int, default=160, help="the longest prompt (default: 160)")
    return parser


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse(argv)
    config = engine_config(args, exact=True, speculative_config="auto", max_logprobs=MANY,
                           max_num_seqs=max(2, 3 * args.requests // 4))
    kinds = ["n-gram"] + (["own"] if config.drafter_settings is not None else [])
    tokens = -(-args.tokens // (len(kinds) * len(ROUNDS)))
    config = replace(config, max_model_len=config.max_model_len or args.prompt_len + 4 * tokens // args.requests + 32)
    loaded = load_random(config) if config.load_format == "dummy" else load(config, needs_text=False)
    asks = vary(make_asks(loaded, args.requests, args.prompt_len, 1, config.seed), tokens, config.seed)
    results = [result for kind in kinds for result in run_engine(loaded, config, kind, asks)]
    differing = sum(result.num_differing for result in results)
    print(json.dumps({"bench": "logprob_bits", "model": loaded.name, "device": loaded.model.device.type,
                      "tokens": sum(result.tokens for result in results), "differing": differing,
                      "not_tried": sum(not result.is_met for result in results)}))
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
