"""The same text with and without drafts, and what they gained: python examples/speculation.py [MODEL]"""

import sys

from outrider import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
PROMPT = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,"
PARAMS = SamplingParams(temperature=0, max_tokens=32)

with LLM(MODEL) as llm:
    plain = llm.generate(PROMPT, PARAMS)[0]
with LLM(MODEL, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
    drafted = llm.generate(PROMPT, PARAMS)[0]
print(f"equal tokens: {plain.outputs[0].token_ids == drafted.outputs[0].token_ids}")
print(f"tokens a step: {drafted.metrics.mean_run_length:.2f}")
