"""Prediction modules against a naive reference: alone over the cells of a dense attention, and in a whole engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.config import SpeculativeConfig
from outrider.drafters.base import DraftBuild, Drafts, Step
from outrider.drafters.mtp import mtp_drafter
from outrider.layers import StepContext
from outrider.models.base import Model
from outrider.models.mtp import MTPHead, build_mtp_modules
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.engine.harness import Ask, Rig, greedy, prompt_of
from tests.engine.harness import tokens_of as texts_of
from tests.models.oracle import LOGIT_ROWS, DenseAttend, tokens_of

NUM_DRAFTS = 3
NaiveDrafts = Callable[[Sequence[int], int], tuple[list[int], torch.Tensor]]  # k drafts after known tokens, and logits
SHORT = ((1, 12, ()), (2, 12, (1, 5)), (3, 12, (7,)))  # seed, tokens and chunks of each context

# The beginning of a family's name -> keys of the config of a checkpoint with modules. The first that fits counts.
_PREDICTED = "num_nextn_predict_layers"
_SHARED_CHOICE = {_PREDICTED: 1, "index_share_for_mtp_iteration": True}
MODULES: dict[str, dict[str, Any]] = {
    "nemotron_h_latent": {_PREDICTED: 1, "mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*-E*"},
    "nemotron_h": {_PREDICTED: 1, "mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E"},
    "qwen3_next": {"mtp_num_hidden_layers": 1}, "qwen3_5": {"mtp_num_hidden_layers": 1},
    "qwen4_exp": {"mtp_num_hidden_layers": 1}, "deepseek_v3_direct": {_PREDICTED: 2}, "deepseek_v32": _SHARED_CHOICE,
    "deepseek_v3": {_PREDICTED: 1}, "glm_moe_dsa": _SHARED_CHOICE, "glm4_moe": {_PREDICTED: 1},
    "glm5_next_free": _SHARED_CHOICE, "glm5_next": {_PREDICTED: 1}, "hy_v4_yarn": {_PREDICTED: 2},
    "hy_v4": {_PREDICTED: 1}, "bailing_hybrid": {_PREDICTED: 1},
}


def has_modules(family: str) -> bool:
    """Whether checkpoints of the family are published with prediction modules."""
    return family.startswith(tuple(MODULES))


def add_modules(family: str, folder: Path, seed: int = 6) -> Path:
    """Write modules with random weights into the folder of a target, which has none."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(next(changes for begin, changes in MODULES.items() if family.startswith(begin)))
    (folder / "config.json").write_text(json.dumps(config))
    target = build_model(read_config(folder), dtype=torch.float32, device="cpu")
    heads = build_mtp_modules(target, first_layer=target.num_layers, dtype=torch.float32, device=torch.device("cpu"))
    generator, file = torch.Generator().manual_seed(seed), folder / "model.safetensors"
    tensors = load_file(file)
    for head in heads:
        for name, slot in head.weights().items():
            mean = 1.0 if "norm" in name and not head.description.norm_offset else 0.0
            tensors[name] = torch.empty(slot.shape).normal_(mean, 0.2, generator=generator)
    save_file(tensors, file, {"format": "pt"})
    return folder


def head_of(folder: Path, target: Model, k: int = 3) -> MTPHead:
    """The module, made as the engine makes it."""
    build = DraftBuild(target, torch.float64, torch.device("cpu"), max_len=128, target_source=str(folder))
    network = mtp_drafter(SpeculativeConfig(method="mtp", num_speculative_tokens=k), build).network
    assert isinstance(network, MTPHead)
    return network


def drafts_of(head: MTPHead, target: Model, known: Sequence[int], k: int, chunks: tuple[int, ...]) -> Any:
    """k drafts after `known`, and the logits of each: positions in chunks, then drafts one by one over the cache."""
    history = torch.tensor(known[:-1])
    before = DenseAttend(target)
    context = StepContext(before, torch.arange(len(history)), history=before.history(history))
    hidden = head.consume(target.forward(history, context))
    attend: Any = DenseAttend(head)  # type: ignore[arg-type]
    tokens, positions, start = torch.tensor(known[1:]), torch.arange(1, len(known)), 0
    for size in (*chunks, len(tokens) - sum(chunks)):
        part = slice(start, start + size)
        output, feedback = head.forward(tokens[part], hidden[part], StepContext(attend, positions[part]))
        start += size
    chosen: list[int] = []
    logits = [head.logits(output[-1:], LOGIT_ROWS)[0]]
    for index in range(k):
        chosen.append(int(logits[-1].argmax()))
        slot = torch.tensor([len(known) + index])
        output, feedback = head.forward(torch.tensor(chosen[-1:]), feedback[-1:], StepContext(attend, slot))
        logits.append(head.logits(output, LOGIT_ROWS)[0])
    return chosen, torch.stack(logits[:k])


def assert_drafts_equal(folder: Path, target: Model, naive: NaiveDrafts,
                        contexts: Iterable[tuple[int, int, tuple[int, ...]]] = SHORT, *, within: float = 1e-9,
                        least_distinct: int = 5) -> None:
    """The module of the folder drafts as the reference does. contexts: seed, tokens and chunks of each."""
    head, seen = head_of(folder, target), set()
    for seed, count, chunks in contexts:
        known = tokens_of(seed, count).tolist()
        expected, expected_logits = naive(known, NUM_DRAFTS)
        chosen, logits = drafts_of(head, target, known, NUM_DRAFTS, chunks)
        assert chosen == expected
        assert (logits - expected_logits).abs().max() < within
        seen |= set(chosen)
    assert len(seen) >= least_distinct, "constant drafts would hide mistakes"


def drafts_in_an_engine(folder: Path, target: Model) -> list[tuple[tuple[int, ...], list[int]]]:
    """The known tokens and the drafts of each proposal in ragged batches, in chunks, after preemptions and prefix hits.
    Fails if the text is not the one without drafts."""
    asks = [Ask(prompt_of(seed, count), greedy(8, ignore_eos=True)) for seed, count in ((1, 37), (2, 7))]
    with Rig(target) as plain:
        texts = texts_of(plain.run(asks))
    build = DraftBuild(target, torch.float64, torch.device("cpu"), max_len=96, target_source=str(folder))
    drafter = mtp_drafter(SpeculativeConfig(method="mtp", num_speculative_tokens=NUM_DRAFTS), build)
    proposed: dict[tuple[int, ...], list[int]] = {}
    propose = drafter.propose

    def watched(step: Step) -> Drafts:
        made = propose(step)
        rows = step.batch.padded.rows.tolist()
        for at, (row, goes_on) in enumerate(zip(rows, step.goes_on.tolist(), strict=True)):
            if goes_on and int(made.counts[at]) == NUM_DRAFTS:
                proposed[tuple(step.tokens[row, : step.known[row]].tolist())] = made.tokens[at].tolist()
        return made

    drafter.propose = watched  # type: ignore[method-assign]
    with Rig(target, drafter=drafter, max_num_batched_tokens=24) as rig:
        assert texts_of(rig.run(asks, after_step=rig.preempt)) == texts_of(rig.run(asks)) == texts
        assert rig.scheduler.stats.num_preemptions > 0 and rig.scheduler.cache.stats.hit_tokens > 0
    assert len(proposed) > 6
    return list(proposed.items())
