"""Would a tree of drafts beat a chain with as many checked token rows? Measured on a head's own drafts.

    python bench/tree_drafts.py smollm2 DRAFTER spec_bench.jsonl --prompts 2

Runs greedy requests one by one with chains of 4 drafts, and notes at every place of a chain that was right so far which
rank the head gives to the true token. From these ranks follow the mean runs of chains, and of trees whose side branches
are leaves: the next likeliest tokens at a place of the chain, which cost a checked row each and no pass of the head.
Both have at most 4 places, so numbers of rows above 4 compare with a chain that cannot grow.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import torch

import outrider.drafters.autoregressive as drafting
from outrider import LLM, SamplingParams
from outrider.benchmarks.prompt_sets import read_sets

DEPTH, TOP = 4, 8
Ranks = list[int]  # of the true token at the places of one chain, up to the first wrong one


class Watched:
    """Keeps the likeliest tokens of every draft, beside the operation that draws it."""

    def __init__(self) -> None:
        self.drafts: list[tuple[int, int, list[int]]] = []  # position in the text, place in the chain, tokens
        self._draw: Any = drafting.draw_drafts

    def __call__(self, logits: torch.Tensor, keys: Any, index: int, *, target_ids: torch.Tensor | None,
                 **others: Any) -> None:
        self._draw(logits, keys, index, target_ids=target_ids, **others)
        best = logits[0].topk(TOP).indices
        tokens = best if target_ids is None else target_ids[best]
        self.drafts.append((int(keys.positions[index][0]), index, tokens.tolist()))

    def ranks(self, text: list[int]) -> list[Ranks]:
        """The ranks of the request that has just run, which is then forgotten."""
        found: list[Ranks] = []
        is_right = False
        for position, place, tokens in self.drafts:
            if place == 0:
                found.append([])
                is_right = True
            if is_right and position < len(text):
                found[-1].append(tokens.index(text[position]) if text[position] in tokens else TOP)
            is_right = is_right and bool(found[-1]) and position < len(text) and found[-1][-1] == 0
        self.drafts.clear()
        return [ranks for ranks in found if ranks]


def mean_run(chains: list[Ranks], widths: tuple[int, ...]) -> float:
    """With so many tokens checked at each place."""
    return 1 + sum(rank < width for ranks in chains for rank, width in zip(ranks, widths, strict=False)) / len(chains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafter")
    parser.add_argument("file", help="of Spec-Bench's form")
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    watched = drafting.draw_drafts = Watched()
    # The native call makes all drafts of a step, and gives no logits.
    drafting.NativeChain.try_build = lambda *_: None  # type: ignore[assignment, method-assign]
    config = {"method": "eagle3", "model": args.drafter, "num_speculative_tokens": DEPTH, "auto": False}
    chains: list[Ranks] = []
    with LLM(args.model, speculative_config=config, max_num_seqs=1, enable_prefix_caching=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens, detokenize=False)
        for prompts in read_sets([args.file]):
            for ids in prompts.encode(llm.get_tokenizer(), args.prompts):
                (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
                chains += watched.ranks(ids + list(output.outputs[0].token_ids))
    print(f"{len(chains)} chains")
    for rows in (1, 2, 3, 4, 5, 6, 8):
        shapes = (widths for depth in range(1, DEPTH + 1) for widths in product(range(1, rows + 1), repeat=depth)
                  if sum(widths) == rows)
        chain, (tree, best) = mean_run(chains, (1,) * rows), max((mean_run(chains, own), own) for own in shapes)
        print(f"{rows} rows: chain {chain:.3f}, best tree {tree:.3f} with {best} tokens at its places, "
              f"{tree / chain - 1:+.1%}")


if __name__ == "__main__":
    main()
