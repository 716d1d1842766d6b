"""Whole engines on the card, in float32: every family and drafter, Triton and captured steps, against the reference.

Batches of odd sizes, chunked prompts, prefix hits, poisoned pages, greedy and sampled. Trained heads must guess as well
as they do on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from tests.drafters.hybrid_rig import GLM5_NEXT
from tests.drafters.latent_rig import FAMILIES as LATENT
from tests.drafters.latent_rig import save_latent, save_with_module
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import DEVICE, SETTINGS, TIE, VOCAB, GpuRig, asks, assert_same_tokens, loaded, reference, scratch
from tests.models import gemma4
from tests.models.oracle import make_folder
from tests.models.test_hybrid_mtp import CASES, make_checkpoint

ASSETS = Path(__file__).parents[1] / "assets"
K = 3
Spec = dict[str, Any]
LATENT_SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 512}
SAME_HEADS = {"head_dim": 16}  # families share kernels where they have the same heads


def spec(method: Any, folder: Path | None = None, k: int = K) -> Spec:
    model = {} if folder is None else {"model": str(folder)}
    return {"method": method, "num_speculative_tokens": k, "auto": False} | model


@functools.cache
def folder_of(family: str) -> Path:
    path = scratch() / family
    if family.startswith("gemma4"):
        return gemma4.save_target(family.removeprefix("gemma4_"), path)
    if family == "glm5_next":
        return save_with_module(path, GLM5_NEXT | LATENT_SIZES | {"linear_head_dim": 16, "kv_lora_rank": 32})
    if family in LATENT:
        return save_latent(family, path, **LATENT_SIZES)
    if family in CASES:
        return make_checkpoint(family, CASES[family], path)
    return make_folder(family, path, **SAME_HEADS if family == "qwen3" else {})


@functools.cache
def assistant_of(family: str) -> Path:
    return gemma4.save_assistant(family.removeprefix("gemma4_"), scratch() / f"{family}_assistant")


DRAFTERS: dict[str, Callable[[str], Spec | None]] = {
    "none": lambda family: None,
    "ngram": lambda family: spec("ngram") | {"prompt_lookup_min": 1},
    "itself": lambda family: spec("draft_model", folder_of(family)),
    "mtp": lambda family: spec("mtp"),
    "assistant": lambda family: spec("mtp", assistant_of(family)),
}
ENGINES = {
    "llama": ("none", "ngram", "itself"),
    "qwen3": ("none",),
    "gemma3": ("none", "ngram"),
    "gemma4_shared": ("none", "assistant"),
    "gemma4_moe": ("assistant",),
    "qwen3_moe": ("none", "ngram"),
    "nemotron_h": ("none", "mtp"),
    "qwen3_next": ("mtp",),
    "qwen3_5": ("none", "mtp"),
    "bamba": ("none", "ngram"),
    "deepseek_v3": ("none", "mtp"),
    "deepseek_v32": ("none", "mtp", "ngram"),
    "glm_moe_dsa": ("none", "mtp"),
    "hy_v4": ("none", "mtp"),
    "glm5_next": ("none", "mtp"),
}
HYBRIDS = ("nemotron_h", "qwen3_next", "qwen3_5", "bamba", "glm5_next")
# Left to OUTRIDER_GPU_ALL=1: another drafter runs the same layers.
LONG = {("gemma3", "none"), ("gemma4_shared", "none"), ("qwen3_moe", "ngram"), ("nemotron_h", "none"),
        ("qwen3_5", "mtp"), ("bamba", "none"), ("deepseek_v3", "none"), ("deepseek_v32", "none"),
        ("deepseek_v32", "ngram"), ("glm_moe_dsa", "none"), ("hy_v4", "none"),
        ("glm5_next", "none")}
CELLS = [
    pytest.param(family, drafter, id=f"{family}-{drafter}", marks=[
        pytest.mark.together(family), *([pytest.mark.long] if (family, drafter) in LONG else [])])
    for family, drafters in ENGINES.items()
    for drafter in drafters
]


@pytest.mark.parametrize(("family", "drafter"), CELLS)
def test_tokens_equal_the_reference(family: str, drafter: str) -> None:
    folder = folder_of(family)
    expected = reference(folder)
    with GpuRig(loaded(folder), source=folder, speculative_config=DRAFTERS[drafter](family)) as rig:
        for is_second in (False, True):
            outputs = rig.run(asks())
            # A state is a sum over the whole history, and a norm after it magnifies its rounding.
            assert_same_tokens(outputs, expected, asks(), tie=10 * TIE if family in HYBRIDS else TIE)
            hits = sum(output.metrics.num_cached_tokens for output in outputs)
            assert hits > 0 or not is_second, "prefixes are found again"
        assert rig.num_poisoned > 0
        if drafter != "none":
            assert rig.engine.stats.num_draft_tokens > 0
        if drafter == "itself":
            assert rig.engine.stats.acceptance_rate > 0.9, "of its own twin"
        if HAS_CARD:
            assert rig.runner.num_replays > 0 and rig.runner.num_padded_steps > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param(family, drafter, id=family, marks=pytest.mark.together(family))
    for family, drafter in (("nemotron_h", "mtp"), ("gemma4_shared", "assistant"))])
def test_weights_are_read_while_kernels_compile(family: str, drafter: str) -> None:
    """From files to tokens as a user does it: memory is measured and kernels begun with blank weights."""
    folder, asked = folder_of(family), asks()
    settings = {name: value for name, value in SETTINGS.items() if name != "num_pages"}
    with LLM(str(folder), dtype="float32", gpu_memory_utilization=0.97, speculative_config=DRAFTERS[drafter](family),
             **settings) as llm:
        outputs = llm.generate([ask.prompt for ask in asked], [ask.params for ask in asked])
    assert_same_tokens(outputs, reference(folder), asked, tie=10 * TIE if family in HYBRIDS else TIE)


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=pytest.mark.together(family)) for family in ("gemma3", "deepseek_v32")])
def test_steps_of_bounded_time_give_the_same_tokens(family: str) -> None:
    """As servers have them: what steps with prompts cost is measured at start-up, for layers of every kind."""
    folder = folder_of(family)
    with GpuRig(loaded(folder), source=folder, max_step_ms=12.0) as rig:
        assert_same_tokens(rig.run(asks()), reference(folder), asks())


@pytest.mark.gpu
@pytest.mark.together("llama")
def test_eager_steps_and_the_torch_backend_agree() -> None:
    folder = folder_of("llama")
    expected = reference(folder)
    for settings in ({"enforce_eager": True}, {"enforce_eager": True, "attention_backend": "torch"}):
        with GpuRig(loaded(folder), speculative_config=spec("ngram"), **settings) as rig:
            assert_same_tokens(rig.run(asks()), expected, asks())
            assert rig.runner.num_replays == 0 < rig.runner.num_uncaptured


@pytest.mark.together("llama")
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_many_requests_by_lists_of_splits(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model of many layers with long contexts: attention lists the splits there are."""
    pytest.importorskip("triton", reason="needs the triton package")
    from outrider.kernels.gpu.attention import splits as attention_splits
    from outrider.mixers.paged import triton_backend

    folder = folder_of("llama")
    monkeypatch.setattr(triton_backend, "MIN_LAYERS_TO_LIST", 1)
    monkeypatch.setattr(attention_splits, "least_listed_split", lambda *shape: 32)
    with GpuRig(loaded(folder), speculative_config=DRAFTERS[drafter]("llama"), max_num_seqs=16) as rig:
        for asked in (asks() * 2, asks()):  # all at once, then fewer than a list is made for
            expected = reference(folder)
            assert_same_tokens(rig.run(asked), expected * (len(asked) // len(expected)), asked)


# Trained heads


def mean_run(rig: GpuRig) -> float:
    return rig.engine.stats.mean_run_length


@pytest.mark.together("eagle3")
def test_a_trained_eagle3_head_guesses_as_on_the_cpu() -> None:
    from tests.drafters.test_trained import HEAD

    with GpuRig(loaded(HEAD.folder), speculative_config=HEAD.speculative, **HEAD.settings) as rig:
        outputs = rig.run(HEAD.asks())
        right = [tokens for (tokens,) in HEAD.plain()]
        same = sum(output.outputs[0].token_ids == tokens for output, tokens in zip(outputs, right, strict=True))
        assert same >= len(right) - 1, "one near-tie at most"
        assert mean_run(rig) >= 3.5


@pytest.mark.together("gemma4_asset")
def test_a_trained_assistant_guesses_as_on_the_cpu() -> None:
    from tests.drafters.test_gemma_trained import TRAINED_ASKS
    from tests.drafters.trained import SPECULATIVE

    settings = {"max_model_len": 128, "num_pages": 600, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    tokens = []
    for speculative in (None, SPECULATIVE):
        with GpuRig(loaded(ASSETS / "gemma4"), speculative_config=speculative, **settings) as rig:
            tokens.append([output.outputs[0].token_ids for output in rig.run(TRAINED_ASKS)])
            if speculative is not None:
                assert mean_run(rig) >= 2.5
    same = sum(plain == drafted for plain, drafted in zip(*tokens, strict=True))
    assert same >= len(TRAINED_ASKS) - 1, "one near-tie at most"


@pytest.mark.together("eagle3")
def test_bf16_runs_and_drafts() -> None:
    """Near-ties are many in 16 bits, so tokens are not compared; a head that misreads its inputs would still show."""
    from tests.drafters.test_trained import HEAD

    with GpuRig(loaded(HEAD.folder, torch.bfloat16), speculative_config=HEAD.speculative, **HEAD.settings) as rig:
        assert all(output.outputs[0].error is None for output in rig.run(HEAD.asks()))
        assert mean_run(rig) >= 3.0 and rig.step.model.device.type == DEVICE.type
