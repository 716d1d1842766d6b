"""The drafter that comes with a model is used if settings ask for it, and steps aside where it cannot serve."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.cli import build_parser
from outrider.commands.parser import UsageError, engine_config
from outrider.compat.engine_args import EngineArgs, config_for
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.core.shipped_drafters import SHIPPED, ShippedDrafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import DraftBuild, Drafter
from outrider.drafters.registry import make_drafter
from outrider.formats.scaled import ScaledFormat, ScaledLinear
from outrider.kernels.quantized import kept_bits_are_fast
from outrider.layers import Linear
from outrider.models.loader import load_dummy
from outrider.models.registry import build_model
from outrider.runner.worker import Worker
from tests.assets.train_eagle3 import language

ASSETS = Path(__file__).parents[1] / "assets"
MODEL, HEAD = str(ASSETS / "target"), ASSETS / "eagle3"
AUTO: dict[str, Any] = {"speculative_config": "auto"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
SMALL_POOL = 5 * 24576  # the null page and those of 64 tokens, if no layer of a drafter is in them
SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
           "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
           "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "hidden_act": "silu",
           "tie_word_embeddings": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small trained target comes with its head, as smollm2 does."""
    monkeypatch.setitem(SHIPPED, MODEL, ShippedDrafter("eagle3", HEAD, 3))


def run(**settings: Any) -> tuple[list[list[int]], Drafter | None]:
    """(the texts, the drafter of the engine). How many drafts pay is a matter of the machine, and not looked at."""
    prompts = language().texts(3, 24, torch.Generator().manual_seed(5)).tolist()
    values = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True,
              "speculative_config": "auto"} | settings
    with LLM(MODEL, **values) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
        assert isinstance(llm.engine.runner, Worker)
        drafter = llm.engine.runner.device_step.drafter
        embedded = llm.embed([{"prompt_token_ids": prompts[0]}], use_tqdm=False)
    assert len(embedded[0].outputs.embedding) == 96
    return [list(output.outputs[0].token_ids) for output in outputs], drafter


def test_auto_means_the_models_own_drafter_and_none_means_no_drafts() -> None:
    texts, drafter = run()
    assert drafter is not None and drafter.name == "eagle3" and drafter.max_drafts == 3
    assert run(speculative_config=None) == (texts, None)


def test_a_config_that_is_given_wins() -> None:
    config = EngineConfig(MODEL, speculative_config=NGRAM)
    assert config.shipped_drafter is None and config.speculative is not None and config.speculative.method == "ngram"


@pytest.mark.parametrize("settings,words", [
    ({"kv_cache_memory_bytes": SMALL_POOL, "max_num_seqs": 1}, "the cache holds 2 pages"),
    ({"load_format": "dummy"}, "random weights"),
    ({"hf_overrides": {"rope_theta": 9999.0}}, "hf_overrides"),
])
def test_it_steps_aside_where_it_cannot_serve(settings: dict[str, Any], words: str,
                                              caplog: pytest.LogCaptureFixture) -> None:
    """An engine that starts without the drafter also starts with the default."""
    texts, drafter = run(**settings)
    assert f"{MODEL} runs without the drafter that comes with it: " in caplog.text and words in caplog.text
    assert drafter is None and run(**settings, speculative_config=None) == (texts, None)


def test_a_drafter_that_was_asked_for_does_not_step_aside() -> None:
    with pytest.raises(ValueError, match="the cache holds 2 pages"):
        run(kv_cache_memory_bytes=SMALL_POOL, max_num_seqs=1, speculative_config=SHIPPED[MODEL].speculative_config)


def test_a_drafter_that_is_to_learn_does_not_step_aside() -> None:
    assert run(adapt_drafter=True)[1] is not None
    with pytest.raises(ValueError, match="the cache holds 2 pages"):
        run(kv_cache_memory_bytes=SMALL_POOL, max_num_seqs=1, adapt_drafter=True)


def test_ranks_and_missing_files_are_obstacles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ranks" in EngineConfig(MODEL, tensor_parallel_size=2, **AUTO).shipped_drafter_obstacle
    monkeypatch.setitem(SHIPPED, MODEL, ShippedDrafter("eagle3", tmp_path, 3))
    assert "lacks its weights" in EngineConfig(MODEL, **AUTO).shipped_drafter_obstacle
    assert EngineConfig(MODEL, **AUTO).speculative is None


