"""EngineConfig: what is decided for a caller, and what is refused, by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.core import Axis, Limits
from outrider.core.params import SamplingParams
from outrider.mixers.paged.registry import make_backend
from outrider.models.sources.folder import FolderSource
from outrider.models.sources.model_source import ModelSource
from outrider.runner import check, device
from outrider.runner.device import pick_device, pick_dtype
from outrider.runner.target import build_target
from tests.engine.harness import CONFIGS, Ask, Rig, greedy, prompt_of, tiny_model

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "int8"}, "dtype must be one of auto, float32.*got 'int8'"),
    "device": ({"device": "tpu"}, "device must be one of auto, cpu, cuda or cuda:N, got 'tpu'"),
    "load_format": ({"load_format": "pt"}, "load_format must be one of"),
    "attention_backend": ({"attention_backend": "flash"}, "attention_backend must be one of"),
    "logprobs_mode": ({"logprobs_mode": "odd"}, "logprobs_mode must be one of raw, processed"),
    "max_model_len": ({"max_model_len": 0}, "max_model_len must be an integer from 1 to 2147483647 or None, got 0"),
    "max_num_seqs": ({"max_num_seqs": -1}, "max_num_seqs must be an integer from 1 to 65536 or None, got -1"),
    "gpu_memory_utilization": ({"gpu_memory_utilization": 1.5}, "must be a number from 0.01 to 1, got 1.5"),
    "checkpoint_interval": ({"checkpoint_interval": 15}, r"must be at least page_size \(16 tokens\), got 15"),
    "an interval within a page": ({"checkpoint_interval": 32, "page_size": 64}, "must be at least page_size"),
    "two sizes of the pool": ({"num_pages": 9, "kv_cache_memory_bytes": 9}, "say the same thing: give one"),
}


@pytest.mark.parametrize(("settings", "says"), [
    ({"pad_requests": (2**31 - 1,)}, r"pad_requests: every step would be padded to 2147483647, although no step has "
                                     r"more than 32 \(max_num_seqs\): give a size of at most 16 times"),
    ({"pad_tokens": (64, 2**31 - 1)}, r"pad_tokens: .* padded to 2147483647, .* than 512 \(max_num_batched_tokens\)"),
    ({"pad_tokens": (6, 24, 72, 2**31 - 1), "max_num_batched_tokens": 60}, None),  # no batch reaches the last size
])
def test_padding_far_beyond_every_batch_is_refused(settings: dict[str, Any], says: str | None) -> None:
    def limits() -> Limits:
        return EngineConfig("x", **settings).limits(gpu_bytes=None, max_positions=64, vocab_size=9, max_drafts=0)

    if says is None:
        limits()
    else:
        with pytest.raises(ValueError, match=says):
            limits()


@pytest.mark.parametrize(("flags", "dtype", "found"), [
    ("flags : fpu avx512_bf16 avx2", "bfloat16", True), ("flags : fpu avx2 avx512f", "bfloat16", False),
    ("Features : fp asimd asimdhp", "bfloat16", False), ("Features : fp asimd asimdhp", "float16", True),
    ("Features : fp bf16", "bfloat16", True), ("cpu : POWER9", "float16", None), ("", "float32", True),
])
def test_the_cpu_is_asked_for_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str,
                                           found: bool | None) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert device.cpu_computes_in(dtype) is found


def test_a_slow_type_is_warned_of_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           caplog: pytest.LogCaptureFixture) -> None:
    source, cpu = FolderSource("m", tmp_path, {"torch_dtype": "bfloat16"}, ()), torch.device("cpu")
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    with caplog.at_level("INFO", logger="outrider"):
        assert pick_dtype("bfloat16", source, cpu) is torch.bfloat16
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "this CPU has no instructions for it" in caplog.text
        caplog.clear()
        assert pick_dtype("auto", source, cpu) is torch.float32
        assert caplog.messages == ["m is computed in float32, which is faster on a CPU than bfloat16"]


@pytest.mark.parametrize(("changes", "settings", "says"), [
    ({"max_position_embeddings": 2_000_000_000}, {},
     r"/config.json: tables for 2000000000 positions \(max_position_embeddings of its config\) take \d+ GiB, and the "
     "device has 8: set max_model_len"),
    ({"max_position_embeddings": 2_000_000_000}, {"max_model_len": 128}, None),
    ({"vocab_size": 1 << 30}, {}, r"the weights take 256\.0 GiB as float32, and the device has 8\.0: choose"),
])
def test_what_cannot_fit_is_refused_by_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  changes: dict[str, Any], settings: dict[str, Any],
                                                  says: str | None) -> None:
    monkeypatch.setattr(check, "device_bytes", lambda device: 8 << 30)
    source = FolderSource("m", tmp_path, CONFIGS["llama"] | changes, ())
    config = EngineConfig(str(tmp_path), device="cpu", **settings)
    if says is None:
        assert build_target(config, source).max_positions == 2_000_000_000
    else:
        with pytest.raises(ValueError, match=says):
            build_target(config, source)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_out_of_range_are_named(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        EngineConfig("x", **fields)


def test_a_config_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig("x").seed = 1  # type: ignore[misc]


def limits_of(gpu_bytes: int | None = None, max_drafts: int = 0, **fields: Any) -> Limits:
    return EngineConfig("x", **fields).limits(
        gpu_bytes=gpu_bytes, max_positions=4096, vocab_size=100, max_drafts=max_drafts
    )


def test_what_is_left_open_is_decided() -> None:
    limits = limits_of()
    assert (limits.max_len, limits.vocab_size, limits.steps_in_flight) == (4096, 100, 2)
    small, large = limits_of(gpu_bytes=24 << 30), limits_of(gpu_bytes=80 << 30)
    assert [own.max_requests for own in (limits, small, large)] == [32, 256, 512]
    assert limits_of(gpu_bytes=80 << 30, max_num_seqs=100).max_requests == 100
    assert limits_of(overlap=False).steps_in_flight == 1
    assert limits_of(max_model_len=77).max_len == 77
    with pytest.raises(ValueError, match=r"max_model_len \(5000\) exceeds the 4096 positions"):
        limits_of(max_model_len=5000)


def test_the_token_budget_serves_every_request_with_its_drafts() -> None:
    limits = limits_of(max_num_seqs=300, max_drafts=7)
    assert limits.max_batched_tokens >= 300 * 8
    assert limits.extent(Axis.LOGIT_ROWS) == 300 * 8


@pytest.mark.parametrize("axis", Axis)
def test_every_axis_has_an_extent(axis: Axis) -> None:
    assert limits_of(max_drafts=3).extent(axis) > 0


def test_rows_have_room_for_the_null_row() -> None:
    limits = limits_of(max_num_seqs=5)
    assert limits.extent(Axis.ROWS) == 6 and limits.extent(Axis.REQUESTS) == 5


def source_of(**config: Any) -> ModelSource:
    return FolderSource("x", Path("x"), config, ())


def test_devices_and_types() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert pick_device("cpu") == cpu
    assert pick_dtype("auto", source_of(dtype="bfloat16"), cpu) == torch.float32
    assert pick_dtype("auto", source_of(torch_dtype="float16"), cuda) == torch.float16
    assert pick_dtype("float64", source_of(), cpu) == torch.float64
    with pytest.raises(ValueError, match="float64.*use dtype='float32' or 'bfloat16'"):
        pick_dtype("float64", source_of(), cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_said() -> None:
    with pytest.raises(ValueError, match="no CUDA device that torch can use; use device='cpu'"):
        pick_device("cuda")


def test_a_backend_that_cannot_serve_the_model_is_refused() -> None:
    for name in ("triton", "cpu"):
        with pytest.raises(ValueError, match=f"attention_backend='{name}' does not serve torch.float64 on cpu"):
            make_backend(name, torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_type_runs_on_the_cpu(dtype: torch.dtype) -> None:
    from tests.engine.harness import Ask, greedy, prompt_of

    with Rig(tiny_model("gemma3", dtype)) as rig:
        (output,) = rig.run([Ask(prompt_of(1, 30), greedy(6))])
        assert len(output.outputs[0].token_ids) == 6 and rig.step.pool.data.dtype == dtype


def test_a_synthetic_mean_run_becomes_rates_by_position() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    assert SpeculativeConfig.parse(given).synthetic_rates == (0.6914,)
    assert SpeculativeConfig.parse(given | {"synthetic_acceptance_length": 2.5}).synthetic_rates == (1.0, 0.5, 0.0)
    assert SpeculativeConfig.parse(given | {"synthetic_rates": [1, 0.5, 0]}).synthetic_rates == (1.0, 0.5, 0.0)
    with pytest.raises(ValueError, match="synthetic_acceptance_length must be from 1 to 4 .*got 9"):
        SpeculativeConfig.parse(given | {"synthetic_acceptance_length": 9})


def test_synthetic_rates_by_request_go_to_rows_in_turn() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "auto": False, "prompt_lookup_min": 9,
              "prompt_lookup_max": 9, "synthetic_request_rates": [1, 0]}
    config = SpeculativeConfig.parse(drafts)
    assert config.is_synthetic and config.rates_by_row == ((1.0,), (0.0,)) and config.synthetic_rates is None
    for other in ({"synthetic_rates": [0.5]}, {"synthetic_acceptance_length": 2.0}):
        with pytest.raises(ValueError, match="synthetic_request_rates already give a rate for every position: leave"):
            SpeculativeConfig.parse(drafts | other)
    with Rig(tiny_model("llama"), speculative_config=drafts, max_num_seqs=4) as rig:
        rig.run([Ask(prompt_of(i, 5), greedy(17)) for i in range(4)])
    accepted: dict[int, set[int]] = {0: set(), 1: set()}
    for batch, result in zip(rig.batches, rig.results, strict=True):
        for row, own in zip(batch.rows, result.requests, strict=True):
            if own.num_drafted == 3:
                accepted[row % 2].add(own.num_accepted)
    assert accepted == {0: {3}, 1: {0}}


@pytest.mark.parametrize("params", [greedy(61), SamplingParams(temperature=1.0, seed=3, max_tokens=61)])
def test_a_synthetic_mean_run_does_not_depend_on_what_the_text_repeats(params: SamplingParams) -> None:
    """Rates 1, 0.5 and 0: the first draft of every step is accepted, though lookups of long matches find none."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "auto": False, "rejection_sample_method": "synthetic",
              "synthetic_acceptance_length": 2.5, "prompt_lookup_min": 9, "prompt_lookup_max": 9}
    with Rig(tiny_model("llama"), speculative_config=drafts, max_model_len=128) as rig:
        outputs = rig.run([Ask(prompt_of(i, 5), params) for i in range(8)])
    assert all(len(output.outputs[0].token_ids) == 61 for output in outputs)
    runs = [len(own.run) for result in rig.results for own in result.requests if own.num_drafted == 3]
    assert set(runs) <= {2, 3} and len(runs) > 100 and abs(sum(runs) / len(runs) - 2.5) < 0.15
