"""What a head is taught is what the engine computes, for full, sliding-window and recurrent layers; and the head that
is trained computes what the engine's head does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.layers import NothingAttends, StepContext
from outrider.trainable.eagle3_network import Eagle3Network, TextSlots
from outrider.training import text_states
from outrider.training.draft_logits import DraftLogits
from outrider.training.eagle3 import Eagle3Trainee
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import Teacher
from outrider.training.texts import TrainingText
from outrider.training.trainee import DrafterCard
from outrider.training.vocabulary import DraftVocabulary
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, Rig, greedy
from tests.training.runs import LANGUAGES, SMALL, engine_config, loaded, prompts_of

FAMILIES = tuple(LANGUAGES)  # full attention, sliding windows, Mamba-2
SIZES: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 128, "num_pages": 300}
CHECKED = 4


def whole_vocabulary(name: str) -> DraftVocabulary:
    return DraftVocabulary.from_counts(torch.ones(loaded(name).model.vocab_size), loaded(name).model.vocab_size)


def greedy_texts(name: str) -> list[TrainingText]:
    with Rig(loaded(name, torch.float64).model, **SIZES) as rig:
        prompts = prompts_of(name, CHECKED)
        outputs = rig.run([Ask(prompt, greedy(12 + index)) for index, prompt in enumerate(prompts)])
    return [TrainingText((*prompt, *output.outputs[0].token_ids), len(prompt), True)
            for prompt, output in zip(prompts, outputs, strict=True)]


def teacher_of(name: str, aux_layers: tuple[int, ...] = (1, 2, 4)) -> Teacher:
    return Teacher(engine_config(name), loaded(name, torch.float64).model, aux_layers, whole_vocabulary(name),
                   max_text_tokens=60, micro_tokens=128)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_teachers_choices_are_the_engines_text(name: str) -> None:
    texts = greedy_texts(name)
    with teacher_of(name) as teacher:
        together = teacher.teach(texts)
        alone = [teacher.teach([text]) for text in texts]
    for index, text in enumerate(texts):
        length = len(text.tokens)
        said = together.best[index, text.answer_from - 1 : length - 1].tolist()
        assert said == list(text.answer)
        torch.testing.assert_close(together.aux_states[index, :length], alone[index].aux_states[0], rtol=0, atol=1e-9)
        places = together.may_draft(2)[index].nonzero()[:, 0].tolist()
        assert places == list(range(text.answer_from - 1, length - 2))


def test_taps_are_the_residual_streams_that_were_asked_for() -> None:
    """Auxiliary state 0 is the embedding, and the last one leads to the logits through the final norm."""
    model, (text, *_) = loaded("target", torch.float64).model, greedy_texts("target")
    with teacher_of("target", (0, 4)) as teacher:
        taught = teacher.teach([text])
    first, last = taught.aux_states[0].unbind(dim=1)
    torch.testing.assert_close(first, model.embed_tokens.weight[list(text.tokens)])
    logits = model.norm(last) @ model.lm_head.format.dense().T  # type: ignore[attr-defined, union-attr]
    places = taught.may_draft(1)[0]
    torch.testing.assert_close(logits[places].float(), taught.logits, rtol=1e-5, atol=1e-5)


def test_kept_texts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And teach what they would if they were computed whenever they are asked for."""
    texts, lines = greedy_texts("target"), list[str]()
    with teacher_of("target") as teacher:
        computed = teacher.teach(texts)
        teacher.keep(texts, lines.append)
        monkeypatch.setattr(Teacher, "_compute", None)
        kept = teacher.teach(texts[::-1])
        teacher.keep(texts, lines.append)
    length = sum(len(text.tokens) for text in texts)
    assert f"keeps the target's states of {length} of {length} tokens" in lines[0]
    assert "of 0 of 0 tokens" in lines[1]
    for name in ("tokens", "aux_states", "best", "lengths", "answer_from"):
        one, two = getattr(computed, name), getattr(kept, name).flip(0)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
    places = computed.may_draft(1)
    rows = computed.logits[computed.place_of[places]], kept.logits[kept.place_of.flip(0)[places]]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)


