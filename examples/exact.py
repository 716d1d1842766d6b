"""The same bits alone, in a batch and with drafts: python examples/exact.py [MODEL]

`outrider verify MODEL --exact` checks more: chunks, prefix hits, preemptions and every drafter.
"""

import sys

from outrider import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
PROMPTS = ["The sea is", "A good engine", "Once upon a time", "Monday, Tuesday, Wednesday, Monday, Tuesday,"]
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=24, logprobs=1)


def bits(output):
    """Token ids and their log-probabilities. Equal floats are equal bits."""
    answer = output.outputs[0]
    return [(token, step[token].logprob) for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]


with LLM(MODEL, exact=True) as llm:
    alone = [bits(llm.generate(prompt, PARAMS)[0]) for prompt in PROMPTS]
    together = [bits(output) for output in llm.generate(PROMPTS, PARAMS)]
with LLM(MODEL, exact=True, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
    drafted = [bits(output) for output in llm.generate(PROMPTS, PARAMS)]
print(f"alone and in a batch: equal bits: {alone == together}")
print(f"without and with drafts: equal bits: {alone == drafted}")
