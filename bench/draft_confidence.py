"""How many more drafts are accepted if token rows go to those that the drafter is surest of? On a head's own drafts.

    python bench/draft_confidence.py smollm2 DRAFTER spec_bench.jsonl --prompts 4

Runs requests without checking drafts, and notes the chain of 4 drafts that the head would make behind every token, with
the level of each (`core/draft_confidence.py`). From these chains follow, token for token, the runs of any way to share
token rows out. 32 requests decode side by side, and each step checks the same number of drafts of all of them:
equally many of each, by each request's acceptance so far (`speculation/spread_acceptance.py`), or by the levels of the
drafts that wait (`speculation/draft_chances.py`), which are learned on the way.
"""

from __future__ import annotations

import argparse
import random
from itertools import cycle

from watched_drafts import DEPTH, FIRST_SEED, WatchedChain, WatchedDrafts

from outrider import LLM, SamplingParams
from outrider.benchmarks.prompt_sets import read_sets
from outrider.core.draft_confidence import levels_of
from outrider.speculation.draft_chances import DraftChances
from outrider.speculation.spread_acceptance import SpreadAcceptance

REQUESTS, STEPS, WARM_UP, LEARN_EVERY = 32, 400, 50, 8


class Decoding:
    """Requests that decode side by side; one that ends is followed by the next."""

    def __init__(self, texts: list[dict[int, WatchedChain]], seed: int) -> None:
        order = random.Random(seed).sample(texts, len(texts))
        self._texts, self._next_id = cycle(order), 0
        self._history, self._chances = SpreadAcceptance(DEPTH), DraftChances(DEPTH)
        self._live = [self._new() for _ in range(REQUESTS)]

    def _new(self) -> tuple[int, dict[int, WatchedChain], int]:
        self._next_id += 1
        chains = next(self._texts)
        return self._next_id, chains, min(chains)

    def mean_run(self, way: str, total: int) -> float:
        tokens = 0
        for step in range(STEPS):
            if step % LEARN_EVERY == 0:
                self._history.learn_spread([request_id for request_id, _, _ in self._live])
            counts = self._share(way, total)
            for index, ((request_id, chains, position), count) in enumerate(zip(self._live, counts, strict=True)):
                chain = chains[position]
                accepted = min(chain.num_right, count)
                tokens += (1 + accepted) * (step >= WARM_UP)
                if count:
                    self._history.observe([(request_id, count, accepted)])
                    self._chances.observe([(request_id, chain.levels, count, accepted)])
                position += 1 + accepted
                self._live[index] = (request_id, chains, position) if position in chains else self._new()
        return tokens / (STEPS - WARM_UP) / REQUESTS

    def _share(self, way: str, total: int) -> list[int]:
        found = []
        for index, (request_id, chains, position) in enumerate(self._live):
            gains = [1 / (1 + place) for place in range(DEPTH)]
            if way == "acceptance":
                gains = self._history.gains(request_id)
            elif way == "levels":
                gains = self._chances.gains(request_id, chains[position].levels, DEPTH)
            found += [(-gain, place, index) for place, gain in enumerate(gains)]
        taken = [index for _, _, index in sorted(found)[:total]]
        return [taken.count(index) for index in range(REQUESTS)]


def report(texts: list[dict[int, WatchedChain]]) -> None:
    chains = [chain for text in texts for chain in text.values()]
    print(f"{len(chains)} chains of {len(texts)} requests")
    for level in range(1, 16):
        reached = [place < chain.num_right for chain in chains
                   for place, own in enumerate(levels_of(chain.levels, min(chain.num_right + 1, DEPTH)))
                   if own == level]
        if reached:
            print(f"level {level}: {sum(reached) / len(reached):.2f} accepted of {len(reached)}")
    for total in (16, 32, 48, 64, 96):
        runs = {way: sum(Decoding(texts, seed).mean_run(way, total) for seed in range(3)) / 3
                for way in ("equal", "acceptance", "levels")}
        shown = ", ".join(f"{way} {run:.3f}" for way, run in runs.items())
        print(f"{total} drafts: {shown}; levels over the better of the others "
              f"{runs['levels'] / max(runs['equal'], runs['acceptance']) - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("file", help="of Spec-Bench's form")
    parser.add_argument("--prompts", type=int, default=4, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    watched = WatchedDrafts.install()
    config = {"method": "eagle3", "model": args.drafter, "num_speculative_tokens": DEPTH, "auto": False}
    with LLM(args.model, speculative_config=config, max_num_seqs=16, enable_prefix_caching=False) as llm:
        prompts = [ids for own in read_sets([args.file]) for ids in own.encode(llm.get_tokenizer(), args.prompts)]
        params = [SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, detokenize=False,
                                 speculative=False, seed=FIRST_SEED + index) for index in range(len(prompts))]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    texts = [watched.chains(FIRST_SEED + index, ids + list(output.outputs[0].token_ids), len(ids))
             for index, (ids, output) in enumerate(zip(prompts, outputs, strict=True))]
    report([text for text in texts if text])


if __name__ == "__main__":
    main()
