"""train_drafter: a whole training run, from a loaded target to the files of its drafter."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from outrider.config import EngineConfig
from outrider.engine.load import find_model
from outrider.engine.text import Tokenizer
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.training.answers import AnswerPlan, generate_texts
from outrider.training.checkpoint import Evaluation, TrainingCheckpoint
from outrider.training.prompts import SelfPrompts, read_prompts
from outrider.training.settings import TrainingSettings
from outrider.training.teacher import Teacher
from outrider.training.texts import SplitTexts, TextStore, count_answer_tokens, split_texts
from outrider.training.trainee import DrafterCard, Trainee, trainee_class
from outrider.training.trainer import Trainer
from outrider.training.vocabulary import DraftVocabulary
from outrider.training.workspace import MODEL_FILES, Workspace, digest_model

BYTES_PER_TOKEN = 4
SPARE_BYTES = 64 << 20


class ServedTarget(Protocol):
    """A target that is loaded once. Several engines can be made with it."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Model: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    def llm(self, config: EngineConfig) -> LLM: ...


@dataclass(frozen=True)
class TrainedDrafter:
    """The result of a training run: its size, its evaluations and its duration."""

    num_steps: int
    num_training_texts: int
    coverage: float
    evaluations: list[Evaluation]
    best: Evaluation
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"steps": self.num_steps, "texts": self.num_training_texts,
                "vocabulary_coverage": round(self.coverage, 4), "best_step": self.best.step,
                "mean_run": round(self.best.acceptance.mean_run, 3),
                "accepted_by_position": [round(rate, 3) for rate in self.best.acceptance.by_position],
                "seconds": round(self.seconds, 1)}


def train_drafter(target: ServedTarget, config: EngineConfig, settings: TrainingSettings, workspace: Workspace, *,
                  prompts_file: Path | None = None, report: Callable[[str], None] = print) -> TrainedDrafter:
    """Generate texts, train, and write the drafter. Continues where an earlier run in the workspace was interrupted."""
    began, model = time.perf_counter(), target.model
    if model.classes is not None:
        raise ValueError(f"{target.name} scores classes and generates no text that a drafter could be trained on: name "
                         "another model")
    most = min(model.max_positions, config.max_model_len or model.max_positions)
    if settings.max_text_tokens >= most:
        raise ValueError(f"texts of {settings.max_text_tokens} tokens (--max-prompt-tokens + --max-answer-tokens) need "
                         f"{settings.max_text_tokens + 1} positions, and {target.name} has {most}: lower one of the "
                         "two")
    method = trainee_class(settings.method)
    aux_layers = method.aux_layers_for(model, settings)
    prompts = [] if prompts_file is None else read_prompts(prompts_file, target.tokenizer, vocab_size=model.vocab_size,
                                                           max_tokens=settings.max_prompt_tokens)
    settings = settings.with_num_texts(len(prompts))
    assert settings.num_texts is not None
    workspace.check_room(settings.num_texts * settings.max_text_tokens * BYTES_PER_TOKEN + SPARE_BYTES,
                         "the texts of this run")
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest() if prompts else None
    workspace.open(settings.as_json() | {"model": target.name, "prompts": digest,
                                         MODEL_FILES: digest_model(find_model(config).path)})
    texts = _texts(target, config, settings, workspace, prompts, report)
    vocabulary = DraftVocabulary.from_counts(count_answer_tokens(texts.training, model.vocab_size),
                                             settings.draft_vocab_size)
    report(f"vocabulary: {len(vocabulary.ids)} of {model.vocab_size} tokens, {vocabulary.coverage:.2%} of the answers")
    trainee = method(model, settings, vocabulary)
    workspace.check_room(2 * TrainingCheckpoint.num_bytes(trainee.num_parameters) + SPARE_BYTES,
                         "the checkpoint of this run")
    with Teacher(config, model, aux_layers, vocabulary, max_text_tokens=settings.max_text_tokens,
                 micro_tokens=settings.micro_tokens_on(model.device.type)) as teacher:
        trainer = Trainer(trainee, teacher, texts, vocabulary, settings, workspace, device=model.device,
                          peak_rate=settings.rate_for(model.hidden_size), report=report)
        if workspace.checkpoint.exists():
            trainer.resume(TrainingCheckpoint.read(workspace.checkpoint))
        trainer.run()
    done = TrainedDrafter(trainer.num_steps_done, len(texts.training), vocabulary.coverage, trainer.evaluations,
                          trainer.best, time.perf_counter() - began)
    trainee.export(workspace.folder, _card(target.name, trainee, settings, done), settings.file_form)
    report(f"wrote {workspace.folder}: {done.best.acceptance.mean_run:.3f} tokens a step on held-out text")
    return done


def _texts(target: ServedTarget, config: EngineConfig, settings: TrainingSettings, workspace: Workspace,
           prompts: list[list[int]], report: Callable[[str], None]) -> SplitTexts:
    assert settings.num_texts is not None
    store, plan = TextStore(workspace.inner), AnswerPlan(settings, settings.num_texts, prompts)
    own = SelfPrompts(target.tokenizer, target.model.vocab_size)
    if plan.missing_shards(store):
        with target.llm(replace(config, max_model_len=settings.max_text_tokens + 1)) as llm:
            generate_texts(llm, plan, store, own, report=report)
    texts = split_texts(store.read_all(), settings.held_out)
    if not texts.training or not texts.held_out:
        raise ValueError(f"{len(texts.training)} texts to train on and {len(texts.held_out)} greedy ones to measure "
                         "with are too few: raise --num-texts, or give more prompts (--prompts FILE)")
    if not any(text.num_places(settings.passes) for text in texts.held_out):
        raise ValueError(f"the held-out answers are too short to measure {settings.passes} drafts with: lower "
                         "--passes, raise --max-answer-tokens, or give more prompts (--prompts FILE)")
    return texts


def _card(target_name: str, trainee: Trainee, settings: TrainingSettings, done: TrainedDrafter) -> DrafterCard:
    rates = ", ".join(f"{rate:.2f}" for rate in done.best.acceptance.by_position)
    return DrafterCard(target_name, [
        f"- {trainee.num_parameters / 1e6:.2f}M trained parameters; the draft vocabulary covers {done.coverage:.2%} of "
        "the answers it was trained on.",
        f"- Trained on {done.num_training_texts} answers of the model (half greedy, half at temperature "
        f"{settings.temperature}), {done.num_steps} steps of {settings.batch_tokens} tokens, {settings.passes} "
        f"unrolled passes, seed {settings.seed}.",
        f"- On {done.best.acceptance.num_places} places of held-out greedy answers: accepted by position {rates}; "
        f"{done.best.acceptance.mean_run:.2f} tokens a step.",
    ])
