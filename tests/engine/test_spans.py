"""Spans of a prompt whose tokens see each other in both directions: against transformers, and whatever the engine does
with chunks, hits, preemption, drafts and batch mates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.cache.prefix import PageHashes
from outrider.core import ScheduledBatch
from outrider.core.input_part import InputParts
from outrider.features.spans.part import PromptSpans
from outrider.features.spans.reader import check_spans
from outrider.mixers import ExtraKeys
from outrider.runner.batch import EagerShape
from outrider.runner.plan import StepPlan
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.flex_cases import FEW_PAGES
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of
from tests.models.oracle import hf_model, make_folder

SPANS = ((3, 9), (20, 45), (45, 47))
PROMPT = prompt_of(5, 60)


def oracle_logits(model: Any, token_ids: list[int], spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Logits of one uncached forward of transformers, with its own masks of blocks that see each other."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    ids = torch.tensor([token_ids])
    blocks = torch.full_like(ids, -1)
    for index, (start, end) in enumerate(spans):
        blocks[0, start:end] = index
    known: dict[str, Any] = {
        "config": model.config, "inputs_embeds": torch.zeros(*ids.shape, 1, dtype=model.dtype), "attention_mask": None,
        "past_key_values": None, "position_ids": torch.arange(ids.shape[1])[None], "block_sequence_ids": blocks,
    }
    mask: Any = create_causal_mask(**known)
    if getattr(model.config, "layer_types", None) and "sliding_attention" in model.config.layer_types:
        mask = {"full_attention": mask, "sliding_attention": create_sliding_window_causal_mask(**known)}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]


@pytest.mark.parametrize("backend", ["torch", "flex"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_spans_give_the_numbers_of_transformers(family: str, backend: str, tmp_path: Path) -> None:
    folder = make_folder(family, tmp_path)
    model = hf_model(folder)
    known = list(PROMPT)
    for _ in range(6):
        known.append(int(oracle_logits(model, known, SPANS)[-1].argmax()))
    scores = oracle_logits(model, known, SPANS).log_softmax(-1)
    plain = oracle_logits(model, known, ()).log_softmax(-1)
    assert (scores[: len(PROMPT)] - plain[: len(PROMPT)]).abs().max() > 0.01, "the spans of this test change nothing"
    with LLM(str(folder), device="cpu", dtype="float32", attention_backend=backend, num_pages=64, max_model_len=128,
             max_num_seqs=4) as llm:
        given = {"prompt_token_ids": PROMPT, "bidirectional_spans": [list(span) for span in SPANS]}
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        (output,) = llm.generate([given], params)  # type: ignore[list-item]
    assert output.outputs[0].token_ids == known[len(PROMPT) :]
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    for position, entry in enumerate([*output.prompt_logprobs, *output.outputs[0].logprobs]):
        if position:
            token = known[position]
            assert entry[token].logprob == pytest.approx(float(scores[position - 1, token]), abs=2e-4)


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[list[list[int]]]]:
    """Tokens of each request alone, its prompt computed in one step."""
    return {family: [tokens_of(run_alone(family, ask))[0] for ask in asks()] for family in ("llama", "gemma3")}


def asks() -> list[Ask]:
    return [Ask(PROMPT, greedy(8), spans=SPANS), Ask(prompt_of(6, 30), greedy(8), spans=((0, 30),)),
            Ask(prompt_of(7, 50), greedy(8)), Ask(prompt_of(8, 41), greedy(8), spans=((31, 33),))]


def run_alone(family: str, ask: Ask, backend: str = "torch") -> Any:
    with Rig(tiny_model(family), attention_backend=backend, enable_prefix_caching=False) as rig:
        return rig.run([ask])


def watched_ranges(rig: Rig) -> set[tuple[int, int]]:
    """The ranges whose tokens see each other in the steps that the engine plans from now on."""
    found: set[tuple[int, int]] = set()
    plan = rig.step.planner.plan

    def watched(scheduled: ScheduledBatch, shape: EagerShape) -> StepPlan:
        made = plan(scheduled, shape)
        keys = made.additions.extra_keys
        if isinstance(keys, ExtraKeys):
            found.update({*zip(keys.starts.tolist(), keys.ends.tolist(), strict=True)} - {(0, 0)})
        return made

    rig.step.planner.plan = watched  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(("family", "backend"), [
    ("llama", "torch"), pytest.param("llama", "flex", marks=pytest.mark.long),
    pytest.param("gemma3", "torch", marks=pytest.mark.long), ("gemma3", "flex"),
])
def test_text_does_not_depend_on_chunks_mates_hits_or_preemption(family: str, backend: str, wanted: Any) -> None:
    with Rig(tiny_model(family), attention_backend=backend, max_num_batched_tokens=36, num_pages=FEW_PAGES) as rig:
        whole = watched_ranges(rig)
        assert tokens_of(rig.run(asks())) == wanted[family]
        assert whole == {span for ask in asks() for span in ask.spans} and len(rig.batches) > 12
        again = tokens_of(rig.run(asks(), after_step=rig.preempt))
        assert again == wanted[family]
        assert rig.scheduler.stats.num_preemptions > 0 and rig.scheduler.cache.stats.hit_tokens > 0


def test_drafts_do_not_change_text_after_spans(wanted: Any) -> None:
    lines = {tuple(ask.prompt): own[0] for ask, own in zip(asks(), wanted["gemma3"], strict=True)}
    drafter = ScriptedDrafter(2, lambda prompt, _: [t if i % 3 else t ^ 1 for i, t in enumerate(lines[prompt])])
    with Rig(tiny_model("gemma3"), attention_backend="flex", num_pages=FEW_PAGES, drafter=drafter) as rig:
        assert tokens_of(rig.run(asks())) == wanted["gemma3"]
        assert rig.engine.stats.num_accepted_tokens > 0


def marked(*spans: tuple[int, int]) -> InputParts:
    return InputParts((PromptSpans(spans),))


def test_pages_are_shared_by_equal_spans_alone() -> None:
    tokens, size = PROMPT[:32], 16
    chain = PageHashes(size, (), marked((12, 20))).upto(tokens, 2)
    assert chain == PageHashes(size, (), marked((12, 20))).upto(tokens, 2)
    assert chain[0] != PageHashes(size, ()).upto(tokens, 2)[0]
    assert chain[0] != PageHashes(size, (), marked((12, 21))).upto(tokens, 2)[0]
    # Keys of the first page depend on the span's tokens in the second one.
    other = [*tokens[:19], tokens[19] ^ 1, *tokens[20:]]
    assert chain[0] != PageHashes(size, (), marked((12, 20))).upto(other, 2)[0]
    later = marked((18, 20))
    assert PageHashes(size, (), later).upto(tokens, 1)[0] == PageHashes(size, ()).upto(tokens, 1)[0]


@given(st.integers(0, 70), st.integers(1, 70), st.integers(1, 70), st.integers(0, 3),
       st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_chunk_cuts_no_span(start: int, length: int, most: int, num_others: int, draw: random.Random) -> None:
    """Whichever part of the request the spans belong to."""
    ends = sorted(draw.sample(range(80), 6))
    spans = tuple(zip(ends[::2], ends[1::2], strict=True))
    inputs = InputParts((PromptSpans(spans[num_others:]), PromptSpans(spans[:num_others])))
    start, length = inputs.last_cut(start), min(length, most)
    chunk = inputs.chunk(start, length, most)
    assert 0 <= chunk <= most
    assert inputs.last_cut(start + chunk) == start + chunk == inputs.next_cut(start + chunk)
    if chunk == 0:
        assert any(first == start and last - first > most for first, last in spans)


def test_a_cut_lies_outside_of_the_ranges_of_all_parts() -> None:
    inputs = InputParts((PromptSpans(((2, 5), (8, 12))), PromptSpans(((4, 9),))))
    assert [inputs.last_cut(position) for position in (2, 3, 8, 11, 12)] == [2, 2, 2, 2, 12]
    assert [inputs.next_cut(position) for position in (2, 3, 8, 11, 12)] == [2, 12, 12, 12, 12]
    assert inputs.chunk(2, 4, 10) == 10 and inputs.chunk(2, 4, 9) == 0 and inputs.chunk(0, 4, 9) == 2


@pytest.mark.parametrize(
    ("spans", "message"),
    [("ab", "list of"), ([3], "pairs"), ([[1, 2, 3]], "pairs"), ([[1, 2.0]], "integers"), ([[5, 5]], "start < end"),
     ([[-1, 4]], "0 <= start"), ([[50, 61]], "end <= 60"), ([[0, 10], [9, 12]], "overlap"), ([[0, 50]], "at most")],
)
def test_bad_spans_are_refused(spans: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_spans(spans, 60, 40)


def test_an_engine_that_cannot_serve_spans_says_which_can() -> None:
    with Rig(tiny_model("llama", torch.float32), attention_backend="native") as rig:
        with pytest.raises(ValueError, match="attention_backend='flex'"):
            rig.engine.checks.check({"prompt_token_ids": PROMPT, "bidirectional_spans": SPANS}, greedy(2))
        assert not rig.engine.has_work
