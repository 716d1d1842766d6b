"""OutputReader: gives one reader of a growing output the part that the request's `output_kind` asks for. No torch."""

from __future__ import annotations

from outrider.core.any_output import Output
from outrider.core.outputs import CompletionOutput, RequestOutput, cut_starts
from outrider.core.params import RequestOutputKind


class OutputReader:
    """Copies an output for one reader while the engine extends it. A copy never changes afterwards."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._num_tokens: dict[int, int] = {}  # tokens that have been read, by sample
        self._num_characters: dict[int, int] = {}
        self._num_prompt_logprobs = 0

    def is_due(self, output: Output) -> bool:
        """Whether the reader should get output now. With FINAL_ONLY that is only at the end or after an error, else
        always."""
        return self._kind is not RequestOutputKind.FINAL_ONLY or output.finished or output.error is not None

    def read(self, output: Output) -> Output:
        """Return a copy of the output, or of its unread part. A part always has all samples, also samples without new
        tokens, so that it is finished when the whole output is."""
        if self._kind is not RequestOutputKind.DELTA or not isinstance(output, RequestOutput):
            return output.copy()
        part = output.copy()
        for sample in part.outputs:
            self._keep_unread(sample)
        if part.prompt_logprobs is not None:
            num_read, num_known = self._num_prompt_logprobs, len(part.prompt_logprobs)
            self._num_prompt_logprobs = max(num_read, num_known)
            part.prompt_logprobs = part.prompt_logprobs[num_read:]
            part.prompt_version_starts = cut_starts(part.prompt_version_starts, num_read, num_known)
        return part

    def _keep_unread(self, sample: CompletionOutput) -> None:
        """Remove the part of a sample that has been read. After an interrupt the output may be shorter than this part
        for a while."""
        num_tokens, num_characters = self._num_tokens.get(sample.index, 0), self._num_characters.get(sample.index, 0)
        self._num_tokens[sample.index] = max(num_tokens, len(sample.token_ids))
        self._num_characters[sample.index] = max(num_characters, len(sample.text))
        sample.cut_versions(num_tokens, len(sample.token_ids))
        sample.token_ids, sample.text = sample.token_ids[num_tokens:], sample.text[num_characters:]
        if sample.logprobs is not None:
            sample.logprobs = sample.logprobs[num_tokens:]
