"""Every setting, parameter, key and flag with values it cannot have: a ValueError that names it and what is allowed.

The tables are made from the declared fields, so that a new field is covered when it is declared. What each field does
accept is written down here a second time, by hand: a bound that is lost shows.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from outrider import LLM, SamplingParams, cli
from outrider.commands.parser import ENGINE_FIELDS, SAMPLING_FIELDS
from outrider.config import EngineConfig, SpeculativeConfig
from tests.engine.harness import CONFIGS, Rig, add_request, byte_tokenizer, greedy, save_folder, tiny_model

NAN, INF, HUGE = float("nan"), float("inf"), 10**30


class Odd:
    """As much of a stranger as there can be: it can neither be shown nor compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not equal to anything")

    __hash__ = None  # type: ignore[assignment]


BAD: dict[str, Any] = {
    "none": None, "true": True, "false": False, "nan": NAN, "inf": INF, "-inf": -INF, "huge": HUGE, "-huge": -HUGE,
    "many digits": 10**5000, "2**63": 2**63, "-1": -1, "-1.5": -1.5, "0.5": 0.5, "1e300": 1e300, "empty text": "",
    "text": "high", "number as text": "4", "half a pair": "\ud800", "bytes": b"4", "empty list": [], "list": [[]],
    "list of text": ["x"], "list of none": [None], "list of bools": [True], "list of huge": [HUGE], "list of -1": [-1],
    "list of nan": [NAN], "empty dict": {}, "dict": {"x": 1}, "dict of huge": {HUGE: 1}, "dict of nan": {1: NAN},
    "dict by bool": {True: 1}, "set": {4}, "complex": 4j, "class": int, "stranger": Odd(),
}

# The only ones of BAD that mean something, by the plain type of a field and by its name.
BY_TYPE: dict[Any, set[str]] = {bool: {"true", "false"}, type(None): {"none"}, str: set(), int: set(), float: {"0.5"}}
BY_NAME = {
    "top_k": {"-1"}, "logprobs": {"-1"}, "prompt_logprobs": {"-1"}, "max_logprobs": {"-1"}, "seed": {"-1"},
    "priority": {"-1"},
    "presence_penalty": {"-1", "-1.5"}, "frequency_penalty": {"-1", "-1.5"}, "temperature": {"2**63", "huge"},
    "stop": {"text", "number as text", "list of text", "empty list"}, "bad_words": {"list of text", "empty list"},
    "stop_token_ids": {"empty list"}, "logit_bias": {"empty dict"}, "pad_requests": {"empty list"},
    "pad_tokens": {"empty list"}, "bad_words_token_ids": {"empty list", "list"}, "model": {"text", "number as text"},
    "tokenizer": {"text", "number as text"}, "revision": {"text", "number as text"},
    "download_dir": {"text", "number as text"}, "ignore_config_keys": {"empty list", "list of text"},
    "hf_overrides": {"empty dict", "dict"}, "profiler_dir": {"text", "number as text"},
    "logits_processors": {"empty list"}, "kv_cache_dtype_skip_layers": {"empty list"},
    "extra_args": {"empty dict", "dict"},
    "receipt_key_file": {"text", "number as text"}, "disk_cache_dir": {"text", "number as text"},
    "master_addr": {"text", "number as text"}, "worker_extension_cls": {"text", "number as text"},
    "limit_mm_per_prompt": {"empty dict"},
    "kv_cache_memory_bytes": set(), "synthetic_acceptance_length": set(), "repetition_penalty": {"0.5"},
}
NOT_HALF = {"synthetic_acceptance_length"}  # a run has one token at least


def accepted(name: str, plain: Any) -> set[str]:
    types = get_args(plain) or (plain,)
    found = set().union(*(BY_TYPE.get(kind, set()) for kind in types), BY_NAME.get(name, set()))
    return found - ({"0.5"} if name in NOT_HALF else set())


def check(give: Callable[[Any], object], name: str, plain: Any) -> None:
    """Every value of BAD: accepted, or one line that names the field and says what it may be."""
    for case, value in BAD.items():
        if case in accepted(name, plain):
            give(value)
            continue
        with pytest.raises(ValueError) as error:
            give(value)
        message = str(error.value)
        assert type(error.value) is ValueError, case
        assert re.search(rf"\b{name} must be (an? |one of |True or False)", message), (case, message)
        assert ", got " in message and "\n" not in message and len(message) < 600, (case, message)


