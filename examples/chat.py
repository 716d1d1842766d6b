"""A conversation of two turns: python examples/chat.py [MODEL]"""

import sys

from outrider import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    messages = []
    for question in ("What is a tide?", "How often does it come?"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32))
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        print(f"{question} -> {output.outputs[0].text!r} ({output.num_cached_tokens} prompt tokens were cached)")
