"""Answers that have a form, with drafts: python examples/structured.py [MODEL]"""

import json
import sys

from outrider import LLM, SamplingParams, StructuredOutputsParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain", "Italy"]},
        "large": {"type": "boolean"},
    },
    "required": ["city", "country", "large"],
    "additionalProperties": False,
}
FORMS = {
    "Name a city by the sea.": StructuredOutputsParams(json=SCHEMA),
    "Is Lyon by the sea?": StructuredOutputsParams(choice=["yes", "no"]),
    "When does the ferry leave?": StructuredOutputsParams(regex=r"[0-2][0-9]:[0-5][0-9]"),
}

with LLM(MODEL, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as llm:
    params = [SamplingParams(temperature=0, max_tokens=100, structured_outputs=form) for form in FORMS.values()]
    outputs = llm.generate(list(FORMS), params)
for question, output in zip(FORMS, outputs, strict=True):
    print(f"{question} {output.outputs[0].text} ({output.metrics.mean_run_length:.2f} tokens a step)")
print(json.loads(outputs[0].outputs[0].text)["country"])
