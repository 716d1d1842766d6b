"""Texts as vectors, and which answers fit a question: python examples/embeddings.py [MODEL]"""

import sys

from outrider import LLM, PoolingParams

QUESTION = "What moves the tides?"
ANSWERS = ["The moon pulls at the sea.", "Bread is made of flour.", "Ships sail at high water."]

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    (output,) = llm.embed(QUESTION, PoolingParams(pooling="mean"))
    print(f"{len(output.outputs.embedding)} numbers, beginning with {output.outputs.embedding[:3]}")
    scores = [score.outputs.score for score in llm.score(QUESTION, ANSWERS)]
    for score, answer in sorted(zip(scores, ANSWERS, strict=True), reverse=True):
        print(f"{score:.3f}  {answer}")
