"""Receipts: what they say, that a second computation finds every bit again, and that every change of one is named."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams, cli
from outrider.adapters import LoRARequest
from outrider.config import EngineConfig
from outrider.core import file_digests
from outrider.core.feature_parts import RequestPart
from outrider.core.file_digests import canonical
from outrider.engine import model_digests as digests
from outrider.features.receipts import receipt as receipt_form
from outrider.features.receipts import request, writer
from outrider.features.receipts.receipt import leaves, read_key, sealed
from outrider.features.receipts.writer import SETTINGS
from outrider.kernels import cpu as native
from outrider.receipts import Receipt, Verdict, check_receipt, engine_settings, find_receipts, replay
from tests.adapters.folders import write_adapter
from tests.engine.harness import byte_tokenizer, prompt_of, random_model, save_folder
from tests.engine.test_exact_mode import FAMILIES, VOCAB

KEY = "a key of at least sixteen bytes"
SEAL = "a receipt is sealed"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "auto": False}
ENGINE: dict[str, Any] = {"exact": True, "device": "cpu", "max_model_len": 112, "max_num_seqs": 4, "num_pages": 64}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, receipt=True, ignore_eos=True)
# Settings on which no bit of an exact engine depends: sizes, speed, text, places of files, and drafts.
BITLESS = {
    "host_cache_memory", "disk_cache_dir", "disk_cache_size",
    "model", "tokenizer", "revision", "download_dir", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "max_step_ms", "num_pages", "kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "overlap",
    "seed", "load_format", "enforce_eager", "max_logprobs", "pad_requests", "pad_tokens", "speculative_config",
    "adapt_drafter", "adapt_memory_bytes", "adapt_share", "exact", "skip_tokenizer_init", "kv_events_config",
    "profiler_dir", "fit", "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_memory_bytes",
    "receipt_key_file", "nnodes", "node_rank", "master_addr", "master_port", "worker_extension_cls",
    "limit_mm_per_prompt", "return_sampling_mask", "enable_return_routed_experts",
}

pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("models") / "tiny", FAMILIES["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "operator.key"
    path.write_text(KEY + "\n")
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """The engine that computes again: no drafts, no prefix hits."""
    with LLM(str(folder), enable_prefix_caching=False, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def receipt(folder: Path, key_file: str) -> Receipt:
    """A signed receipt of a sampled request that ran beside others, with drafts."""
    prompts = [prompt_of(index, 9 + index, VOCAB) for index in range(5)]
    with LLM(str(folder), speculative_config=DRAFTS, receipt_key_file=key_file, **ENGINE) as llm:
        outputs = llm.generate(prompts, SAMPLED, use_tqdm=False)
    made = outputs[2].outputs[0].extras.get("receipt")
    assert made is not None
    return made


def test_a_receipt_says_what_the_tokens_depend_on(receipt: Receipt, folder: Path) -> None:
    assert receipt["receipt"] == 1 and receipt["exact"] is True and receipt["sample_index"] == 0
    assert receipt["prompt_token_ids"] == prompt_of(2, 11, VOCAB) and receipt["adapter"] is None
    assert isinstance(receipt["params"]["seed"], int), "the seed that was drawn is written down"
    assert receipt["params"].keys() == {field.name for field in fields(SamplingParams)} - {
        "output_kind", "return_sampling_mask"}
    assert receipt["model"]["name"] == "tiny" and str(folder) not in json.dumps(receipt)
    assert all(receipt["model"].values()) and receipt["weights_versions"] == [[0, 0, 24]]
    output = receipt["output"]
    assert len(output["token_ids"]) == len(output["logprobs"]) == 24 and output["finish_reason"] == "length"
    assert check_receipt(receipt, KEY.encode()) is None


def test_every_setting_is_told_or_changes_no_bit() -> None:
    assert {field.name for field in fields(EngineConfig)} == BITLESS | set(SETTINGS)


@pytest.mark.parametrize("beside", [0, 3])
def test_a_replay_is_equal_alone_and_beside_others(receipt: Receipt, llm: LLM, beside: int) -> None:
    verdict = replay(llm, receipt, key=KEY.encode(), beside=beside)
    assert verdict == Verdict("equal", 24, 24), verdict
    assert replay(llm, json.loads(json.dumps(receipt)), beside=beside).is_equal


def test_writers_of_json_may_shorten_numbers(receipt: Receipt) -> None:
    shortened = json.loads(canonical(receipt))
    assert any(type(value) is not type(leaves(receipt)[path]) for path, value in leaves(shortened).items())
    assert check_receipt(shortened, KEY.encode()) is None


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.125
        case str():
            return ("0" if value[:1] != "0" else "1") + value[1:]
        case None:
            return 1
        case [first, *others]:
            return [changed(first), *others]
        case dict() if value:
            first, *_ = value
            return value | {first: changed(value[first])}
    return [7]


def put(receipt: Receipt, path: str, value: Any) -> Receipt:
    own = copy.deepcopy(receipt)
    *groups, name = path.split(".")
    place = own
    for group in groups:
        place = place[group]
    place[name] = value
    return own


def test_each_changed_field_is_named(receipt: Receipt) -> None:
    for path, value in leaves(receipt).items():
        verdict = check_receipt(put(receipt, path, changed(value)))
        assert verdict is not None and [found.split(":")[0] for found in verdict.findings] == [path]


def test_changed_seals_are_named(receipt: Receipt) -> None:
    for path in leaves(receipt):
        own = copy.deepcopy(receipt)
        own["checks"][path] = changed(own["checks"][path])
        verdict = check_receipt(own)
        assert verdict is not None and path in verdict.findings[0]
    forged = copy.deepcopy(receipt)
    forged["signature"]["value"] = changed(forged["signature"]["value"])
    verdict = check_receipt(forged, KEY.encode())
    assert verdict is not None and verdict.findings[0].startswith("signature:")


def test_fields_that_lack_or_are_new_are_named(receipt: Receipt) -> None:
    for name in receipt:
        if name != "receipt":
            verdict = check_receipt({other: value for other, value in receipt.items() if other != name})
            assert verdict is not None and verdict.findings[0].startswith(f"{name}:")
    for group in ("model", "output"):
        assert check_receipt(receipt | {group: {}}) is not None
    verdict = check_receipt(receipt | {"tenant": "a"})
    assert verdict is not None and verdict.findings == ["tenant: a receipt has no field of this name"]


def test_a_forger_without_the_key_cannot_sign(receipt: Receipt) -> None:
    forged = sealed({name: value for name, value in put(receipt, "params.seed", 5).items()
                     if name not in ("checks", "signature")}, b"another key, long enough")
    assert check_receipt(forged) is None, "without the key only the second computation can tell"
    verdict = check_receipt(forged, KEY.encode())
    assert verdict is not None and verdict.findings[0].startswith("signature:")
    verdict = check_receipt(forged | {"signature": None}, KEY.encode())
    assert verdict is not None and verdict.findings[0].startswith("signature:")


def resealed(receipt: Receipt, path: str, value: Any, key: bytes | None = None) -> Receipt:
    own = put(receipt, path, value)
    return sealed({name: part for name, part in own.items() if name not in ("checks", "signature")}, key)


@pytest.mark.parametrize("name", ["speculative_config", "receipt_key_file", "num_pages", "model"])
def test_only_settings_that_receipts_tell_are_taken(receipt: Receipt, name: str) -> None:
    with pytest.raises(ValueError, match=rf"settings\.{name}: "):
        engine_settings(resealed(receipt, f"settings.{name}", "a"))


def test_code_that_a_receipt_names_runs_only_with_the_operators_signature(
        receipt: Receipt, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, key = "settings.logits_processors", KEY.encode()
    unsigned, signed = (resealed(receipt, path, ["this:s"], own) for own in (None, key))
    for own, known in ((unsigned, None), (unsigned, key), (signed, None), (signed, b"another key, long enough")):
        with pytest.raises(ValueError, match=r"settings\.logits_processors: .* signature"):
            engine_settings(own, known)
    assert engine_settings(signed, key)["logits_processors"] == ("this:s",)
    assert "logits_processors" not in engine_settings(unsigned, given=["logits_processors"])
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(unsigned))
    sys.modules.pop("this", None)
    assert cli.main(["replay", str(file), str(folder)]) == 1
    assert "receipt 1: refused" in capsys.readouterr().out and "this" not in sys.modules


@pytest.mark.parametrize(("path", "value"), [
    ("model", None), ("output", None), ("prompt_token_ids", None), ("prompt_token_ids", ["a"]),
    ("weights_versions", None), ("weights_versions", [1]), ("bidirectional_spans", None), ("params", {}),
    ("params.max_tokens", "many"), ("sample_index", [0]), ("exact", "yes"), ("adapter", {}), ("kernels", None),
    ("output.token_ids", None), ("output.logprobs", None), ("output.logprobs", [math.nan] * 24),
    ("output.logprobs", []), ("output.logprobs_start", 25), ("params.extra_args", {"a": math.inf})])
def test_values_of_another_kind_are_refused(receipt: Receipt, path: str, value: Any) -> None:
    verdict = check_receipt(put(receipt, path, value))
    assert verdict is not None and verdict.findings[0].startswith(path.removesuffix(".logprobs")), verdict


@pytest.mark.parametrize(("path", "value"), [
    ("params.bad_words_token_ids", [1]), ("params.logit_bias", 1), ("params.structured_outputs", {"a": 1}),
    ("params.tenant", 1)])
def test_parameters_that_are_none_are_refused(receipt: Receipt, llm: LLM, path: str, value: Any) -> None:
    verdict = replay(llm, resealed(receipt, path, value))
    assert verdict.verdict == "refused" and verdict.findings[0].startswith("params: "), verdict


def test_one_bad_receipt_leaves_the_others_of_its_file(receipt: Receipt, folder: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    bad = [put(receipt, "weights_versions", None), put(receipt, "output.logprobs", [math.nan] * 24),
           resealed(receipt, "params.max_tokens", 10**9), resealed(receipt, "settings.page_size", "wide"),
           resealed(receipt, "params.logit_bias", 1)]
    file = tmp_path / "receipts.json"
    file.write_text(json.dumps([*bad, receipt]))
    assert cli.main(["replay", str(file), str(folder), "--json"]) == 1
    verdicts = [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == ["refused"] * len(bad) + ["equal"]


@pytest.mark.parametrize("path", ["model.weights", "model.config", "model.tokenizer", "kernels.torch",
                                  "kernels.sources", "kernels.device", "settings.page_size", "exact",
                                  "output.finish_reason"])
def test_a_field_with_a_new_check_is_named_by_the_second_computation(receipt: Receipt, llm: LLM, path: str) -> None:
    verdict = replay(llm, resealed(receipt, path, changed(leaves(receipt)[path])))
    assert not verdict.is_equal and verdict.findings[0].startswith(f"{path}: the receipt says"), verdict


@pytest.mark.parametrize("path", ["params.seed", "params.temperature", "prompt_token_ids"])
def test_another_request_has_other_tokens(receipt: Receipt, llm: LLM, path: str) -> None:
    verdict = replay(llm, resealed(receipt, path, changed(leaves(receipt)[path])))
    assert verdict.verdict == "different" and verdict.findings[0].startswith("token "), verdict


def test_the_first_bit_that_differs_is_named(receipt: Receipt, llm: LLM) -> None:
    logprobs = list(receipt["output"]["logprobs"])
    before = logprobs[7]
    logprobs[7] = logprobs[9] = before + 2**-40
    (found,) = replay(llm, resealed(receipt, "output.logprobs", logprobs)).findings
    token = receipt["output"]["token_ids"][7]
    assert found == (f"token 7: the receipt has id {token} with log-probability {logprobs[7]!r}, this computation has "
                     f"id {token} with log-probability {before!r}")
    tokens = [*receipt["output"]["token_ids"][:-1], 3]
    (found,) = replay(llm, resealed(receipt, "output.token_ids", tokens)).findings
    assert found.startswith("token 23: the receipt has id 3 with")


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "gemma3"])
def test_hybrids_and_windows_replay(family: str, tmp_path: Path) -> None:
    """Requests with prefix hits, drafts and forms, of which each sample has its own receipt."""
    path = save_folder(tmp_path / family, FAMILIES[family])
    shared = prompt_of(0, 34, VOCAB)
    prompts = [[*shared, *prompt_of(index, 5 + index, VOCAB)] for index in range(4)]
    params = [SamplingParams(max_tokens=24, receipt=True, allowed_token_ids=[5, 6], repetition_penalty=0.9),
              SamplingParams(n=2, temperature=1.1, top_k=40, max_tokens=20, receipt=True, seed=5),
              SamplingParams(temperature=0.8, min_p=0.02, max_tokens=18, receipt=True, logprobs=3,
                             logit_bias={7: 2.0}, presence_penalty=0.5), SAMPLED]
    with LLM(str(path), speculative_config=DRAFTS, **ENGINE) as llm:
        llm.generate([shared], SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert any(output.num_cached_tokens for output in outputs)
        assert sum(output.metrics.num_accepted_tokens for output in outputs)
    with LLM(str(path), enable_prefix_caching=False, **ENGINE) as llm:
        for output in outputs:
            for sample in output.outputs:
                made = sample.extras["receipt"]
                assert made["sample_index"] == sample.index and replay(llm, made, beside=sample.index).is_equal


def test_text_rules_replay(folder: Path) -> None:
    """Stop texts, words, forms and lists of ids are part of the parameters, and the seed makes them come again."""
    ids = [*range(97, 103)]
    form = StructuredOutputsParams(regex="[a-d]{4,9}")
    params = [SamplingParams(temperature=1, max_tokens=30, receipt=True, allowed_token_ids=ids, stop=["e", "zq"]),
              SamplingParams(temperature=1, max_tokens=30, receipt=True, bad_words=["a", "bc"], stop_token_ids=[101]),
              SamplingParams(temperature=1, max_tokens=30, receipt=True, structured_outputs=form)]
    with LLM(str(folder), **ENGINE) as llm:
        outputs = llm.generate([prompt_of(1, 8, VOCAB)] * len(params), params, use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "stop"
        assert all(replay(llm, output.outputs[0].extras.get("receipt"), beside=2).is_equal for output in outputs)


def test_without_exact_mode_a_receipt_is_no_promise(receipt: Receipt, folder: Path) -> None:
    with LLM(str(folder), **ENGINE | {"exact": False}) as llm:
        (output,) = llm.generate([prompt_of(3, 8, VOCAB)], SAMPLED, use_tqdm=False)
        own = output.outputs[0].extras.get("receipt")
        assert own is not None and own["exact"] is False
        logprobs = [value + 1e-6 for value in own["output"]["logprobs"]]
        near = replay(llm, resealed(own, "output.logprobs", logprobs))
        assert near.is_equal and near.verdict == "equal up to rounding" and "promises no bits" in near.notes[0]
        far = replay(llm, resealed(own, "output.logprobs", [value + 1 for value in logprobs]))
        assert far.verdict == "different" and "proves nothing" in far.notes[0]


def test_updated_weights_are_taken_at_the_users_word(folder: Path, tmp_path: Path) -> None:
    other = save_folder(tmp_path / "other", FAMILIES["llama"], seed=3)
    byte_tokenizer().backend.save(str(other / "tokenizer.json"))
    with LLM(str(folder), **ENGINE) as llm:
        llm.update_weights(str(other))
        (output,) = llm.generate([prompt_of(3, 8, VOCAB)], SAMPLED, use_tqdm=False)
    own = output.outputs[0].extras.get("receipt")
    assert own is not None and own["model"]["weights"] is None and own["weights_versions"] == [[1, 0, 24]]
    with LLM(str(other), **ENGINE) as llm:
        verdict = replay(llm, own)
        assert verdict.is_equal and "taken at your word" in verdict.notes[0]
    with LLM(str(folder), **ENGINE) as llm:
        assert replay(llm, own).verdict == "different"
    mixed = resealed(own, "weights_versions", [[0, 0, 9], [1, 9, 24]])
    refused = check_receipt(mixed)
    assert refused is not None and "updated while" in refused.findings[0]


@pytest.mark.parametrize("in_place", [False, True])
def test_an_update_within_the_prompt_is_told_if_its_pages_stay(in_place: bool, folder: Path, tmp_path: Path) -> None:
    """Then the answer depends on both weights, though all its tokens are of the new ones."""
    other = save_folder(tmp_path / "other", FAMILIES["llama"], seed=3)
    byte_tokenizer().backend.save(str(other / "tokenizer.json"))
    asked = replace(SAMPLED, prompt_logprobs=0, seed=4)
    with LLM(str(folder), **ENGINE | {"max_num_batched_tokens": 16}) as llm:
        llm.llm_engine.add_request("a", prompt_of(3, 70, VOCAB), asked)
        while not any(len(output.prompt_logprobs or ()) > 1 for output in llm.llm_engine.step()):
            continue
        if in_place:
            llm.pause_generation("keep", clear_cache=False)
        llm.update_weights(str(other))
        llm.resume_generation()
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                last = output
    made = last.outputs[0].extras.get("receipt")
    assert made is not None and last.outputs[0].weight_versions == [(1, 0, 24)]
    assert made["weights_versions"] == ([[0, 0, 0]] if in_place else []) + [[1, 0, 24]]
    with LLM(str(other), **ENGINE) as llm:
        verdict = replay(llm, made)
    assert verdict.is_equal != in_place
    assert not in_place or "updated while" in verdict.findings[0]


def test_what_no_receipt_can_tell_is_refused(folder: Path, tmp_path: Path) -> None:
    with LLM(str(folder), load_format="dummy", **ENGINE) as llm, pytest.raises(ValueError, match="load_format"):
        llm.generate([[1, 2]], SAMPLED, use_tqdm=False)
    with LLM(str(folder), **ENGINE) as llm, pytest.raises(ValueError, match="leave prompt_embeds or receipt out"):
        llm.generate({"prompt_embeds": torch.zeros(2, 40)}, SAMPLED, use_tqdm=False)
    with pytest.raises(ValueError, match="receipt_key_file: .* cannot be read"):
        LLM(str(folder), receipt_key_file=str(tmp_path / "none"), **ENGINE)
    short = tmp_path / "short.key"
    short.write_text("abc")
    with pytest.raises(ValueError, match="openssl rand"):
        read_key(str(short))


def test_spans_of_a_prompt_are_told(folder: Path) -> None:
    prompt = {"prompt_token_ids": prompt_of(1, 12, VOCAB), "bidirectional_spans": [[7, 9], [2, 5]]}
    with LLM(str(folder), attention_backend="torch", **ENGINE | {"exact": False}) as llm:
        (output,) = llm.generate([prompt], replace(SAMPLED, max_tokens=3), use_tqdm=False)  # type: ignore[list-item]
    made = output.outputs[0].extras.get("receipt")
    assert made is not None and made["bidirectional_spans"] == [[2, 5], [7, 9]]


def test_an_adapter_is_named_by_its_digest(tmp_path: Path) -> None:
    config = FAMILIES["llama"] | {"tie_word_embeddings": False}
    path, model = save_folder(tmp_path / "model", config), random_model(config, torch.float32, 0)
    one, other = (write_adapter(tmp_path / str(seed), model, seed) for seed in (1, 2))
    asked = LoRARequest("own", 1, str(one))
    with LLM(str(path), enable_lora=True, **ENGINE) as llm:
        plain, (output,) = llm.generate([[5, 6]], SAMPLED, use_tqdm=False), llm.generate(
            [[5, 6]], replace(SAMPLED, seed=3), lora_request=asked, use_tqdm=False)
        own = output.outputs[0].extras.get("receipt")
        assert own is not None and own["adapter"]["name"] == "own" and len(own["adapter"]["digest"]) == 64
        assert str(tmp_path) not in json.dumps(own)
        assert plain[0].outputs[0].extras.get("receipt")["adapter"] is None
        assert replay(llm, own, beside=2, lora_request=LoRARequest("copy", 1, str(one))).is_equal
        wrong = replay(llm, own, lora_request=LoRARequest("other", 1, str(other)))
        assert wrong.findings[0].startswith("adapter.digest: the receipt says") and "token 0" in wrong.findings[1]
        for receipt, lora in ((own, None), (plain[0].outputs[0].extras.get("receipt"), asked)):
            assert replay(llm, receipt, lora_request=lora).findings[0].startswith("adapter:")


def test_a_request_that_went_on_after_an_interrupt_says_from_where(folder: Path) -> None:
    """What an interrupt left of a sample is its tokens: the receipt has log-probabilities of the later ones."""
    prompt = prompt_of(4, 6, VOCAB)
    with LLM(str(folder), **ENGINE) as llm:
        (whole,) = llm.generate([prompt], replace(SAMPLED, seed=9), use_tqdm=False)
        known = whole.outputs[0].token_ids[:10]
        (request,) = llm.engine.checks.check_all([prompt], [replace(SAMPLED, seed=9)], [0])
        llm.engine.resume("again", request, {0: known})
        ends = [end for _ in range(40) for increment in llm.engine.step() if (end := increment.end) is not None]
        own, before = ends[0].extras.get("receipt"), whole.outputs[0].extras.get("receipt")
        assert own is not None and before is not None
        assert own["output"]["logprobs_start"] == 10 and own["weights_versions"] == [[0, 10, 24]]
        assert own["output"]["token_ids"] == whole.outputs[0].token_ids
        assert own["output"]["logprobs"] == before["output"]["logprobs"][10:]
        verdict = replay(llm, own)
        assert verdict.is_equal and (verdict.num_tokens, verdict.num_logprobs) == (24, 14)
        assert "of the first 10 tokens only ids were compared" in verdict.notes[0]
        worse = replay(llm, resealed(own, "output.logprobs", [0.0, *own["output"]["logprobs"][1:]]))
        assert worse.findings[0].startswith("token 10:")


def test_a_replay_says_that_it_compared_ids_alone(folder: Path, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A receipt may lack log-probabilities, after an interrupt or because someone left them out."""
    with LLM(str(folder), **ENGINE) as llm:
        (output,) = llm.generate([prompt_of(4, 6, VOCAB)], SAMPLED, use_tqdm=False)
    own, file = output.outputs[0].extras.get("receipt"), tmp_path / "bare.json"
    assert own is not None
    for num, words in ((0, "(ids of 24 tokens alone)"), (4, "(ids of 24 tokens and log-probabilities of the last 4)")):
        told = own["output"] | {"logprobs": own["output"]["logprobs"][24 - num :], "logprobs_start": 24 - num}
        file.write_text(json.dumps(resealed(own, "output", told)))
        assert cli.main(["replay", str(file), str(folder), "--max-num-seqs", "4"]) == 0
        told = capsys.readouterr().out
        assert f"receipt 1: equal {words}" in told
        assert f"of the first {24 - num} tokens only ids were compared" in told


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Gets each value that is written as JSON, and SEAL for each receipt, with the name of the thread."""
    found: list[tuple[str, Any]] = []
    seal = writer.sealed

    def noted(value: Any) -> bytes:
        found.append((threading.current_thread().name, list(value) if isinstance(value, tuple) else value))
        return canonical(value)

    def sealed_here(*args: Any) -> Receipt:
        noted(SEAL)
        return seal(*args)

    for module in (request, receipt_form, file_digests):
        monkeypatch.setattr(module, "canonical", noted)
    monkeypatch.setattr(writer, "sealed", sealed_here)
    return found


def test_a_prompt_is_written_once_and_seals_are_made_by_the_reader(folder: Path, key_file: str,
                                                                   written: list[tuple[str, Any]]) -> None:
    prompt, asked = prompt_of(2, 40, VOCAB), replace(SAMPLED, n=3, max_tokens=4)
    with LLM(str(folder), receipt_key_file=key_file, **ENGINE) as llm:
        (output,) = llm.generate([prompt], asked, use_tqdm=False)
        values = [value for _, value in written]
        assert prompt not in values and SEAL not in values, "nobody has looked"
        made = [sample.extras["receipt"] for sample in output.outputs]
        values = [value for _, value in written]
        assert values.count(prompt) == 1 and values.count(SEAL) == 3 and made[0] is output.outputs[0].extras["receipt"]
        assert all(check_receipt(own, KEY.encode()) is None for own in made)
        twin = pickle.loads(pickle.dumps(output))
        assert [sample.extras["receipt"] for sample in twin.outputs] == made
        (part,) = pickle.loads(pickle.dumps(llm.engine.checks.check(prompt, asked))).parts
        assert type(part) is RequestPart, "a worker that reads it imports nothing"


def test_the_engines_thread_seals_nothing(folder: Path, key_file: str,
                                          written: list[tuple[str, Any]]) -> None:
    async def main() -> list[Receipt]:
        async with AsyncLLM(str(folder), receipt_key_file=key_file, **ENGINE) as llm:
            async for output in llm.generate(prompt_of(2, 40, VOCAB), replace(SAMPLED, n=3)):
                last = output
            return [sample.extras["receipt"] for sample in last.outputs]

    assert all(check_receipt(own, KEY.encode()) is None for own in asyncio.run(main()))
    assert SEAL in [value for _, value in written] and "outrider-engine" not in {name for name, _ in written}


def test_weights_that_change_on_disk_are_refused(tmp_path: Path) -> None:
    path = save_folder(tmp_path / "model", FAMILIES["llama"])
    with LLM(str(path), **ENGINE) as llm:
        later = time.time() + 60
        os.utime(path / "model.safetensors", (later, later))
        with pytest.raises(ValueError, match=r"model\.safetensors has changed since the engine read it"):
            llm.generate([[1, 2]], SAMPLED, use_tqdm=False)
        (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.outputs[0].extras.get("receipt") is None


def test_files_are_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    hashed: list[Path] = []

    def count(path: Path) -> str:
        hashed.append(path)
        return "0" * 64

    monkeypatch.setattr(digests, "file_digest", count)
    file = folder / "model.safetensors"
    assert digests._file_digests([file]) == digests._file_digests([file]) and hashed == [file]
    (tmp_path / "digests.json").write_text("{")
    assert digests._file_digests([file]) == ["0" * 64] and len(hashed) == 2, "a damaged cache is made anew"


def test_the_command_replays_what_the_other_command_wrote(folder: Path, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["--device", "cpu", "--max-num-seqs", "4", "--num-pages", "64"]
    asked = ["generate", str(folder), "--prompt", "The sea", "--temperature", "1", "--max-tokens", "9", "--exact",
             "--receipt", "--json", "--max-model-len", "64"]
    assert cli.main([*asked, *engine]) == 0
    answer = capsys.readouterr().out
    file = tmp_path / "answer.json"
    file.write_text(answer)
    assert cli.main(["replay", str(file), str(folder), "--beside", "2", "--max-num-seqs", "4"]) == 0
    assert "receipt 1: equal (9 tokens" in capsys.readouterr().out
    (own,) = find_receipts(json.loads(answer))
    file.write_text(json.dumps(put(own, "params.top_p", 0.5)))
    assert cli.main(["replay", str(file), str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == ["params.top_p: it was changed, or its check was"]
    file.write_text(json.dumps(own))
    assert cli.main(["replay", str(file)]) == 2
    assert "give MODEL" in " ".join(capsys.readouterr().err.split())
