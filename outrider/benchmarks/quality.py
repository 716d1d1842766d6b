"""`outrider bench quality`: measures the quality that a format of weights or of the cache loses. Last line: JSON.

Perplexity of a text in windows, accuracy on multiple-choice questions by the likelihood of each answer, and how many
n-gram drafts are accepted. Compare the figures of two runs that differ in one engine setting or in the file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.benchmarks.prompt_sets import read_sets
from outrider.benchmarks.quality_data import QualityData, Question
from outrider.commands.loading import Loaded, load
from outrider.commands.parser import UsageError, engine_config
from outrider.commands.run_prompts import Ask, run_prompts
from outrider.config import EngineConfig
from outrider.core import SamplingParams
from outrider.engine.text import Tokenizer
from outrider.llm import LLM

# A fixed number of drafts, so that formats are compared by the same work.
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "auto": False}
SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
AT_ONCE = 64  # sequences; their log-probabilities are kept until all are done


def run(args: argparse.Namespace) -> int:
    data = QualityData(args.data)
    questions = {task: data.questions(task)[: args.max_questions] for task in args.tasks.split(",") if task}
    config = engine_config(args, speculative_config=DRAFTS, enable_prefix_caching=False,
                           max_model_len=args.window + 1)
    loaded = load(config)
    tokenizer = loaded.need_tokenizer()
    found: dict[str, Any] = {}
    with loaded.llm(config.without_drafts()) as llm:
        if args.text_tokens:
            found["perplexity"], found["text_tokens"] = _perplexity(llm, tokenizer, data.text(), args)
            print(f"perplexity {found['perplexity']:.4f} of {found['text_tokens']} tokens", flush=True)
        for task, asked in questions.items():
            found[task] = _accuracy(llm, tokenizer, asked, task)
            print(f"{task} {found[task]:.4f} of {len(asked)} questions", flush=True)
    if args.draft_tokens and config.speculative_config is not None:
        found |= _acceptance(loaded, config, args.draft_tokens)
        print(f"accepted drafts {found['acceptance']:.3f}, {found['mean_run']:.3f} tokens a step", flush=True)
    print(json.dumps({"bench": "quality", "model": loaded.name, "device": str(loaded.device),
                      "dtype": str(loaded.model.dtype).removeprefix("torch."), "window": args.window,
                      "questions": {task: len(asked) for task, asked in questions.items()},
                      "speculative_config": config.speculative_config, **found}))
    return 0


def _perplexity(llm: LLM, tokenizer: Tokenizer, text: str, args: argparse.Namespace) -> tuple[float, int]:
    """Return the perplexity, and the number of tokens that it was computed from. Each window is a prompt; its first
    token is not counted, because it has no text before it."""
    begin = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    width, wanted = args.window - len(begin), args.text_tokens
    starts = range(0, wanted, width)
    if len(ids) < wanted:
        raise UsageError(f"--text-tokens {wanted}: the text has only {len(ids)} tokens with this tokenizer; lower it "
                         "to at most that")
    windows = [begin + ids[start : min(start + width, wanted)] for start in starts]
    scores = [value for row in _logprobs(llm, windows, "text") for value in row[max(len(begin), 1) - 1 :]]
    return math.exp(-sum(scores) / len(scores)), len(scores)


def _accuracy(llm: LLM, tokenizer: Tokenizer, questions: Sequence[Question], task: str) -> float:
    """Return the share of questions for which the right answer is the likeliest one."""
    contexts = [tokenizer.encode(question.context) for question in questions]
    whole = [[tokenizer.encode(question.context + answer) for answer in question.answers] for question in questions]
    rows = _logprobs(llm, [ids for each in whole for ids in each], task)
    num_right = 0
    for question, context, sequences in zip(questions, contexts, whole, strict=True):
        scores = []
        for answer, ids in zip(question.answers, sequences, strict=True):
            # The last token of a question may be another one where an answer follows.
            common = next((at for at, (one, other) in enumerate(zip(context, ids, strict=False)) if one != other),
                          len(context))
            scores.append(sum(next(rows)[common - 1 :]) / (len(answer) if question.by_length else 1))
        num_right += scores.index(max(scores)) == question.right
    return num_right / len(questions)


def _logprobs(llm: LLM, sequences: Sequence[list[int]], label: str) -> Iterator[list[float]]:
    """For each sequence, the log-probabilities of all its tokens but the first."""
    for first in range(0, len(sequences), AT_ONCE):
        own = sequences[first : first + AT_ONCE]
        ran = run_prompts(llm, [Ask(ids, SCORE) for ids in own], label=f"{label}, {first} of {len(sequences)}")
        for ids, output in zip(own, ran.outputs, strict=True):
            assert output.prompt_logprobs is not None
            yield [entry[token].logprob
                   for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if entry is not None]


def _acceptance(loaded: Loaded, config: EngineConfig, num_tokens: int) -> dict[str, float]:
    """Measure how many drafts are accepted in answers to the package's prompts. Prompts differ in how much they
    repeat."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False)
    tokenizer = loaded.need_tokenizer()
    asks = [Ask(ids, params) for prompts in read_sets(None)
            for ids in prompts.encode(tokenizer, len(prompts.prompts))]
    with loaded.llm(config) as llm:
        run_prompts(llm, asks, label="drafts")
        stats = llm.engine.stats
        return {"acceptance": stats.num_accepted_tokens / max(stats.num_draft_tokens, 1),
                "mean_run": stats.mean_run_length}
