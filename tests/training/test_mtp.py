"""Tuning of a checkpoint's multi-token-prediction module: its passes in training draft as the engine's do, gradients
are those of the loss, and tuned weights are written by the names of the target's files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.commands.loading import Loaded
from outrider.config import EngineConfig
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.training.loss import pass_weights, text_loss
from outrider.training.mtp import MTPTrainee
from outrider.training.run import train_drafter
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import Teacher
from outrider.training.texts import TrainingText
from outrider.training.trainee import DrafterCard
from outrider.training.vocabulary import DraftVocabulary
from outrider.training.workspace import Workspace
from tests.drafters.hybrid_rig import FAMILIES, mtp_of
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, greedy, prompt_of, save_folder
from tests.training.runs import ASSETS, SMALL, loaded, prompts_of, train
from tests.training.test_teacher import CHECKED, SIZES, greedy_texts, teacher_of, whole_vocabulary

NAME = "nemotronh"  # attention and experts, no rope
MTP: dict[str, Any] = {"method": "mtp", "taps": (), "passes": 3}


def trainee_of(name: str = NAME, **settings: Any) -> MTPTrainee:
    model = loaded(name, torch.float64).model
    return MTPTrainee(model, TrainingSettings(**SMALL | MTP | settings), whole_vocabulary(name))


def test_the_module_in_training_drafts_as_the_engines_module_does(tmp_path: Path) -> None:
    """With weights that differ from the file's, written and read again; float64, every proposal of four requests."""
    model, trainee = loaded(NAME, torch.float64).model, trainee_of()
    random = torch.Generator().manual_seed(2)
    moved = {key: (weight.detach() + 0.05 * torch.randn(weight.shape, generator=random)).bfloat16().double()
             for key, weight in trainee.weights.items()}
    trainee.load(moved)
    trainee.export(tmp_path, DrafterCard("tiny", []), "hf")
    assert load_file(tmp_path / "model.safetensors").keys() == {
        name for name in load_file(ASSETS / NAME / "model.safetensors") if name.startswith("mtp.")}
    config = {"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": 3, "auto": False}
    with DraftRig(model, speculative_config=config, **SIZES) as rig:
        rig.run([Ask(prompt, greedy(10)) for prompt in prompts_of(NAME, CHECKED)])
        proposals = rig.proposals
    assert len(proposals) > 10
    with teacher_of(NAME, (model.num_layers,)) as teacher, torch.no_grad():
        for proposal in proposals:
            tokens = (*proposal.known, *proposal.drafts)
            taught = teacher.teach([TrainingText(tokens, 1, True)])
            rows = [torch.tensor([len(proposal.known) - 1])] * 3
            chosen = tuple(int(logits.argmax()) for logits in trainee.logits(taught, rows))
            assert chosen == proposal.drafts


def test_gradients_are_those_of_the_loss() -> None:
    """Against differences of the loss, along random directions of every weight."""
    trainee, texts, vocabulary = trainee_of(passes=2), greedy_texts(NAME), whole_vocabulary(NAME)
    with teacher_of(NAME, (loaded(NAME, torch.float64).model.num_layers,)) as teacher:
        taught = teacher.teach(texts)
    assert_gradients(trainee, (taught, vocabulary.is_known, pass_weights(2, 0.8), len(texts)))


def assert_gradients(trainee: MTPTrainee, arguments: tuple[Any, ...]) -> None:
    with trainee.with_gradients():
        text_loss(trainee, *arguments).backward()
    random = torch.Generator().manual_seed(4)
    for name, weight in trainee.weights.items():
        assert weight.grad is not None, name
        direction, step = torch.randn(weight.shape, generator=random, dtype=weight.dtype), 2e-3
        with torch.no_grad():
            losses = []
            for move in (step, -2 * step, step):
                weight.add_(direction * move)
                losses.append(float(text_loss(trainee, *arguments)))
        expected = float((weight.grad * direction).sum())
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=0.1, abs=0.02), name


