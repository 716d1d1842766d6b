"""The whole engine against transformers: greedy text and the logits of every position, in float32, with pages,
chunked prompts and batch mates; log-probabilities against a direct computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core import ScheduledBatch
from outrider.core.outputs import Logprob
from outrider.models.base import Hidden
from outrider.runner.batch import Inputs
from tests.engine.harness import Ask, Rig, greedy, prompt_of
from tests.models.oracle import LOGIT_ROWS, hf_model, load, make_folder

FAMILIES = ["llama", "llama_bias", "llama_tied", "llama_llama3", "llama_linear", "llama_yarn", "mistral", "qwen2",
            "qwen2_sliding", "qwen3", "gemma3"]
LENGTH = 24  # the longest text ends behind the 64 positions that scaled rotations were trained for
PROMPTS = [prompt_of(1, 45), prompt_of(2, 7), prompt_of(3, 30)]
SETTINGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 16, "num_pages": 128,
}


@dataclass(frozen=True)
class Reference:
    folder: Path
    model: Any
    texts: list[list[int]]  # greedy, after each prompt


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    root = tmp_path_factory.mktemp("families")

    @cache
    def make(family: str) -> Reference:
        folder = make_folder(family, root / family)
        model = hf_model(folder, attn_implementation="eager")
        return Reference(folder, model, [generate(model, prompt) for prompt in PROMPTS])

    return make


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False,
                         eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


def tap_logits(rig: Rig) -> dict[int, dict[int, torch.Tensor]]:
    """Logits of every live token the engine computes, by request and position."""
    logits: dict[int, dict[int, torch.Tensor]] = {}
    run, finish = rig.step.run, rig.step.finish
    current: list[ScheduledBatch] = []

    def tapped_run(scheduled: ScheduledBatch, *args: Any) -> Any:
        current[:] = [scheduled]
        return run(scheduled, *args)

    def tapped_finish(inputs: Inputs, hidden: Hidden, *args: Any) -> Any:
        view = inputs.batch.unpadded
        rows = rig.step.model.logits(hidden.final[: view.num_tokens], LOGIT_ROWS)
        for row, index, position in zip(rows, view.request_of.tolist(), view.positions.tolist(), strict=True):
            logits.setdefault(current[0].request_ids[index], {})[position] = row.clone()
        return finish(inputs, hidden, *args)

    rig.step.run, rig.step.finish = tapped_run, tapped_finish  # type: ignore[method-assign]
    return logits


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_text_and_logits_are_those_of_transformers(
    family: str, backend: str, reference_of: Callable[[str], Reference]
) -> None:
    reference = reference_of(family)
    with Rig(load(reference.folder), attention_backend=backend, **SETTINGS) as rig:
        logits = tap_logits(rig)
        outputs = rig.run([Ask(prompt, greedy(LENGTH, ignore_eos=True)) for prompt in PROMPTS])
        assert any(not samples for batch in rig.batches for samples in batch.samples), "prompts come in chunks"
        assert max(batch.num_requests for batch in rig.batches) == 3, "and requests in batches"
    for index, (prompt, output, wanted) in enumerate(zip(PROMPTS, outputs, reference.texts, strict=True)):
        text = output.outputs[0].token_ids
        assert text == wanted
        expected = reference.model(torch.tensor([prompt + text[:-1]])).logits[0]
        got = torch.stack([logits[index][position] for position in range(len(expected))])
        assert len(expected) == len(prompt) + LENGTH - 1
        torch.testing.assert_close(got, expected.to(got.dtype), atol=1e-4, rtol=0)


def assert_entries(entries: list[dict[int, Logprob]], tokens: list[int], logits: torch.Tensor, num: int) -> None:
    """Each position: the chosen token and the `num` most likely, with value and rank."""
    assert len(entries) == len(tokens) == len(logits)
    for entry, token, row in zip(entries, tokens, logits.log_softmax(-1), strict=True):
        top = row.topk(num)
        assert set(entry) == {token, *top.indices.tolist()}
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[candidate].item(), abs=1e-4)
            assert logprob.rank == (row > row[candidate]).sum().item() + 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.inference_mode()
def test_logprobs_are_those_of_a_direct_computation(family: str, reference_of: Callable[[str], Reference]) -> None:
    """Outputs and prompts; over chunks, with requests that ask for other numbers or for none beside them."""
    reference = reference_of(family)
    wanted = [(3, 4), (None, 1), (0, None)]
    asks = [
        Ask(prompt, greedy(9, logprobs=num, prompt_logprobs=num_prompt, ignore_eos=True))
        for prompt, (num, num_prompt) in zip(PROMPTS, wanted, strict=True)
    ]
    with Rig(load(reference.folder), **SETTINGS) as rig:
        first, again = rig.run(asks), rig.run(asks)
        assert rig.scheduler.cache.stats.hit_tokens > 0, "the request without prompt_logprobs may take hits"
        assert again[0].metrics.num_cached_tokens == again[1].metrics.num_cached_tokens == 0, "the others may not"
    for outputs in (first, again):
        for ask, output, (num, num_prompt) in zip(asks, outputs, wanted, strict=True):
            (sample,) = output.outputs
            logits = reference.model(torch.tensor([ask.prompt + sample.token_ids])).logits[0].float()
            cut = len(ask.prompt) - 1
            if num is None:
                assert sample.logprobs is None
            else:
                assert sample.logprobs is not None
                assert_entries(sample.logprobs, sample.token_ids, logits[cut:-1], num)
            if num_prompt is None:
                assert output.prompt_logprobs is None
            else:
                assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
                rest = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
                assert_entries(rest, ask.prompt[1:], logits[:cut], num_prompt)


@pytest.mark.parametrize("after", [1, 2, 5, 8])
def test_prompt_logprobs_survive_a_preemption(after: int, reference_of: Callable[[str], Reference]) -> None:
    """In the prompt's first chunk, in its middle, and after it: each position comes once."""
    ask = Ask(PROMPTS[0], greedy(6, prompt_logprobs=2))
    model = load(reference_of("llama").folder)
    with Rig(model, max_num_batched_tokens=10) as plain:
        (expected,) = plain.run([ask])
    with Rig(model, max_num_batched_tokens=10) as rig:

        def preempt() -> None:
            if len(rig.results) == after and rig.scheduler.stats.num_preemptions == 0:
                rig.scheduler._preempt(rig.scheduler._running[0])

        (output,) = rig.run([ask], after_step=preempt)
        assert rig.scheduler.stats.num_preemptions == 1
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ask.prompt)
    for got, wanted in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):  # type: ignore[index]
        assert got is not None and wanted is not None and list(got) == list(wanted)
