"""A model calls a function, and answers with what it returned: python examples/tools.py [MODEL]

The call has the form of a JSON schema, so that any model can make one. A model whose chat template knows tools takes
them as `llm.chat(messages, tools=[...])`, and `outrider serve` reads its calls (`--tool-call-parser`).
"""

import json
import sys

from outrider import LLM, SamplingParams, StructuredOutputsParams

PORTS = ["Brest", "Calais", "Dover"]


def next_tide(port: str) -> str:
    return f"high water in {port} is at {6 + PORTS.index(port):02}:40"


CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "next_tide"},
        "arguments": {"type": "object", "properties": {"port": {"enum": PORTS}}, "required": ["port"],
                      "additionalProperties": False},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
messages = [
    {"role": "system", "content": 'Call {"name": "next_tide", "arguments": {"port": ...}} first.'},
    {"role": "user", "content": "When is high water in Calais?"},
]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    form = StructuredOutputsParams(json=CALL)
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=100, structured_outputs=form))
    call = json.loads(output.outputs[0].text)
    result = {"next_tide": next_tide}[call["name"]](**call["arguments"])
    print(f"{output.outputs[0].text} -> {result}")
    messages += [{"role": "assistant", "content": output.outputs[0].text},
                 {"role": "user", "content": f"Say in a sentence: {result}."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    print(output.outputs[0].text)
