"""Finds receipts in JSON, refuses those that were changed, and computes the tokens of the others again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from outrider.core.outputs import RequestOutput
from outrider.engine.engine import Engine
from outrider.features.receipts.asked_again import num_tokens, params_of, prompt_of, random_mates
from outrider.features.receipts.comparison import REFUSED, Verdict, compare
from outrider.features.receipts.receipt import Receipt, faults
from outrider.lora_request import LoRARequest


class Generates(Protocol):
    """The part of an LLM's interface that a replay uses."""

    engine: Engine

    def generate(self, prompts: Any, sampling_params: Any, *, lora_request: Any = None,
                 use_tqdm: bool = True) -> list[RequestOutput]: ...


def find_receipts(value: Any) -> Iterator[Any]:
    """All receipts in a JSON value: a receipt, an answer of a server, a line of `outrider generate --json`."""
    if isinstance(value, dict) and isinstance(value.get("receipt"), int | float | str) and "params" in value:
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from find_receipts(each)
    elif isinstance(value, list):
        for each in value:
            yield from find_receipts(each)


def check_receipt(receipt: Receipt, key: bytes | None = None) -> Verdict | None:
    """Return a verdict that refuses a receipt which was changed or cannot be computed again. None: it may be
    replayed."""
    found = faults(receipt, key)
    if not found and len(receipt["weights_versions"]) > 1:
        found = ["weights_versions: the weights were updated while the request ran, so no engine can repeat it"]
    return Verdict(REFUSED, findings=found) if found else None


def replay(llm: Generates, receipt: Receipt, *, key: bytes | None = None, beside: int = 0,
           lora_request: LoRARequest | None = None) -> Verdict:
    """Compute the tokens of a receipt again, alone or in a batch with random requests, and compare. `llm` must have the
    receipt's model and settings; differences are reported by name."""
    refused = check_receipt(receipt, key)
    if refused is not None:
        return refused
    if (receipt["adapter"] is None) != (lora_request is None):
        missing = "it needs its adapter" if lora_request is None else "its request had no adapter"
        return Verdict(REFUSED, findings=[f"adapter: {missing} (--lora)"])
    try:
        asked, params = prompt_of(receipt), params_of(receipt)
        limits = llm.engine.limits
        mates = random_mates(beside, limits.vocab_size, min(num_tokens(receipt), limits.max_len), seed=beside)
        outputs = llm.generate([asked, *(prompt for prompt, _ in mates)], [params, *(own for _, own in mates)],
                               lora_request=[lora_request, *[None] * beside], use_tqdm=False)
    except (TypeError, ValueError) as error:
        return Verdict(REFUSED, findings=[f"params: {error}"])
    sample = next((own for own in outputs[0].outputs if own.index == receipt["sample_index"]), None)
    if sample is None:
        return Verdict(REFUSED, findings=[f"sample_index: the request has {len(outputs[0].outputs)} samples"])
    if "receipt" not in sample.extras:
        return Verdict(REFUSED, findings=[f"the tokens could not be computed again: {sample.error}"])
    verdict = compare(receipt, sample.extras["receipt"])
    if key is None and receipt["signature"] is not None:
        verdict.notes.append("signature: not checked, which takes the operator's key (--receipt-key-file)")
    return verdict