def test_auto_warns_where_no_drafter_comes_with_the_model(monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(SHIPPED, MODEL)
    assert run()[1] is None
    assert f"no drafter for {MODEL}, so no drafts are made" in caplog.text


def test_other_models_have_no_drafter() -> None:
    other = EngineConfig("models/other", **AUTO)
    assert other.speculative is None and other.steps_in_flight(False) == 2
    own = EngineConfig(MODEL, **AUTO)
    assert own.speculative is not None and own.steps_in_flight(False) == 1


@pytest.mark.parametrize("flags,speculates", [((), False), (("--speculative-config", "none"), False),
                                              (("--speculative-config", "null"), False),
                                              (("--speculative-config", "auto"), True)])
def test_the_command_line_can_say_none_and_auto(flags: tuple[str, ...], speculates: bool) -> None:
    args = build_parser().parse(["generate", MODEL, "--prompt", "x", *flags])
    assert (engine_config(args).speculative is not None) == speculates


def test_synthetic_rates_need_a_config_of_their_own() -> None:
    args = build_parser().parse(["bench", "throughput", MODEL, "--synthetic-rates", "1,0"])
    with pytest.raises(UsageError, match="--synthetic-rates needs --speculative-config"):
        engine_config(args)


def test_settings_for_vllm_mean_the_same() -> None:
    assert EngineArgs(MODEL, **AUTO).speculative is not None and EngineArgs(MODEL).speculative is None
    assert config_for("LLM", MODEL, {"speculative_config": None}).speculative is None
    with pytest.raises(ValueError, match="speculative_config"):
        EngineConfig(MODEL, speculative_config="ngram")


# The files of smollm2's drafter


FILES = SHIPPED["smollm2"].folder


def test_the_shipped_file_is_small_and_the_one_that_its_card_describes() -> None:
    data = (FILES / "model.safetensors").read_bytes()
    card = (FILES / "README.md").read_text()
    assert len(data) <= 12_000_000
    assert f"{len(data):,} bytes" in card and hashlib.sha256(data).hexdigest() in card


def test_the_shipped_files_fit_the_model_in_every_tensor() -> None:
    """The outline of smollm2 takes the head: no tensor is missing, left over or of another shape."""
    target = build_model(SMOLLM2, dtype=torch.float32, device="cpu")
    load_dummy(target, 0)
    config = SpeculativeConfig.parse(SHIPPED["smollm2"].speculative_config)
    drafter = make_drafter(config, DraftBuild(target, torch.float32, torch.device("cpu"), 64, keep_quantized=True))
    assert isinstance(drafter, AutoregressiveDrafter) and drafter.aux_layers == (2, 15, 27)
    assert drafter.network.num_outputs == 16384 and EngineConfig("smollm2", **AUTO).speculative == config


def test_the_wheel_holds_the_shipped_files() -> None:
    settings = tomllib.loads((FILES.parents[3] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    package = FILES.parents[1]
    held = {path for pattern in patterns for path in package.glob(pattern)}
    assert {FILES / name for name in ("config.json", "model.safetensors", "README.md")} <= held


@pytest.mark.skipif(not kept_bits_are_fast(), reason="needs a C compiler, and a processor that is fast with 8 bits")
def test_products_of_a_head_in_8_bits_round_their_inputs_too() -> None:
    """On a CPU a third of the work, of drafts that need not be accurate."""
    declared = Linear(64, 32, bias=False, dtype=torch.float32, device=torch.device("cpu")).declared
    stored = ScaledFormat("int8", 32)
    x, weight = torch.randn(3, 64), torch.randn(32, 64)
    found = []
    for rounds in (False, True):
        linear = ScaledLinear(declared, [stored])
        for name, slot in linear.slots("").items():
            slot.store(stored.make(weight).parts()[name].to(slot.target.dtype))
        linear.finalize()
        if rounds:
            linear.round_activations()
        linear.prepare(allow_copy=True)
        found.append(linear.product(x))
    assert 0 < (found[0] - found[1]).abs().max() < 0.05 * found[0].abs().max()
