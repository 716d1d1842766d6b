"""Text that appears while it is written: python examples/stream.py [MODEL]"""

import sys

from outrider import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    shown = 0
    for output in llm.stream("The sea is", SamplingParams(temperature=0, max_tokens=48)):
        text = output.outputs[0].text  # all of the answer so far
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print(f"\nended by {output.outputs[0].finish_reason!r} after {len(output.outputs[0].token_ids)} tokens")
