"""Several prompts at once: python examples/generate.py [MODEL]"""

import sys

from outrider import LLM, SamplingParams

PROMPTS = ["The sea is", "A good engine", "Once upon a time"]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, seed=1, max_tokens=32)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
