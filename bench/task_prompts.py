"""Makes prompts of tasks out of plain texts, for `outrider train-drafter --prompts`: summaries, questions about
passages, translations. A head drafts better for tasks that it has seen, and texts like those that will be served are
best.

    python bench/task_prompts.py --passages FILE ... --sentences FILE ... --questions FILE --out prompts.jsonl

--passages: prose; paragraphs are divided by empty lines, sentences of long ones are taken in runs. --sentences: one a
line, of the language that is translated to English. --questions: prompts as they are, one a line or JSON lines. Each
kind gets an equal share as far as its texts reach, and no prompt comes twice.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SUMMARIES = (
    "Summarize: {}", "Summarize the following text:\n\n{}", "{}\n\nWrite a summary of the text above.",
    "Give a short summary of this article.\n\n{}", "TL;DR of this text, please:\n{}",
    "What are the main points of the following text?\n{}",
)
CONTEXTS = (
    "{passages}\n\n{question}", "Context:\n{passages}\n\nQuestion: {question}", "{passages} {question}",
    "Answer the question with the passages.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "Use the following documents: {passages}\n\nThen answer: {question}",
)
QUESTIONS = (
    "What does the text say about {}?", "What is {}?", "Why does {} matter here?", "How is {} described?",
    "Who or what is {}, according to the text?", "what about {}", "when was {} mentioned and why?",
)
SHORT = ("who was {}", "Who is {}?", "what is {}", "When did {} begin?", "What is {} known for?", "Tell me about {}.")
TRANSLATIONS = (
    "Translate to English: {}", "Translate this sentence into English: {}", "What does this mean in English? {}",
    "{}\n\nTranslate the text above to English.",
)
RUNS = (4, 8, 14, 22)  # sentences of a passage
LEAST, MOST = 200, 3600  # characters of a passage
MOST_TOGETHER = 3200  # characters of passages in one prompt
NAME = re.compile(r"(?<=[a-z,] )(?:[A-Z][a-z]+ ){0,2}[A-Z][a-z]+")
LONG_WORD = re.compile(r"\b[a-z]{7,}\b")
SENTENCE_END = re.compile(r"(?<=[.!?]) +")


class Prompts:
    """Draws prompts; passages and sentences are used once."""

    def __init__(self, passages: list[str], sentences: list[str], questions: list[str], draw: random.Random) -> None:
        self._draw = draw
        self._left = {"passages": passages, "sentences": sentences, "questions": questions}
        for texts in self._left.values():
            draw.shuffle(texts)
        self.kinds: dict[str, Callable[[], str]] = {
            "summaries": self._summary, "contexts": self._context, "short questions": self._short,
            "translations": lambda: draw.choice(TRANSLATIONS).format(self._left["sentences"].pop()),
            "questions": lambda: self._left["questions"].pop(),
        }

    def take(self, count: int) -> list[str]:
        """So many prompts, fewer if texts run out: a kind that has none left leaves its share to the others."""
        found: dict[str, None] = {}
        kinds = list(self.kinds.values())
        while kinds and len(found) < count:
            for kind in list(kinds):
                try:
                    found.setdefault(kind())
                except IndexError:  # there is no text left
                    kinds.remove(kind)
        return list(found)[:count]

    def _summary(self) -> str:
        return self._draw.choice(SUMMARIES).format(self._left["passages"].pop())

    def _context(self) -> str:
        number = self._draw.choice((1, 2, 3, 5))
        passages = [self._left["passages"].pop()[: MOST_TOGETHER // number] for _ in range(number)]
        question = self._draw.choice(QUESTIONS).format(self._topic(self._draw.choice(passages)))
        joined = self._draw.choice(("\n", "\n\n")).join(passages)
        return self._draw.choice(CONTEXTS).format(passages=joined, question=question)

    def _short(self) -> str:
        return self._draw.choice(SHORT).format(self._topic(self._left["passages"].pop()))

    def _topic(self, passage: str) -> str:
        names, words = NAME.findall(passage), LONG_WORD.findall(passage) or ["it"]
        return self._draw.choice(names if names and self._draw.random() < 0.6 else words)


def passages_of(text: str, draw: random.Random) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        sentences, start = SENTENCE_END.split(" ".join(paragraph.split())), 0
        while start < len(sentences):
            count = draw.choice(RUNS)
            passage = " ".join(sentences[start : start + count])
            start += count
            if LEAST <= len(passage) <= MOST:
                yield passage


def question_of(line: str) -> str:
    given = json.loads(line) if line.startswith("{") else line
    return given if isinstance(given, str) else str(given.get("prompt") or given.get("question"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--sentences", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--questions", type=Path, metavar="FILE")
    parser.add_argument("--count", type=int, default=6000, help="default: 6000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    passages = [passage for path in args.passages
                for passage in passages_of(path.read_text(encoding="utf-8", errors="replace"), draw)]
    lines = [line.strip() for path in args.sentences
             for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    sentences = sorted({line for line in lines if line})
    asked = [] if args.questions is None else args.questions.read_text(encoding="utf-8").splitlines()
    questions = [question_of(line) for line in asked if line.strip()]
    sizes = f"{len(passages)} passages, {len(sentences)} sentences and {len(questions)} questions"
    prompts = Prompts(passages, sentences, questions, draw).take(args.count)
    if not prompts:
        sys.exit("no prompt: give --passages, --sentences or --questions")
    draw.shuffle(prompts)
    args.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    print(f"{args.out}: {len(prompts)} prompts of {sum(map(len, prompts)) // len(prompts)} characters on average, from "
          + sizes)


if __name__ == "__main__":
    main()
