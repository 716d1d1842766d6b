"""TokenScores: log-probabilities of given tokens under the engine's weights. No torch.

The tokens of a prompt are scored while the prompt is computed, by the function that also computes the log-probabilities
of sampled tokens. In exact mode the two are equal, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated

from outrider.core.fields import INT32, OneOf, Range, check_value
from outrider.core.outputs import Logprob, RequestOutput, WeightSpan
from outrider.core.params import MAX_LOGPROBS_ALL, TIES, SamplingParams, need_sampling_params
from outrider.feature_list import asking_parameters

MODES = {"raw": "raw", "processed": "processed", "raw_logprobs": "raw", "processed_logprobs": "processed"}


@dataclass
class TokenScores:
    """The scores of one sequence. Each list has an entry for every token; the first token has none (None)."""

    token_ids: list[int]
    logprobs: list[float | None] = field(default_factory=list)  # of each token, after those before it
    ranks: list[int | None] = field(default_factory=list)  # 1 + the number of likelier tokens
    top_ids: list[list[int] | None] = field(default_factory=list)  # the likeliest tokens of each place, by rank
    top_logprobs: list[list[float] | None] = field(default_factory=list)
    # The tokens that the filters leave at each place, by rank, if they were asked for. None: too many tie.
    kept_ids: list[list[int] | None] | None = None
    weights_version: int | None = 0  # how many updates of weights had come. None: the scores are of several versions
    weight_versions: list[WeightSpan] = field(default_factory=list)  # the tokens that were scored by each version


@dataclass(frozen=True)
class Scoring:
    """The options of a scoring call: the sampling parameters of its requests, and which scores are returned."""

    params: SamplingParams
    top_k: int
    return_kept_ids: bool

    @classmethod
    def from_arguments(cls, params: SamplingParams | None, top_k: int, logprobs_mode: str,
                       return_kept_ids: bool) -> Scoring:
        """Make the options from the arguments of `LLM.score_tokens`, which documents them. Raises ValueError for
        arguments that contradict each other."""
        check_value("top_k", Annotated[int, Range(0, INT32, also=(MAX_LOGPROBS_ALL,))], top_k)
        check_value("logprobs_mode", Annotated[str, OneOf(tuple(MODES))], logprobs_mode)
        check_value("return_kept_ids", bool, return_kept_ids)
        mode = MODES[logprobs_mode]
        if mode == "raw" and params is not None:
            raise ValueError("temperature and filters change only processed scores: set logprobs_mode='processed', or "
                             "leave them out")
        if mode == "raw" and return_kept_ids:
            raise ValueError("return_kept_ids: only processed scores leave tokens out; raw scores are of all tokens: "
                             "set logprobs_mode='processed', or leave return_kept_ids out")
        own, usual = SamplingParams() if params is None else need_sampling_params(params), SamplingParams()
        for name, _ in asking_parameters():
            if getattr(own, name) != getattr(usual, name):
                raise ValueError(f"{name} has an effect only where an answer begins, and scores are of a prompt: leave "
                                 "it out")
        num = top_k
        if return_kept_ids and top_k != MAX_LOGPROBS_ALL:
            num = max(top_k, own.top_k + TIES) if own.top_k > 0 else MAX_LOGPROBS_ALL
        asked = replace(own, n=1, max_tokens=1, logprobs=None, prompt_logprobs=num, prompt_logprobs_mode=mode,
                        stop=None, detokenize=False, speculative=False)
        return cls(asked, top_k, return_kept_ids)

    def read(self, output: RequestOutput, vocab_size: int) -> TokenScores:
        """Read the scores from the output of a request that ran with these options."""
        num = self.params.prompt_logprobs
        num_reported = vocab_size if num is None or num == MAX_LOGPROBS_ALL else min(num, vocab_size)
        versions = output.prompt_weight_versions or output.outputs[0].weight_versions  # one token has no score
        scores = TokenScores(list(output.prompt_token_ids), kept_ids=[] if self.return_kept_ids else None,
                             weights_version=versions[0].version if len(versions) == 1 else None,
                             weight_versions=versions)
        for token, entry in zip(scores.token_ids, output.prompt_logprobs or (), strict=True):
            ranked = None if entry is None else _ranked(entry, num_reported)
            top = ranked if ranked is None or self.top_k == MAX_LOGPROBS_ALL else ranked[: self.top_k]
            scores.logprobs.append(None if entry is None else entry[token].logprob)
            scores.ranks.append(None if entry is None else entry[token].rank)
            scores.top_ids.append(None if top is None else [other for other, _ in top])
            scores.top_logprobs.append(None if top is None else [logprob for _, logprob in top])
            if scores.kept_ids is not None:
                scores.kept_ids.append(None if ranked is None else _kept(ranked, vocab_size))
        return scores


def _ranked(entry: dict[int, Logprob], num: int) -> list[tuple[int, float]]:
    """Return the `num` likeliest tokens of a position with their log-probabilities, by rank. `entry` may have the
    prompt's own token in front of them, which is then left out."""
    items = [(token, value.logprob) for token, value in entry.items()]
    return items[len(items) - num :]


def _kept(ranked: list[tuple[int, float]], vocab_size: int) -> list[int] | None:
    kept = [token for token, logprob in ranked if logprob > -inf]
    return None if len(kept) == len(ranked) < vocab_size else kept
