"""Perplexity of a GGUF file, by Outrider and by llama.cpp on the same tokens.

    python bench/perplexity.py FILE --text TEXT [--chunks 8] [--length 512] [--llama FOLDER] [--threads 2]
                               [--without SIDE]

The text is cut into chunks, each of which begins with the token that begins texts, if the model has one. Tokens in the
second half of a chunk count, as in llama.cpp's own program. The sides: Outrider as it is, Outrider with token rows
rounded to 8 bits, and llama.cpp (its folder: see llama_library.py), which rounds them too. All of them stay in memory
and take turns, so that their figures can be compared after every chunk.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from llama_library import LlamaLibrary

from outrider import LLM, SamplingParams

OURS = {"outrider": 32, "8-bit rows": 8}  # and the bits of their token rows
LLAMA = "llama.cpp"


def cut(llm: LLM, text: str, length: int, count: int) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    tokens = tokenizer.encode(text)
    begin = tokens[: len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))]
    tokens, step = tokens[len(begin) :], length - len(begin)
    chunks = [begin + tokens[at : at + step] for at in range(0, len(tokens) - step + 1, step)]
    return chunks[:count]


def perplexity(logprobs: Sequence[Sequence[float]]) -> float:
    """The perplexity, from the log-probabilities of the tokens that count."""
    counted = [value for chunk in logprobs for value in chunk]
    return math.exp(-sum(counted) / len(counted))


def our_logprobs(llm: LLM, chunk: list[int]) -> list[float]:
    (output,) = llm.generate([chunk], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
    found = output.prompt_logprobs
    assert found is not None
    steps = list(zip(found, chunk, strict=True))[len(chunk) // 2 :]
    return [step[token].logprob for step, token in steps if step is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--text", required=True, help="a file of text")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama", metavar="FOLDER", help="the folder of llama.cpp's library")
    parser.add_argument("--without", nargs="*", default=[], choices=list(OURS), help="sides to leave out")
    args = parser.parse_args()
    if set(args.without) == set(OURS):
        parser.error("--without: one of Outrider's sides is needed, whose tokenizer cuts the text")
    torch.set_num_threads(args.threads)
    llms = {side: LLM(args.model, max_model_len=args.length + 1, max_num_seqs=1, enable_prefix_caching=False,
                      activation_bits=bits, kv_cache_memory_bytes=1 << 28, speculative_config=None)
            for side, bits in OURS.items() if side not in args.without}
    chunks = cut(next(iter(llms.values())), Path(args.text).read_text(), args.length, args.chunks)
    if not chunks:
        parser.error(f"--text: {args.text} has fewer tokens than a chunk")
    sides: dict[str, Callable[[list[int]], list[float]]] = {
        side: partial(our_logprobs, llm) for side, llm in llms.items()
    }
    if args.llama:
        peer = LlamaLibrary(args.llama, args.model, threads=args.threads, sequences=1, length=args.length)
        sides[LLAMA] = lambda chunk: peer.logprobs(chunk, len(chunk) // 2)
    found: dict[str, list[list[float]]] = {side: [] for side in sides}
    for number, chunk in enumerate(chunks, 1):
        for side, logprobs in sides.items():
            found[side].append(logprobs(chunk))
        so_far = {side: perplexity(values) for side, values in found.items()}
        print(f"{number} chunks:", ", ".join(f"{side} {value:.4f}" for side, value in so_far.items()), flush=True)
    if args.llama:
        print("against llama.cpp:", ", ".join(f"{side} {so_far[side] / so_far[LLAMA]:.4f}" for side in llms))
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
