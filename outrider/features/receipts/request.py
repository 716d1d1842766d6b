"""ReceiptPart: the part of a request that asks for receipts. SampleNotes: the data for one sample's receipt, collected
while the sample runs. The thread that reads a receipt writes and signs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.core.file_digests import canonical
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.request_keeper import RequestKeepers
from outrider.core.sample_addition import AddingPart, SampleAddition
from outrider.features.receipts.receipt import Receipt
from outrider.features.receipts.writer import ReceiptWriter
from outrider.lora_request import AdapterLoads, LoadedAdapter


class ReceiptPart(AddingPart):
    """Part of a request that asks for a receipt of each sample. A worker, which makes no outputs, gets an empty part in
    its place."""

    def __init__(self, writer: ReceiptWriter) -> None:
        self._writer = writer
        self._prompt: tuple[tuple[int, ...], bytes] | None = None  # token ids, and their canonical bytes

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return RequestPart, ()  # reading it imports nothing of this feature, which would hold up a worker's steps

    def make_additions(self, key: SampleKey, asked: CheckedRequest, keepers: RequestKeepers) -> list[SampleAddition]:
        num_tokens = len(asked.token_ids)
        if any(part.vectors(0, num_tokens) is not None for part in asked.input_parts):
            raise ValueError("receipt: a receipt lists the token ids of a prompt and cannot list prompt_embeds: "
                             "leave prompt_embeds or receipt out")
        if any(own for part in asked.input_parts for own in part.encoded_ranges(0, num_tokens)):
            raise ValueError("receipt: a receipt lists the token ids of a prompt and cannot list images: leave the "
                             "images or receipt out")
        told = {"adapter": _describe_adapter(asked, keepers), "sample_index": key.sample_index}
        return [SampleNotes(key.weights_version, lambda run: self._write(asked, told | run))]

    def _write(self, asked: CheckedRequest, told: dict[str, Any]) -> Receipt:
        prompt = self._prompt
        if prompt is None or prompt[0] is not asked.token_ids:
            self._prompt = prompt = asked.token_ids, canonical(asked.token_ids)  # for all samples
        return self._writer.write(asked, prompt[1], told)


class SampleNotes(SampleAddition):
    """Keeps a sample's tokens, log-probabilities and weight versions until its end."""

    name = "receipt"

    def __init__(self, version: int, write: Callable[[dict[str, Any]], Receipt]) -> None:
        """version: the version of the weights when the sample begins. write: makes the receipt from the noted
        fields."""
        self._write = write
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions = [(version, 0)]  # with the first token of each

    def use_weights(self, version: int, *, in_place: bool) -> None:
        """Note that the weights have changed (see SampleAddition). If the request goes on with its cache, the version
        before stays in the receipt even without a token of its own, since later tokens depend on it."""
        while not in_place and self._versions and self._versions[-1][1] == len(self._token_ids):
            self._versions.pop()
        self._versions.append((version, len(self._token_ids)))

    def resume(self, token_ids: list[int]) -> None:
        """Begin again with the tokens that an interrupted sample has sent (see SampleAddition). Their log-probabilities
        and weight versions are unknown, so the receipt says from which token on it has them."""
        self._token_ids = list(token_ids)
        self._versions = [(self._versions[-1][0], len(token_ids))]

    def take(self, increment: OutputIncrement) -> None:
        self._token_ids += increment.token_ids
        # + 0.0: one zero, since some writers of JSON have no second one.
        self._logprobs += [entry.logprobs[0] + 0.0 for entry in increment.logprobs or ()]

    def finish(self, end: SampleEnd) -> Callable[[], Receipt]:
        output = {"token_ids": self._token_ids, "logprobs": self._logprobs,
                  "logprobs_start": len(self._token_ids) - len(self._logprobs),
                  "finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
        return partial(self._write, {"weights_versions": self._spans(), "output": output})

    def _spans(self) -> list[list[int]]:
        """The versions of the weights, each with the first token that it computed and the token after its last."""
        num_tokens = len(self._token_ids)
        starts = [*(own for own in self._versions if own[1] < num_tokens), (0, num_tokens)]
        return [[version, start, end] for (version, start), (_, end) in pairwise(starts)]


def _describe_adapter(asked: CheckedRequest, keepers: RequestKeepers) -> dict[str, str] | None:
    part = asked.part(LoadedAdapter)
    if part is None:
        return None
    loads = keepers.find(AdapterLoads)  # type: ignore[type-abstract]
    assert loads is not None, "a request with an adapter was added without adapters"
    name, digest = loads.identity(part.number)
    return {"name": name, "digest": digest}