@pytest.mark.long
def test_a_module_with_gated_attention_and_offset_norms(tmp_path: Path) -> None:
    """A recurrent target: Qwen3.5's module, whose norms scale by 1 + weight. Drafts and gradients."""
    folder = save_folder(tmp_path / "target", FAMILIES["qwen3_5"], seed=4)
    model = load_model(resolve(folder), dtype=torch.float64, device="cpu")
    (head,) = mtp_of(model, 2).modules()
    tensors = load_file(folder / "model.safetensors") | {
        name: slot.target.reshape(slot.shape).float().contiguous() for name, slot in head.weights().items()}
    save_file(tensors, folder / "model.safetensors")
    vocabulary = DraftVocabulary.from_counts(torch.ones(model.vocab_size), model.vocab_size)
    trainee = MTPTrainee(model, TrainingSettings(**SMALL | MTP | {"passes": 2}), vocabulary)
    trainee.load({key: weight.detach().bfloat16().double() for key, weight in trainee.weights.items()})
    (tmp_path / "module").mkdir()
    trainee.export(tmp_path / "module", DrafterCard("tiny", []), "hf")
    config = {"method": "mtp", "model": str(tmp_path / "module"), "num_speculative_tokens": 2, "auto": False}
    with DraftRig(model, speculative_config=config, **SIZES) as rig:
        rig.run([Ask(prompt_of(3, 20, model.vocab_size), greedy(10))])
    engine = EngineConfig(str(folder), device="cpu", num_pages=300, max_num_seqs=8)
    with Teacher(engine, model, (model.num_layers,), vocabulary, max_text_tokens=60, micro_tokens=128) as teacher:
        for proposal in rig.proposals:
            taught = teacher.teach([TrainingText((*proposal.known, *proposal.drafts), 1, True)])
            rows = [torch.tensor([len(proposal.known) - 1])] * 2
            with torch.no_grad():
                assert tuple(int(logits.argmax()) for logits in trainee.logits(taught, rows)) == proposal.drafts
        taught = teacher.teach([TrainingText(tuple(prompt_of(1, 30, model.vocab_size)), 4, True)])
    assert_gradients(trainee, (taught, vocabulary.is_known, pass_weights(2, 0.8), 1))


@pytest.mark.long
def test_tuning_for_further_drafts_raises_their_acceptance(tmp_path: Path) -> None:
    done = train(tmp_path / "module", NAME, num_prompts=96, epochs=4, learning_rate=1e-3, evaluations=4,
                 **MTP | {"passes": 2})
    first, best = done.evaluations[0].acceptance, done.best.acceptance
    assert best.mean_run >= first.mean_run and best.mean_run > 1.8, (first, best)


def test_targets_without_one_module_that_can_be_tuned_are_refused() -> None:
    settings = TrainingSettings(**SMALL | MTP)
    with pytest.raises(ValueError, match="cannot tune a module with latent attention"):
        MTPTrainee.aux_layers_for(loaded_asset("deepseek_v32"), settings)
    with pytest.raises(ValueError, match="has no multi-token-prediction module"):
        MTPTrainee.aux_layers_for(loaded("gemma4", torch.float64).model, settings)


def test_files_without_the_module_are_refused_before_texts_are_written(tmp_path: Path) -> None:
    """Checkpoints are published without it too, under a config that tells of it."""
    shutil.copytree(ASSETS / NAME, tmp_path / "bare")
    tensors = load_file(ASSETS / NAME / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")},
              tmp_path / "bare" / "model.safetensors")
    bare = Loaded("bare", load_model(resolve(tmp_path / "bare"), dtype=torch.float32, device="cpu"), None, ())
    with pytest.raises(ValueError, match=r"no tensor begins with 'mtp\.'\. Use --method eagle3 or block"):
        train_drafter(bare, EngineConfig(str(tmp_path / "bare"), device="cpu"), TrainingSettings(**SMALL | MTP),
                      Workspace(tmp_path / "module"))
    assert not (tmp_path / "module").exists()


def loaded_asset(name: str) -> Any:
    return loaded(name, torch.float64).model
