"""Beam search with `generate`: each round asks for the likeliest next tokens of every beam.

The prefix cache holds all earlier tokens of the beams, so a round computes only one token of each beam.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

from outrider.core import Limits
from outrider.core.fields import Count, Range, check_fields, check_names, shown
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.engine.text import Tokenizer
from outrider.feature_list import prompt_keys

MAX_BEAMS = 64
MAX_PENALTY = 50  # a million tokens to this power is still a float
Rounds: TypeAlias = "Generator[BeamRound, list[RequestOutput], list[BeamSearchOutput]]"


class BeamRound(NamedTuple):
    """The requests of one round of a beam search. The caller generates one token, with log-probabilities, for every
    beam."""

    token_ids: list[list[int]]  # of each beam, its prompt's first
    prompts: list[int]  # the place of each beam's prompt among the prompts
    sampling: SamplingParams


@dataclass
class BeamSearchParams:
    beam_width: Annotated[int, Range(1, MAX_BEAMS)]
    max_tokens: Count
    ignore_eos: bool = False
    temperature: Annotated[float, Range(0, 0)] = 0.0  # beams follow the model's own log-probabilities
    length_penalty: Annotated[float, Range(-MAX_PENALTY, MAX_PENALTY)] = 1.0
    include_stop_str_in_output: bool = False

    def __new__(cls, *args: Any, **fields: Any) -> BeamSearchParams:
        check_names("BeamSearchParams", cls, fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields("BeamSearchParams: ", self)


@dataclass
class BeamSearchSequence:
    tokens: list[int]  # the prompt's and the answer's
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = field(default=0, repr=False)

    def score(self, length_penalty: float) -> float:
        length = max(1, len(self.tokens) - (self.finish_reason == "stop"))
        return self.cum_logprob / length**length_penalty


@dataclass
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # the best first


def beam_search(prompts: Sequence[Sequence[int]], params: BeamSearchParams,
                generate: Callable[[BeamRound], list[RequestOutput]], tokenizer: Tokenizer | None,
                eos_ids: tuple[int, ...], limits: Limits) -> list[BeamSearchOutput]:
    """Return the `beam_width` best sequences of every prompt, by log-probability divided by length to the power of
    `length_penalty`."""
    rounds = beam_rounds(prompts, params, tokenizer, eos_ids, limits)
    try:
        asked = next(rounds)
        while True:
            asked = rounds.send(generate(asked))
    except StopIteration as end:
        return list(end.value)


def check_beam_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for a prompt that has other inputs than a text or token ids."""
    for key in ("cache_salt", *prompt_keys()):
        if any(isinstance(prompt, dict) and prompt.get(key) is not None for prompt in prompts):
            raise ValueError(f"beam_search: a prompt's {key!r} is not supported: leave {key!r} out")


def check_beam_params(params: BeamSearchParams, limits: Limits) -> None:
    """Raises ValueError for parameters that the engine cannot serve."""
    if not isinstance(params, BeamSearchParams):
        raise ValueError(f"params must be a BeamSearchParams, got {shown(params)}")
    check_fields("BeamSearchParams: ", params)
    if 2 * params.beam_width > limits.max_logprobs:
        raise ValueError(f"beam_width={params.beam_width} needs max_logprobs of at least {2 * params.beam_width}, and "
                         f"this engine has {limits.max_logprobs}: lower beam_width, or start the engine with "
                         f"max_logprobs={2 * params.beam_width}")


def beam_rounds(prompts: Sequence[Sequence[int]], params: BeamSearchParams, tokenizer: Tokenizer | None,
                eos_ids: tuple[int, ...], limits: Limits) -> Rounds:
    """Run the beam search as a generator, for callers that run the requests of each round themselves."""
    check_beam_params(params, limits)
    ask = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * params.beam_width, ignore_eos=True,
                         detokenize=False)
    running = [[BeamSearchSequence(list(prompt), num_prompt_tokens=len(prompt))] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    for _ in range(params.max_tokens):
        outputs = iter((yield BeamRound([beam.tokens for beams in running for beam in beams],
                                        [index for index, beams in enumerate(running) for _ in beams], ask)))
        for index, beams in enumerate(running):
            followers = [_followers(beam, next(outputs)) for beam in beams]
            found = sorted((each for own in followers for each in own), key=lambda each: -each.cum_logprob)
            ends = () if params.ignore_eos else eos_ids
            ended[index] += [each.grown("stop") for each in found if each.token in ends]
            going = [each for each in found if each.token not in ends][: params.beam_width]
            running[index] = [each.grown(None) for each in going]
            if beams and len(beams[0].tokens) + 1 >= limits.max_len:  # all beams of a prompt are as long
                ended[index] += [replace(beam, finish_reason="length") for beam in running[index]]
                running[index] = []
        if not any(running):
            break
    return [BeamSearchOutput(_best(own + [replace(beam, finish_reason="length") for beam in left], params, tokenizer))
            for own, left in zip(ended, running, strict=True)]


class _Follower(NamedTuple):
    """A candidate for the next round: a beam and one of its likeliest next tokens. Most candidates are dropped, so the
    beam's token list is copied only for those that are kept (`grown`)."""

    beam: BeamSearchSequence
    token: int
    cum_logprob: float

    def grown(self, finish_reason: str | None) -> BeamSearchSequence:
        return replace(self.beam, tokens=[*self.beam.tokens, self.token], cum_logprob=self.cum_logprob,
                       finish_reason=finish_reason)


def _followers(beam: BeamSearchSequence, output: RequestOutput) -> list[_Follower]:
    if output.outputs[0].error is not None:
        raise RuntimeError(f"beam search ended, because one of its requests failed: {output.outputs[0].error}")
    (entry,) = output.outputs[0].logprobs or [{}]
    return [_Follower(beam, token, beam.cum_logprob + value.logprob) for token, value in entry.items()]


def _best(beams: list[BeamSearchSequence], params: BeamSearchParams,
          tokenizer: Tokenizer | None) -> list[BeamSearchSequence]:
    best = sorted(beams, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]
    for beam in best if tokenizer is not None else []:
        is_cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        beam.text = tokenizer.decode(beam.tokens[:-1] if is_cut else beam.tokens)  # type: ignore[union-attr]
    return best
