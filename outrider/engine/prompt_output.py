"""PromptLogprobsOutput: the log-probabilities of one prompt's tokens. Imported when the first request asks for some."""

from __future__ import annotations

from outrider.core import TokenLogprobs
from outrider.core.input_part import NO_INPUTS, InputParts
from outrider.core.outputs import NOT_REPORTED, OutputIncrement, PromptRows, SampleKey
from outrider.engine.output import with_texts
from outrider.engine.text import Tokenizer


class PromptLogprobsOutput:
    """Gathers the log-probabilities of a prompt's tokens over the chunks that steps compute. The first token has none.
    Neither have tokens that encoded vectors (such as an image's) replace."""

    def __init__(self, key: SampleKey, prompt_len: int, tokenizer: Tokenizer | None,
                 inputs: InputParts = NO_INPUTS) -> None:
        self._key, self._prompt_len, self._inputs = key, prompt_len, inputs
        self._tokenizer = tokenizer
        self._epoch = 0
        self._position = 1  # position of the next row
        self._num_entries = 1  # so far
        self._first_version = key.weights_version  # of the weights, for the first row

    def use_weights(self, version: int) -> None:
        """Set the version of the weights from which later log-probabilities come."""
        self._key = self._key._replace(weights_version=version)

    def take(self, epoch: int, chunk: list[TokenLogprobs]) -> OutputIncrement:
        """Add the log-probabilities that a step computed. After a preemption a prompt's log-probabilities are computed
        again from the first one on, and those that are known already are dropped. They replace the known ones only if
        these are not complete and came from older weights."""
        if epoch != self._epoch:
            self._begin_again(epoch)
        start = self._num_entries
        if start == 1:
            self._first_version = self._key.weights_version
        first = max(0, start - self._position)
        stop = max(first, self._prompt_len - self._position)  # rows past the prompt's last token speak of outputs
        rows = self._reported(chunk[first:stop], self._position + first)
        if self._tokenizer is not None:
            rows = [with_texts(row, self._tokenizer.token_texts) for row in rows]
        self._num_entries += len(rows)
        self._position += len(chunk)
        return OutputIncrement(self._key, [], prompt_logprobs=PromptRows(start, rows))

    def _reported(self, rows: list[TokenLogprobs], start: int) -> list[TokenLogprobs]:
        """Return the rows of tokens from `start` on, without tokens that vectors replace."""
        ranges = [own for part in self._inputs for own in part.encoded_ranges(start, start + len(rows))]
        for first, last in ranges:
            rows[first - start : last - start] = [NOT_REPORTED] * (last - first)
        return rows

    def _begin_again(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 1
        is_whole, is_old = self._num_entries == self._prompt_len, self._first_version != self._key.weights_version
        if is_old and not is_whole:
            self._num_entries = 1
