"""DraftSources: chooses whether a request's next drafts come from the host drafter or from the drafters on the device.

The host drafter looks up suffixes. Its guess replaces the device's drafts of a request if more of the guess will
probably be accepted. The prediction uses the acceptance of both so far, for the request and for all requests. Every
guess of the host is compared with the tokens that follow, even if it was not sent to the device; drafts of the device
count if they were checked. Guesses after a longer match are right more often, so acceptance is counted by length of the
match."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from outrider.speculation.acceptance import Acceptance

MATCHES = (4, 8, 16)  # lengths of matches from which on guesses are judged apart


class _Guess(NamedTuple):
    known: int  # settled tokens when it was made
    tokens: list[int]
    match: int  # index of its length among MATCHES


class DraftSources:
    def __init__(self, max_drafts: int) -> None:
        self._device = Acceptance(max_drafts)
        self._host = [Acceptance(max_drafts) for _ in range(len(MATCHES) + 1)]
        self._guesses: dict[int, _Guess] = {}

    def note_guess(self, request_id: int, token_ids: Sequence[int], guess: list[int], match_length: int) -> None:
        """Note the host's guess of the tokens that follow `token_ids`. Compare the guess before with the tokens that
        have come since, and count how many were right."""
        before = self._guesses.get(request_id)
        if before is not None and len(token_ids) > before.known:
            settled = token_ids[before.known : before.known + len(before.tokens)]
            pairs = zip(settled, before.tokens, strict=False)
            num_right = next((i for i, (true, guessed) in enumerate(pairs) if true != guessed), len(settled))
            if settled:
                self._host[before.match].observe([(request_id, len(settled), num_right)])
        if before is None or len(token_ids) > before.known:
            self._guesses[request_id] = _Guess(len(token_ids), guess, bisect_right(MATCHES, match_length))

    def note_device(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        self._device.observe([(request_id, num_drafted, num_accepted)])

    def prefers_host(self, request_id: int, num_unknown: int, most: int) -> bool:
        """Whether more of `most` drafts will probably be accepted if they come from the host's last guess than from the
        device. num_unknown: tokens at the beginning of the guess that steps in flight yield; they must be right too."""
        guess = self._guesses[request_id]
        gains = self._host[guess.match].gains(request_id)
        usable = min(most, len(guess.tokens) - num_unknown)
        reached = gains[min(num_unknown, len(gains)) - 1] if num_unknown else 1.0
        return reached * sum(gains[:usable]) >= sum(self._device.gains(request_id)[:most])

    def forget(self, request_id: int) -> None:
        self._guesses.pop(request_id, None)
        for own in (self._device, *self._host):
            own.forget(request_id)