SAMPLING, SETTINGS, SPECULATIVE = map(get_type_hints, (SamplingParams, EngineConfig, SpeculativeConfig))


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SamplingParams)])
def test_sampling_parameters(name: str) -> None:
    check(lambda value: SamplingParams(**{name: value}), name, SAMPLING[name])


HEAD = {"method": "eagle3", "model": "y", "num_speculative_tokens": 3}
SECTIONS = {"speculative_config": {"none"}, "kv_events_config": {"none", "empty dict"}}  # with keys of their own


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(EngineConfig) if f.name not in SECTIONS])
def test_settings(name: str) -> None:
    others = {"speculative_config": HEAD} if name == "adapt_drafter" else {}
    check(lambda value: EngineConfig(**{"model": "x", name: value} | others), name, SETTINGS[name])


@pytest.mark.parametrize("name", SECTIONS)
def test_sections(name: str) -> None:
    for case, value in BAD.items():
        if case in SECTIONS[name]:
            EngineConfig(**{"model": "x", name: value})
        else:
            with pytest.raises(ValueError, match=name):
                EngineConfig(**{"model": "x", name: value})


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(SpeculativeConfig)])
def test_speculative_keys(name: str) -> None:
    check(lambda value: EngineConfig("x", speculative_config=NGRAM | {name: value}), name, SPECULATIVE[name])


def test_speculative_keys_that_must_be_there() -> None:
    for key in NGRAM:
        with pytest.raises(ValueError, match=f"{key} must be given"):
            EngineConfig("x", speculative_config={k: v for k, v in NGRAM.items() if k != key})


def test_a_priority_is_refused_before_anything_is_queued(rig: Rig) -> None:
    """Others wait meanwhile: a heap that holds something compares what is pushed."""
    for i in range(9):
        add_request(rig.engine, f"before {i}", [5, 6], greedy(2))
    ids = map(str, count())
    check(lambda value: add_request(rig.engine, next(ids), [5, 6], greedy(2), priority=value), "priority", int)
    while rig.engine.has_work:
        rig.engine.step()
    rig.assert_clean()


def test_what_is_not_a_prompt_or_parameters(rig: Rig) -> None:
    for case, value in BAD.items():
        with pytest.raises(ValueError, match="sampling_params must be a SamplingParams"):
            add_request(rig.engine, "x", [5, 6], value)
        with pytest.raises(ValueError, match="prompt token id"):
            add_request(rig.engine, "x", [5, value], greedy(2))
        if case not in ("text", "number as text", "none", "empty text"):
            with pytest.raises(ValueError, match="cache_salt must be a text or None"):
                rig.engine.checks.check({"prompt_token_ids": [5, 6], "cache_salt": value}, greedy(2))
    assert not rig.engine.has_work


@pytest.fixture(scope="module")
def rig() -> Any:
    with Rig(tiny_model("llama")) as rig:
        yield rig


# The command line

FLAG_WORDS = ("", "x", "-1", "nan", "inf", "1e999", str(HUGE), str(2**63), "true", "[]", "{}", "null", "1,x", "-5,3")
# Flags for which such a word means something.
FLAG_ACCEPTS = {
    "seed": {"-1"}, "top_k": {"-1"}, "logprobs": {"-1"}, "prompt_logprobs": {"-1"}, "presence_penalty": {"-1"},
    "max_logprobs": {"-1"}, "frequency_penalty": {"-1"}, "temperature": {str(HUGE), str(2**63)},
    "speculative": {"true"}, "logit_bias": {"{}"}, "hf_overrides": {"{}"}, "extra_args": {"{}"},
    "kv_events_config": {"{}"}, "speculative_config": {"null"}, "limit_mm_per_prompt": {"{}"},
    "pad_requests": {""}, "pad_tokens": {""}, "stop_token_ids": {""},
    **dict.fromkeys(("stop", "bad_words", "tokenizer", "revision", "download_dir",
                     "ignore_config_keys", "profiler_dir", "receipt_key_file", "disk_cache_dir", "master_addr",
                     "worker_extension_cls"), set(FLAG_WORDS) - {""}),
}
PARSER = cli.build_parser()


