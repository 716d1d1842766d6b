"""SampleOutput turns one sample's runs of tokens into text, finds stop strings and adds the texts of tokens to
log-probabilities. A run is the tokens that one step adds.

The output does not depend on how the tokens were split into runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.core import Finish, RequestResult, TokenLogprobs
from outrider.core.failures import ExplainedFailure, OwnFailure
from outrider.core.lazy_exports import LateModule
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.params import FORBID_ALL, FORBID_SOME, SamplingParams
from outrider.engine.detokenize import Detokenizer, StopStrings
from outrider.engine.text import Tokenizer, TokenTexts

if TYPE_CHECKING:
    from outrider.core import sample_addition as late
else:
    late = LateModule("outrider.core.sample_addition")


class SampleOutput:
    """Turns the runs of one sample into increments of its output."""

    def __init__(self, key: SampleKey, params: SamplingParams, tokenizer: Tokenizer | None,
                 additions: Sequence[late.SampleAddition] = ()) -> None:
        self.is_finished = False
        self._key, self._params, self._additions = key, params, additions
        self._num_reported = params.num_reported
        own = tokenizer if params.detokenize else None
        self._tokenizer = own
        self._detokenizer = None if own is None else Detokenizer(own, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output, params.min_tokens)

    def use_weights(self, version: int, *, in_place: bool) -> None:
        """Set the version of the weights from which later tokens come. in_place: the request goes on with the keys,
        values and states that earlier weights have computed."""
        self._key = self._key._replace(weights_version=version)
        for addition in self._additions:
            addition.use_weights(version, in_place=in_place)

    def note(self, result: RequestResult) -> None:
        """Give the additions what a feature has reported of a step, before `take`."""
        for addition in self._additions:
            addition.note(result)

    def take(self, result: RequestResult) -> OutputIncrement:
        """Make the increment that a run adds. A stop string, which the device cannot see, may end the sample here."""
        increment = self._take(result)
        return self._with_additions(increment) if self._additions else increment

    def _with_additions(self, increment: OutputIncrement) -> OutputIncrement:
        for addition in self._additions:
            addition.take(increment)
        if self._num_reported != self._params.logprobs:
            increment = late.cut_logprobs(increment, self._params.logprobs)
        end = increment.end
        if end is None or end.error is not None:
            return increment
        return increment._replace(end=late.add_extras(end, self._additions))

    def _take(self, result: RequestResult) -> OutputIncrement:
        run, text, is_last = result.run, "", bool(result.finish)
        if self._detokenizer is None and self._num_reported is None and not is_last:
            return OutputIncrement(self._key, run)
        stop: str | None = None
        if self._detokenizer is not None:
            # A stop token is part of the tokens, and of the text only if asked for.
            hidden = is_last and result.finish is Finish.STOP and not self._params.include_stop_str_in_output
            pieces = self._detokenizer.feed(run[:-1] if hidden else run) + ([""] if hidden else [])
            stopped = self._stops.feed(pieces)
            text, stop, run = stopped.text, stopped.stop, run[: stopped.num_tokens]
            if stop is None and is_last:
                tail = self._stops.finish(self._detokenizer.finish())
                text, stop = text + tail.text, tail.stop
        logprobs = None
        if self._num_reported is not None and result.logprobs is not None:
            logprobs = result.logprobs[: len(run)]
            if self._tokenizer is not None and self._params.logprobs is not None:
                texts = self._tokenizer.token_texts
                logprobs = [with_texts(entry, texts) for entry in logprobs]
        if stop is None and not is_last:
            return OutputIncrement(self._key, run, text, logprobs)
        self.is_finished = True
        if stop is not None:
            return OutputIncrement(self._key, run, text, logprobs, SampleEnd("stop", stop))
        by_id = result.finish is Finish.STOP and bool(run) and run[-1] in (self._params.stop_token_ids or ())
        end = SampleEnd(result.finish.reason, run[-1] if by_id else None, self._explained(result.error))
        return OutputIncrement(self._key, run, text, logprobs, end)

    def _explained(self, error: str | None) -> str | None:
        """Explain the error of a sample for which no token could be chosen. The device gives no reason. Parameters of
        the request that forbid tokens are the likely cause, because logits that are not finite would fail other
        requests too."""
        can_be_theirs = any(getattr(self._params, name) for name in FORBID_ALL)
        if error is None or isinstance(error, ExplainedFailure) or not can_be_theirs:
            return error
        forbid = [name for name in FORBID_ALL + FORBID_SOME if getattr(self._params, name)]
        return OwnFailure(f"no token is allowed: {', '.join(forbid)} of this request leave none to choose (or the "
                          "model's logits are not finite)")

    def replay(self, token_ids: list[int]) -> str:
        """Process again the tokens that a reader has already received. Returns the text that these tokens show."""
        for addition in self._additions:
            addition.resume(token_ids)
        if self._detokenizer is None:
            return ""
        return self._stops.feed(self._detokenizer.feed(token_ids)).text

    def end(self, finish: Finish, error: str | None = None) -> OutputIncrement:
        """End the sample without a result of the device, and return its last increment."""
        self.is_finished = True
        end = SampleEnd(finish.reason, error=error)
        partial = [addition for addition in self._additions if error is None and addition.serves_aborted]
        return OutputIncrement(self._key, [], end=late.add_extras(end, partial) if partial else end)


def with_texts(entry: TokenLogprobs, texts: TokenTexts) -> TokenLogprobs:
    return TokenLogprobs(entry.token_ids, entry.logprobs, entry.rank, tuple(map(texts.__getitem__, entry.token_ids)))