def test_texts_without_room_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = greedy_texts("target")
    row_bytes = 8 * 4 * loaded("target").model.hidden_size  # three auxiliary states and the final state in float64
    monkeypatch.setattr(text_states, "available_bytes", lambda: 2 * row_bytes * (len(texts[0].tokens) + 1))
    with teacher_of("target") as teacher:
        wanted = teacher.teach(texts)
        teacher._step_tokens = 1  # every text has a segment of its own
        lines: list[str] = []
        teacher.keep(texts, lines.append)
        teacher._step_tokens = 128
        assert f"states of {len(texts[0].tokens)} of " in lines[0] and "the others are computed" in lines[0]
        found = teacher.teach(texts)
    torch.testing.assert_close(found.aux_states, wanted.aux_states, rtol=0, atol=1e-9)
    assert torch.equal(found.best, wanted.best)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_the_drafters_tokens_are_those_of_the_whole_vocabulary(name: str) -> None:
    """Also where the target scales, caps or suppresses them."""
    model = loaded(name, torch.float64).model
    final = torch.randn(5, model.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(0, model.vocab_size, 3)
    logits = DraftLogits(model, ids)
    whole = model.logits(final, StepContext(NothingAttends(), torch.zeros(5, dtype=torch.int64)))
    torch.testing.assert_close(logits(final), whole[:, ids].float())
    assert torch.equal(logits.best(final), whole.argmax(dim=-1))


def test_a_head_begins_with_the_last_aux_state_and_attends_to_its_own_slot() -> None:
    """The two things that runs otherwise spend their first steps on."""
    model = loaded("target", torch.float64).model
    settings = TrainingSettings(**SMALL | {"passes": 1, "taps": (1, 4, 2)})
    sizes = Eagle3Trainee(model, settings, whole_vocabulary("target")).sizes
    weights = Eagle3Trainee(model, settings, whole_vocabulary("target")).weights
    hidden = model.hidden_size
    states = torch.randn(3, hidden)
    assert torch.equal(weights["fc.weight"] @ states.flatten(), states[1])
    x = torch.randn(2 * hidden)
    query, key = (weights[f"midlayer.self_attn.{name}_proj.weight"] @ x for name in "qk")
    assert sizes.num_heads > sizes.num_kv_heads
    keys = key.unflatten(0, (sizes.num_kv_heads, -1)).repeat_interleave(sizes.num_heads // sizes.num_kv_heads, dim=0)
    torch.testing.assert_close(query.unflatten(0, (sizes.num_heads, -1)), keys)


def varied(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Weights with which attention decides much of the result, and so the positions of slots, and every auxiliary state
    counts."""
    if name == "fc.weight":
        return weight + 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    if weight.dim() == 1:
        return weight + torch.empty_like(weight).normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return weight * (4 if "q_proj" in name or "k_proj" in name or "o_proj" in name else 1)


@pytest.mark.parametrize("classic", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_in_training_drafts_as_the_engines_head_does(name: str, classic: bool, tmp_path: Path) -> None:
    """Random weights, float64, every proposal of four requests; MLPs like the target's, and narrower ones."""
    model = loaded(name, torch.float64).model
    width = None if classic else 56
    settings = TrainingSettings(**SMALL | {"classic": classic, "passes": 3, "seed": 5, "intermediate_size": width})
    vocabulary = DraftVocabulary.from_counts(torch.arange(model.vocab_size) % 7, 40)
    trainee = Eagle3Trainee(model, settings, vocabulary)
    assert classic or trainee.weights["midlayer.mlp.down_proj.weight"].shape[1] == width
    trainee.load({key: varied(key, weight.detach()) for key, weight in trainee.weights.items()})
    trainee.export(tmp_path, DrafterCard("tiny", []), "hf")
    weights = {key: weight.detach().bfloat16().double() for key, weight in trainee.weights.items()}
    network = Eagle3Network(trainee.sizes.form, weights)
    config = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3, "auto": False}
    with DraftRig(model, speculative_config=config, **SIZES) as rig:
        rig.run([Ask(prompt, greedy(10)) for prompt in prompts_of(name, CHECKED)])
        proposals = rig.proposals
    assert len(proposals) > 20
    with teacher_of(name) as teacher:
        for proposal in proposals:
            tokens = torch.tensor([(*proposal.known, *proposal.drafts)])
            taught = teacher.teach([TrainingText(tuple(tokens[0].tolist()), 1, True)])
            slots = TextSlots.from_lengths(taught.lengths, tokens.shape[1])
            states = network.passes(model.embed_tokens.format.look_up(tokens[0])[None], taught.aux_states, slots, 3)
            last = len(proposal.known) - 1
            scores = [state[last - 1] @ weights["lm_head.weight"].T for state in states]
            assert tuple(int(vocabulary.ids[score.argmax()]) for score in scores) == proposal.drafts
