"""A drafter of your own: python examples/own_drafter.py [MODEL]

It guesses that a text which said a token twice goes on saying it. docs/drafters.md says what a drafter may see.
"""

import sys

import torch

from outrider import LLM, SamplingParams
from outrider.drafters.base import Drafter, Drafts, Step


class RepeatLast(Drafter):
    name = "repeat-last"

    def __init__(self, num_speculative_tokens, target):
        self.max_drafts = num_speculative_tokens

    def propose(self, step: Step) -> Drafts:
        rows = step.batch.padded.rows                        # [requests] row of each request
        known = step.known[rows]                             # [requests] number of its tokens so far
        last = step.tokens[rows, (known - 1).clamp_min(0)]
        before = step.tokens[rows, (known - 2).clamp_min(0)]
        counts = torch.where((last == before) & (known >= 2), step.num_wanted, 0)
        return Drafts(last[:, None].expand(-1, step.num_wanted).contiguous(), counts)


if __name__ == "__main__":
    MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    PROMPT, PARAMS = "The digits of 1/9 are 0.1111111111111111", SamplingParams(temperature=0, max_tokens=32)
    # "auto": False asks for three drafts at every step; by default there are as many as pay on this machine.
    DRAFTS = {"method": f"{__name__}:RepeatLast", "num_speculative_tokens": 3, "auto": False}
    with LLM(MODEL) as llm:
        plain = llm.generate(PROMPT, PARAMS)[0].outputs[0]
    with LLM(MODEL, speculative_config=DRAFTS) as llm:
        drafted = llm.generate(PROMPT, PARAMS)[0]
    print(f"equal tokens: {plain.token_ids == drafted.outputs[0].token_ids}")
    print(f"{drafted.metrics.num_accepted_tokens} of {drafted.metrics.num_draft_tokens} drafts accepted")
