"""The JSON of a receipt: one object with a check value of every field and, from an operator with a key, a signature.

A check value is the beginning of a field's SHA-256. Check values show which field was changed by mistake. The signature
shows every change, even if the check values were computed again to hide it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from outrider.core.file_digests import bytes_digest, canonical, canonical_object

Receipt: TypeAlias = dict[str, Any]
VERSION = 1
CHECK_DIGITS = 16
ALGORITHM = "hmac-sha256"
LEAST_KEY_BYTES = 16
# Every field, with its own fields if it has some. The parameters and the settings of versions to come may have others.
FIELDS: dict[str, tuple[str, ...]] = {
    "receipt": (), "exact": (), "model": ("name", "weights", "config", "tokenizer"), "adapter": (),
    "weights_versions": (), "settings": (), "kernels": (), "prompt_token_ids": (), "bidirectional_spans": (),
    "params": (), "sample_index": (),
    "output": ("token_ids", "logprobs", "logprobs_start", "finish_reason", "stop_reason"),
    "checks": (), "signature": (),
}
ADAPTER = ("name", "digest")
SEALS = ("checks", "signature")
NOTHING: Mapping[str, bytes] = MappingProxyType({})


def read_key(path: str) -> bytes:
    """Read the operator's key: the bytes of a file, without white space at its ends."""
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ValueError(f"receipt_key_file: {path} cannot be read ({error.strerror}): give a file with at least "
                         f"{LEAST_KEY_BYTES} random bytes, as `openssl rand -hex 32` writes") from None
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(f"receipt_key_file: {path} has {len(key)} bytes, and a key has at least {LEAST_KEY_BYTES}: "
                         "`openssl rand -hex 32` writes one")
    return key


def sealed(fields: Mapping[str, Any], key: bytes | None, written: Mapping[str, bytes] = NOTHING) -> Receipt:
    """Return the receipt with check values added and, if there is a key, with a signature. written: the canonical bytes
    of some long fields, if the caller has them already."""
    checks = {path: _digits(written[path]) if path in written else check(value)
              for path, value in leaves(fields).items()}
    receipt = {**fields, "checks": checks, "signature": None}
    if key is not None:
        receipt["signature"] = {"algorithm": ALGORITHM, "value": signature(receipt, key, written)}
    return receipt


def check(value: Any) -> str:
    return _digits(canonical(value))


def _digits(written: bytes) -> str:
    return bytes_digest(written)[:CHECK_DIGITS]


def signature(receipt: Mapping[str, Any], key: bytes, written: Mapping[str, bytes] = NOTHING) -> str:
    """The HMAC of all fields except the signature itself."""
    signed = {name: value for name, value in receipt.items() if name != "signature"}
    return hmac.new(key, canonical_object(signed, written), "sha256").hexdigest()


def leaves(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """All values by their paths, such as `params.seed`, except checks and signature. A list is a single value."""
    found: dict[str, Any] = {}
    for name, value in receipt.items():
        if name in SEALS:
            continue
        if isinstance(value, dict) and value:
            found |= {f"{name}.{part}": own for part, own in value.items()}
        else:
            found[name] = value
    return found


def faults(receipt: Any, key: bytes | None) -> list[str]:
    """List what is wrong with a receipt itself, before its tokens are computed again. key: None leaves the signature
    unchecked."""
    if not isinstance(receipt, dict) or "receipt" not in receipt:
        raise ValueError('this is no receipt: it has no field "receipt". Give the value of "receipt" of an answer')
    if receipt["receipt"] != VERSION:
        return [f"receipt: this version of outrider reads receipts of version {VERSION}, not {receipt['receipt']!r}"]
    found = _form_faults(receipt)
    if found:
        return found
    checks, values = receipt["checks"], leaves(receipt)
    found = [f"{path}: it was changed, or its check was" for path, value in values.items()
             if checks.get(path) != check(value)]
    found += [f"checks: there is one of {path}, which the receipt does not have"
              for path in checks if path not in values]
    return found + _signature_faults(receipt, key)


def _form_faults(receipt: Receipt) -> list[str]:
    found = [f"{name}: the receipt lacks this field" for name in FIELDS if name not in receipt]
    found += [f"{name}: a receipt has no field of this name" for name in receipt if name not in FIELDS]
    found += [f"{name}: it must have the fields {', '.join(parts)}" for name, parts in FIELDS.items()
              if parts and name in receipt and not _has_fields(receipt[name], parts)]
    found += [f"{name}: it must be an object" for name in ("checks", "params", "settings", "kernels")
              if name in receipt and not isinstance(receipt[name], dict)]
    return found or _value_faults(receipt)


def _value_faults(receipt: Receipt) -> list[str]:
    """List the values that a replay cannot read because of their type. The receipt has all fields."""
    output, adapter, values = receipt["output"], receipt["adapter"], leaves(receipt)
    fits = {
        "exact": isinstance(receipt["exact"], bool),
        "adapter": adapter is None or _has_fields(adapter, ADAPTER),
        "weights_versions": _are(receipt["weights_versions"], lambda own: _is_ids(own) and len(own) == 3),
        "prompt_token_ids": _is_ids(receipt["prompt_token_ids"]),
        "bidirectional_spans": _are(receipt["bidirectional_spans"], lambda own: _is_ids(own) and len(own) == 2),
        "params.max_tokens": _is_whole(values.get("params.max_tokens")),
        "sample_index": _is_whole(receipt["sample_index"]),
        "output.token_ids": _is_ids(output["token_ids"]),
        "output.logprobs": _are(output["logprobs"], _is_number),
        "output.logprobs_start": _is_whole(output["logprobs_start"]),
    }
    found = [f"{path}: a receipt has no such value here" for path, is_right in fits.items() if not is_right]
    found = found or [f"{path}: it holds a number that JSON does not have" for path, value in values.items()
                      if not _is_json(value)]
    if not found and output["logprobs_start"] + len(output["logprobs"]) != len(output["token_ids"]):
        found = ["output.logprobs_start: from there on every token must have a log-probability"]
    return found


def _has_fields(value: Any, names: Collection[str]) -> bool:
    return isinstance(value, dict) and value.keys() == set(names)


def _are(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def _is_ids(value: Any) -> bool:
    return _are(value, _is_whole)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_json(value: Any) -> bool:
    try:
        canonical(value)
    except (TypeError, ValueError):
        return False
    return True


def _signature_faults(receipt: Receipt, key: bytes | None) -> list[str]:
    if key is None:
        return []
    given = receipt["signature"]
    if given is None:
        return ["signature: the receipt has none, and a key was given"]
    expected = {"algorithm": ALGORITHM, "value": signature(receipt, key)}
    if not isinstance(given, dict) or not hmac.compare_digest(canonical(given), canonical(expected)):
        return ["signature: it does not fit the receipt, or another key made it"]
    return []
