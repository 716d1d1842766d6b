"""Settings as scripts for vLLM give them: taken over, explained in one line, or refused with what to use instead."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from outrider import cli
from outrider.commands.parser import ENGINE_FIELDS, engine_config
from outrider.commands.serve import server_config
from outrider.compat.engine_args import config_for
from outrider.compat.server_settings import VLLM_SERVER_SETTINGS
from outrider.compat.settings import VLLM_SETTINGS, Explained, Refused, SameAs
from outrider.config import EngineConfig
from outrider.server.settings import ServerConfig


def test_settings_that_mean_the_same_are_taken_over() -> None:
    config = config_for("LLM", "m", {"block_size": 32, "async_scheduling": False, "dtype": "half",
                                     "logprobs_mode": "processed_logprobs", "tokenizer": "t", "revision": "r",
                                     "download_dir": "d", "quantization": None, "kv_cache_dtype": "auto",
                                     "tensor_parallel_size": 1})
    assert config == EngineConfig("m", page_size=32, overlap=False, dtype="float16", logprobs_mode="processed",
                                  tokenizer="t", revision="r", download_dir="d")


@pytest.mark.parametrize("name", [name for name, meaning in VLLM_SETTINGS.items() if isinstance(meaning, Explained)])
def test_a_setting_that_changes_nothing_is_explained_in_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="outrider"):
        assert config_for("LLM", "m", {name: True}) == EngineConfig("m")
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{name}=True has no effect: ")


@pytest.mark.parametrize("name", [name for name, meaning in VLLM_SETTINGS.items() if isinstance(meaning, Refused)])
def test_a_setting_that_is_not_there_says_what_to_use_instead(name: str) -> None:
    meaning = VLLM_SETTINGS[name]
    assert isinstance(meaning, Refused)
    for value in meaning.neutral:
        assert config_for("LLM", "m", {name: value}) == EngineConfig("m")
    with pytest.raises(ValueError, match=f"LLM: {name}='other' is not supported: "):
        config_for("LLM", "m", {name: "other"})


def test_every_setting_of_vllm_is_known() -> None:
    """The list has the fields of EngineArgs and AsyncEngineArgs of vLLM 0.33."""
    names = (Path(__file__).parents[1] / "assets" / "vllm_settings.txt").read_text().split()
    assert len(names) > 200 and not set(names) - VLLM_SETTINGS.keys() - EngineConfig.__dataclass_fields__.keys()


def test_every_other_name_leads_to_a_setting() -> None:
    assert not VLLM_SETTINGS.keys() & EngineConfig.__dataclass_fields__.keys()
    assert all(meaning.name in ENGINE_FIELDS for meaning in VLLM_SETTINGS.values() if isinstance(meaning, SameAs))


@pytest.mark.parametrize(("wrong", "right"), [("max_model_length", "max_model_len"), ("quantisation", "quantization"),
                                              ("gpu_memory_utilisation", "gpu_memory_utilization")])
def test_a_misspelt_setting_gets_a_suggestion(wrong: str, right: str) -> None:
    words = rf"unknown setting '{wrong}': did you mean {right}\? Known are .* and \d+ more$"
    with pytest.raises(ValueError, match=words):
        config_for("LLM", "m", {wrong: 1})


def test_two_names_of_one_setting_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="block_size and page_size say the same thing"):
        config_for("LLM", "m", {"block_size": 16, "page_size": 16})


def test_one_and_true_are_different_values() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size=True is not supported"):
        config_for("LLM", "m", {"pipeline_parallel_size": True})


@pytest.mark.parametrize(("flags", "words"), [
    (["--pipeline-parallel-size", "2"], "pipeline_parallel_size=2 is not supported: a model is cut by --tensor-paral"),
    (["-tp", "0"], "--tensor-parallel-size must be an integer from 1 to 64"),
    (["--enable-lora-bias"], "enable_lora_bias=True is not supported"),
    (["--quantization", "int3"], "quantization must be one of fp8, int4 or None"),
    (["--dtype", "halv"], "did you mean half?"),
])
def test_the_command_line_refuses_them_alike(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "smollm2", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_command_line_takes_them_alike() -> None:
    parser = cli.build_parser()
    argv: list[Any] = ["generate", "--block_size=32", "--trust-remote-code", "m", "--swap-space", "4", "--dtype=half"]
    args = parser.parse(argv)
    assert args.model == "m" and args.swap_space == 4 and args.trust_remote_code is True
    assert engine_config(args) == EngineConfig("m", page_size=32, dtype="float16")
    assert "--swap-space" not in parser.format_help()


@pytest.mark.parametrize(("given", "own"), [
    ({"model": "/data/eagle-team/llama-68m"}, {"model": "/data/eagle-team/llama-68m"}),
    ({"model": "a/b", "method": None}, {"model": "a/b", "method": None}),
    ({"model": "[ngram]", "prompt_lookup_max": 3}, {"model": None, "method": "ngram", "prompt_lookup_max": 3}),
    ({"method": "deepseek_mtp", "draft_tensor_parallel_size": 1}, {"method": "mtp"}),
])
def test_a_speculative_config_may_leave_its_method_to_the_model(given: dict[str, Any], own: dict[str, Any]) -> None:
    tokens = {"num_speculative_tokens": 3}
    config = config_for("LLM", "m", {"speculative_config": given | tokens})
    assert config.speculative_config == own | tokens
    assert config.speculative is not None and config.speculative.method == (own.get("method") or "auto")


def test_a_drafter_runs_on_as_many_ranks_as_its_target() -> None:
    def config(num_ranks: int) -> EngineConfig:
        drafting = {"method": "mtp", "num_speculative_tokens": 3, "draft_tensor_parallel_size": num_ranks}
        return config_for("LLM", "m", {"speculative_config": drafting, "tensor_parallel_size": 2})

    assert config(2).speculative_config == {"method": "mtp", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="speculative_config: draft_tensor_parallel_size=1 is not supported"):
        config(1)


def test_a_key_of_drafting_that_changes_nothing_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 4}
    with caplog.at_level(logging.INFO, logger="outrider"):
        assert config_for("LLM", "m", {"speculative_config": given}).speculative is not None
    assert len(caplog.messages) == 1 and "disable_by_batch_size=4 has no effect" in caplog.messages[0]


def test_a_launcher_from_outside_asks_for_nothing_at_one_rank() -> None:
    launched = {"distributed_executor_backend": "external_launcher"}
    assert config_for("LLM", "m", launched) == config_for("LLM", "m", launched | {"tensor_parallel_size": 1})
    with pytest.raises(ValueError, match="distributed_executor_backend='external_launcher' is not supported: ranks a"):
        config_for("LLM", "m", launched | {"tensor_parallel_size": 2})


@pytest.mark.parametrize("method", ["mlpspeculator", "mlp_speculator", "medusa", "extract_hidden_states"])
def test_a_method_of_vllm_that_is_not_here_is_refused_by_its_name(method: str) -> None:
    with pytest.raises(ValueError, match=f"speculative_config: method '{method}' is not supported: "):
        config_for("LLM", "m", {"speculative_config": {"method": method, "model": "d", "num_speculative_tokens": 3}})


def test_other_names_of_methods_mean_the_same() -> None:
    config = config_for("LLM", "m", {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 3}})
    assert config.speculative is not None and config.speculative.method == "ngram"


def test_none_stands_for_a_default_where_vllm_has_it() -> None:
    assert config_for("LLM", "m", {"enable_prefix_caching": None}) == EngineConfig("m")


@pytest.mark.parametrize("name", VLLM_SERVER_SETTINGS)
def test_a_flag_of_vllms_server_is_explained_or_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    meaning = VLLM_SERVER_SETTINGS[name]
    flag = ["--" + name.replace("_", "-"), *([] if meaning.is_switch else ["other"])]
    args = cli.build_parser().parse(["serve", "m", *flag])
    if isinstance(meaning, Explained):
        assert server_config(args) == ServerConfig()
        assert f"{name}=" in caplog.text and "has no effect: " in caplog.text
        return
    assert isinstance(meaning, Refused)
    with pytest.raises(ValueError, match=f"the command line: {name}=.* is not supported: "):
        server_config(args)
    neutral = Namespace(**{name: meaning.neutral[-1]})
    assert server_config(neutral) == ServerConfig()


def test_a_command_line_of_vllms_server_is_read_as_it_is() -> None:
    words = ["serve", "m", "--served-model-name", "a", "b", "--api_key", "k", "l",
             "--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens", "3",
             "--structured-outputs-config.backend", "xgrammar",
             "--default-chat-template-kwargs", '{"enable_thinking": false}', "--return-tokens-as-token-ids"]
    args = cli.build_parser().parse(words)
    assert server_config(args) == ServerConfig(
        served_model_name=("a", "b"), api_key=("k", "l"), return_tokens_as_token_ids=True,
        default_chat_template_kwargs={"enable_thinking": False})
    assert engine_config(args).speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert cli.build_parser().parse(["serve", "--api-key", "k", "m"]).model == "m"


def test_vllms_variable_of_the_key_closes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    args = cli.build_parser().parse(["serve", "m"])
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert server_config(args).api_key == ("theirs",)
    monkeypatch.setenv("OUTRIDER_API_KEY", "own")
    assert server_config(args).api_key == ("own",)
    assert server_config(cli.build_parser().parse(["serve", "m", "--api-key", "given"])).api_key == ("given",)