@pytest.mark.parametrize("name", [*ENGINE_FIELDS, *SAMPLING_FIELDS])
def test_flags(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2 and one line, before a model is looked for. Switches take no value."""
    is_switch = (SETTINGS | SAMPLING)[name] in (bool, bool | None)
    monkeypatch.setattr(cli, "build_parser", lambda: PARSER)
    for word in FLAG_WORDS:
        if word in FLAG_ACCEPTS.get(name, ()):
            continue
        flag = "--" + name.replace("_", "-")
        status = cli.main(["generate", "/nowhere/at/all", "--prompt", "x", f"{flag}={word}"])
        (line,) = capsys.readouterr().err.splitlines()
        assert status == 2 and line.startswith("outrider: error: "), (word, line)
        assert (flag in line or re.search(rf"\b{name}\b", line)) and "nowhere" not in line, (word, line)
        assert is_switch or re.search(r"must be|is not|is the same|not one of|unknown key|given|expected", line), line


@pytest.mark.parametrize(("command", "flag"), [
    ("demo", "--max-tokens"), ("verify", "--max-tokens"), ("bench throughput", "--rounds"),
    ("bench latency", "--rounds"), ("bench throughput", "--shapes"), ("bench spec", "--rounds"),
    ("bench spec", "--max-tokens"), ("bench spec", "--batch-sizes"),
])
def test_flags_of_single_commands(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("0", *FLAG_WORDS):
        status = cli.main([*command.split(), *([] if command == "demo" else ["/nowhere/at/all"]), f"{flag}={word}"])
        (line,) = capsys.readouterr().err.splitlines()
        assert status == 2 and flag in line and ("must be" in line or "is not" in line), (word, line)


# What the report of a test campaign listed, by what a user sees


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "llama", CONFIGS["llama"])


SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "num_pages": 32}


@pytest.mark.parametrize(("settings", "says"), [
    ({"max_num_seqs": "4"}, "max_num_seqs must be an integer from 1 to 65536 or None, got '4'"),
    ({"page_size": None}, "page_size must be one of 16, 32, 64, 128, got None"),
    ({"overlap": "yes"}, "overlap must be True or False or None, got 'yes'"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
    ({"speculative_config": {"method": [], "num_speculative_tokens": 2}}, "method must be one of .*, got \\[\\]"),
    ({"seed": 2**63}, "seed must be an integer from -9223372036854775807 to 9223372036854775807, got"),
    ({"seed": "a"}, "seed must be an integer .*, got 'a'"),
    ({"seed": None}, "seed must be an integer .*, got None"),
    ({"max_model_len": 10**12}, "max_model_len must be an integer from 1 to 2147483647 or None, got 1000000000000"),
    ({"max_model_len": 100_000_000}, r"max_model_len \(100000000\) exceeds the 256 positions"),
])
def test_settings_of_the_campaign(folder: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(str(folder), **SMALL | settings)


@pytest.mark.parametrize(("fields", "says"), [
    ({"top_k": 2**63}, "top_k must be an integer from 0 to 2147483647 or -1, got 9223372036854775808"),
    ({"min_tokens": 2**63}, "min_tokens must be an integer from 0 to 2147483647, got"),
    ({"n": 129}, "n must be an integer from 1 to 128, got 129"),
    ({"logit_bias": {2**63: 1.0}}, "logit_bias must be a dict, each key an integer from 0 to 2147483647"),
])
def test_parameters_of_the_campaign(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^SamplingParams: {says}"):
        SamplingParams(**fields)


@pytest.mark.parametrize(("config", "says"), [
    ([], "config.json must hold a JSON object"),
    (CONFIGS["llama"] | {"head_dim": 0}, "head_dim must be an integer from 1 to 2147483647, got 0"),
    (CONFIGS["llama"] | {"num_attention_heads": 0}, "num_attention_heads must be an integer from 1 to .*, got 0"),
    (CONFIGS["llama"] | {"eos_token_id": 256}, "config.json: eos_token_id must be .* from 0 to 255 .*, got 256"),
])
def test_configs_of_the_campaign(folder: Path, tmp_path: Path, config: Any, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        LLM(str(tmp_path), **SMALL, load_format="dummy")


def test_a_long_length_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    status = cli.main(["generate", str(folder), "--prompt", "x", "--max-model-len", "100000000"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and "--max-model-len (100000000) exceeds the 256 positions the model was made for" in line
