"""`outrider replay`: computes the tokens of receipts again and says whether every bit is equal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import receipts as own
from outrider.commands.parser import (
    ENGINE_FIELDS,
    UsageError,
    add_engine_flags,
    add_lora,
    add_model,
    engine_config,
    named_adapter,
)
from outrider.core.file_digests import canonical
from outrider.core.lazy_exports import LateModule
from outrider.core.status_line import status_line

if TYPE_CHECKING:
    from outrider import llm as fronts
    from outrider.config import EngineConfig
    from outrider.engine import load, start
    from outrider.models import sources
    from outrider.receipts import Receipt, Verdict
else:
    fronts = LateModule("outrider.llm")
    load = LateModule("outrider.engine.load")
    sources = LateModule("outrider.models.sources")
    start = LateModule("outrider.engine.start")

HELP = "compute the tokens of receipts again and compare every bit"
USAGE = "RECEIPT [MODEL] [flags]"
EXAMPLES = """examples:
  outrider generate --prompt "The sea is" --exact --receipt --json > answer.json
  outrider replay answer.json
  outrider replay receipt.json path/to/folder --beside 7 --receipt-key-file operator.key

Status 1 if a bit differs, or if a field, a digest or the signature does not fit; the line says which.
"""
# What a receipt tells of its engine, and what the command decides itself.
DECIDED = (
    "activation_bits", "attention_backend", "checkpoint_interval", "device", "dtype", "exact", "fit", "hf_overrides",
    "ignore_config_keys", "index_key_dtype", "keep_quantized", "kv_cache_dtype", "kv_cache_dtype_skip_layers",
    "load_format", "logprobs_mode", "max_logprobs", "max_model_len", "model_impl", "packed_weights", "page_size",
    "quantization", "tensor_parallel_size",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt_file", metavar="RECEIPT", help="a file with a receipt, an answer that has some, or "
                                                                "one of these a line; - for standard input")
    add_model(parser, default=None)
    parser.add_argument("--beside", type=int, default=0, metavar="N",
                        help="compute each beside N random requests (default: alone)")
    parser.add_argument("--json", action="store_true", help="print each verdict as one line of JSON")
    add_lora(parser)
    add_engine_flags(parser, skip=DECIDED)


def run(args: argparse.Namespace) -> int:
    receipts = read_receipts(args.receipt_file)
    path = getattr(args, "receipt_key_file", None)
    key = None if path is None else own.read_key(path)
    verdicts: list[Verdict | None] = [own.check_receipt(receipt, key) for receipt in receipts]
    groups: dict[bytes, list[int]] = {}  # receipts that one engine can compute
    for index, receipt in enumerate(receipts):
        if verdicts[index] is None:
            groups.setdefault(canonical([receipt["model"], receipt["settings"], receipt["exact"]]), []).append(index)
    for members in groups.values():
        for index, verdict in zip(members, _replay_group(args, [receipts[i] for i in members], key), strict=True):
            verdicts[index] = verdict
    done = [verdict for verdict in verdicts if verdict is not None]
    for number, verdict in enumerate(done, 1):
        print(json.dumps({"number": number, **asdict(verdict)}) if args.json else _line(number, verdict), flush=True)
    num_equal = sum(verdict.is_equal for verdict in done)
    if not args.json:
        print(f"{num_equal} of {len(done)} receipts are equal")
    return int(num_equal < len(done))


def read_receipts(path: str) -> list[Receipt]:
    """Read the receipts of a file: one JSON value, or one on each line."""
    if path != "-" and not Path(path).is_file():
        raise UsageError(f"there is no file {path}: give a receipt, or an answer with receipts, as JSON")
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    try:
        values: list[Any] = [json.loads(text)]
    except ValueError:
        values = _lines(path, text)
    found = list(own.find_receipts(values))
    if not found:
        raise UsageError(f"{path} holds no receipt: a request asks for one with \"receipt\": true")
    return found


def _lines(path: str, text: str) -> list[Any]:
    values = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{path}, line {number} is not valid JSON: {error}") from None
    return values


def _replay_group(args: argparse.Namespace, receipts: list[Receipt], key: bytes | None) -> list[Verdict]:
    """Replay receipts of one model and one set of settings on one engine. If the engine does not start with them, each
    receipt gets an engine of its own, so that only the faulty ones are refused."""
    adapter = named_adapter(args)
    if args.model is None:
        args = argparse.Namespace(**vars(args) | {"model": _model_of(receipts[0])})
    llm: fronts.LLM | None = None
    with status_line(f"loading {args.model}"):
        load.find_model(engine_config(args))  # a model that is not there is no receipt's fault
        try:
            llm = fronts.LLM.around(start.start_engine(_config(args, receipts, key)))
        except (TypeError, ValueError) as error:
            if len(receipts) == 1:
                return [own.Verdict(own.REFUSED, findings=[str(error)])]
    if llm is None:
        return [verdict for receipt in receipts for verdict in _replay_group(args, [receipt], key)]
    with llm:
        return [own.replay(llm, receipt, key=key, beside=args.beside,
                           lora_request=adapter if receipt["adapter"] else None) for receipt in receipts]


def _config(args: argparse.Namespace, receipts: list[Receipt], key: bytes | None) -> EngineConfig:
    given = [name for name in ENGINE_FIELDS if hasattr(args, name)]
    return engine_config(args, **own.engine_settings(receipts[0], key, given=given),
                         max_model_len=max(map(own.num_tokens, receipts)), max_logprobs=-1)


def _model_of(receipt: Receipt) -> str:
    """Return the model that the receipt names, if the name is a path or a hub id."""
    name = receipt["model"]["name"]
    if receipt["model"]["weights"] is None:
        raise UsageError("the receipt names no weight files, because the engine's weights had been updated after the "
                         "start: give MODEL, a folder with the updated weights")
    if isinstance(name, str) and (name == sources.DEFAULT_MODEL or "/" in name):
        return name
    raise UsageError(f"the receipt's model is called {name!r}, which is neither a folder nor a file: give MODEL, the "
                     "folder or file of this model")


def _line(number: int, verdict: Verdict) -> str:
    what = "" if verdict.verdict == own.REFUSED else f" ({_compared(verdict)})"
    more = [f"\n  {line}" for line in (*verdict.findings, *verdict.notes)]
    return f"receipt {number}: {verdict.verdict}{what}" + "".join(more)


def _compared(verdict: Verdict) -> str:
    """Describe which part of the tokens was compared: an interrupted sample has log-probabilities of its last tokens
    only."""
    if verdict.num_logprobs == verdict.num_tokens:
        return f"{verdict.num_tokens} tokens and their log-probabilities"
    more = f"and log-probabilities of the last {verdict.num_logprobs}" if verdict.num_logprobs else "alone"
    return f"ids of {verdict.num_tokens} tokens {more}"
