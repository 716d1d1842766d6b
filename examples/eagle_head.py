"""A trained EAGLE-3 head drafts for its model: python examples/eagle_head.py MODEL HEAD

HEAD is a folder or a hub id; `outrider train-drafter MODEL --out HEAD` trains one. It may make the model faster, and
never changes what the model says.
"""

import sys

from outrider import LLM, SamplingParams

if len(sys.argv) != 3:
    sys.exit(__doc__)
MODEL, HEAD = sys.argv[1:]
DRAFTS = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}

with LLM(MODEL, speculative_config=DRAFTS) as llm:
    (output,) = llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=48))
    print(output.outputs[0].text)
    metrics = output.metrics
    print(f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted, "
          f"{metrics.mean_run_length:.2f} tokens a step")
