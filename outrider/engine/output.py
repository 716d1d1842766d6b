"""One sample's way out: runs of tokens become text, stop strings are found, log-probabilities are named.

Everything here takes runs, never single tokens; what comes out does not depend on how tokens were split into runs.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.core import Finish, RequestResult, TokenLogprobs
from outrider.core.outputs import CompletionOutput, Logprob
from outrider.core.params import SamplingParams
from outrider.engine.detokenize import Detokenizer, StopStrings
from outrider.engine.text import Tokenizer

Decode = Callable[[int], str | None]


class SampleOutput:
    """Builds a CompletionOutput from the runs of one request."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.completion = CompletionOutput(index, logprobs=None if params.logprobs is None else [])
        self._params = params
        own = tokenizer if params.detokenize else None
        self._tokenizer = own
        self._detokenizer = None if own is None else Detokenizer(own, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output, params.min_tokens)

    def take(self, result: RequestResult) -> bool:
        """Add a run. True if a stop string ends the request here, though the device does not know."""
        done, run = self.completion, result.run
        is_last = result.finish is not Finish.NO
        stop: str | None = None
        if self._detokenizer is not None:
            # A stop token is part of the tokens, and of the text only if asked for.
            hidden = is_last and result.finish is Finish.STOP and not self._params.include_stop_str_in_output
            pieces = self._detokenizer.feed(run[:-1] if hidden else run) + ([""] if hidden else [])
            stopped = self._stops.feed(pieces)
            done.text += stopped.text
            stop, run = stopped.stop, run[: stopped.num_tokens]
            if stop is None and is_last:
                tail = self._stops.finish(self._detokenizer.finish())
                done.text += tail.text
                stop = tail.stop
        done.token_ids += run
        if done.logprobs is not None and result.logprobs is not None:
            done.logprobs += [name_logprobs(entry, self._decode) for entry in result.logprobs[: len(run)]]
        if stop is not None:
            done.finish_reason, done.stop_reason = "stop", stop
            return not is_last
        if is_last:
            self.end(result.finish, result.error)
            if result.finish is Finish.STOP and run and run[-1] in (self._params.stop_token_ids or ()):
                done.stop_reason = run[-1]
        return False

    def end(self, finish: Finish, error: str | None = None) -> None:
        """The host ended the request."""
        if self.completion.finish_reason is None:
            self.completion.finish_reason, self.completion.error = finish.reason, error

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)


def name_logprobs(entry: TokenLogprobs, decode: Decode) -> dict[int, Logprob]:
    """The chosen token with its rank, then the likeliest by rank."""
    named = {
        token: Logprob(value, rank, decode(token))
        for rank, (token, value) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1)
    }
    chosen = entry.token_ids[0]
    if chosen not in named:
        named = {chosen: Logprob(entry.logprobs[0], entry.rank, decode(chosen)), **named}
    return named


class PromptLogprobsOutput:
    """Log-probabilities of a prompt's tokens, gathered over chunks. The first token has none."""

    def __init__(self, prompt_len: int, decode: Decode) -> None:
        self._prompt_len = prompt_len
        self._decode = decode
        self._epoch = 0
        self._position = 1  # of the next row
        self.entries: list[dict[int, Logprob] | None] = [None]

    def take(self, epoch: int, chunk: list[TokenLogprobs]) -> None:
        """The next rows of a request; of a preempted one they come by again, from the first."""
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 1
        first = max(0, len(self.entries) - self._position)
        stop = max(first, self._prompt_len - self._position)  # rows past the prompt's last token speak of outputs
        self.entries += [name_logprobs(entry, self._decode) for entry in chunk[first:stop]]
        self._position += len(chunk)
