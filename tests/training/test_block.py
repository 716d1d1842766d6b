"""Training of block drafters: the network in training drafts as the engine's drafter does, the command's drafter is
right far more often than n-grams, a killed run ends with the same weights, and files have the published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.training.block import BlockTrainee, block_places
from outrider.training.block_network import BlockNetwork
from outrider.training.settings import TrainingSettings
from outrider.training.texts import TrainingText
from outrider.training.trainee import DrafterCard
from outrider.training.vocabulary import DraftVocabulary
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, greedy
from tests.training.runs import SMALL, loaded, prompts_of, train
from tests.training.test_resume import Killed, kill_at
from tests.training.test_teacher import CHECKED, FAMILIES, SIZES, teacher_of, varied
from tests.training.test_trained_head import mean_run

BLOCK: dict[str, Any] = {"method": "block", "layers": 2, "taps": ()}


@pytest.mark.parametrize(("name", "rank", "form"), [("target", 0, "hf"), ("gemma4", 4, "hf"),
                                                    ("nemotronh", 0, "speculators"), ("target", 5, "speculators")])
def test_the_network_in_training_drafts_as_the_engines_drafter_does(name: str, rank: int, form: str,
                                                                    tmp_path: Path) -> None:
    """Random weights, float64, every proposal of four requests."""
    assert name in FAMILIES
    model = loaded(name, torch.float64).model
    settings = TrainingSettings(**SMALL | BLOCK | {"passes": 3, "seed": 5, "markov_rank": rank})
    vocabulary = DraftVocabulary.from_counts(torch.arange(model.vocab_size) % 7, 40)
    trainee = BlockTrainee(model, settings, vocabulary)
    random = torch.Generator().manual_seed(3)
    fresh = {key: torch.randn(weight.shape, generator=random) if "markov" in key else varied(key, weight.detach())
             for key, weight in trainee.weights.items()}
    trainee.load(fresh)
    trainee.export(tmp_path, DrafterCard("tiny", []), form)
    weights = {key: weight.detach().bfloat16().double() for key, weight in trainee.weights.items()}
    trainee.network = network = BlockNetwork(trainee.sizes, weights)
    config = {"model": str(tmp_path), "num_speculative_tokens": 3, "auto": False}  # the files tell the method
    with DraftRig(model, speculative_config=config, **SIZES) as rig:
        rig.run([Ask(prompt, greedy(10)) for prompt in prompts_of(name, CHECKED)])
        proposals = rig.proposals
    assert len(proposals) > 20
    with teacher_of(name, trainee.sizes.aux_layers) as teacher:
        for proposal in proposals:
            tokens = (*proposal.known, *proposal.drafts)
            taught = teacher.teach([TrainingText(tokens, 1, True)])
            last = len(proposal.known) - 1
            anchors = torch.tensor([[last]])
            states = network.states(trainee.block_embeds(taught, anchors), anchors, taught.aux_states)[0, 0]
            for index, draft in enumerate(proposal.drafts):
                own, output = states[trainee.sizes.first_row + index], weights["lm_head.weight"]
                if rank:
                    before = torch.tensor([tokens[last + index]])
                    (own,), output = network.with_markov_head(own[None], before, output)
                scores = own @ output.T
                assert int(vocabulary.ids[scores.argmax()]) == draft


def test_blocks_begin_at_every_place_that_a_pass_asks_for() -> None:
    rows = [torch.tensor([1, 3, 7]), torch.tensor([3, 9, 4])]  # text * 5 + position
    anchors, place = block_places(rows, 2, 5)
    assert anchors.tolist() == [[1, 3, 4], [2, 4, 2]]
    for own in rows:
        assert [anchors.flatten()[place[row]].item() for row in own] == [int(row) % 5 for row in own]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 8])
def test_a_trained_block_is_far_above_ngrams(rank: int, tmp_path: Path) -> None:
    done = train(tmp_path / "block", num_prompts=160, passes=2, epochs=5, learning_rate=8e-3, batch_tokens=384,
                 micro_tokens=384, max_answer_tokens=40, evaluations=3, markov_rank=rank, **BLOCK)
    _, text = mean_run(None)
    run, same = mean_run({"method": "block", "model": str(tmp_path / "block")})
    assert same == text
    assert run > 1.7, (run, done.best.acceptance)


def test_a_killed_run_of_blocks_resumes_to_the_same_weights(tmp_path: Path) -> None:
    run: dict[str, Any] = BLOCK | {"passes": 2, "epochs": 2, "evaluations": 2, "markov_rank": 3}
    whole = train(tmp_path / "whole", **run)
    with pytest.raises(Killed):
        train(tmp_path / "killed", report=kill_at("held out after step 2"), **run)
    resumed = train(tmp_path / "killed", **run)
    assert resumed.evaluations == whole.evaluations
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    layer = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
             *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))}
    assert one.keys() == {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
                          "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
                          *(f"layers.{index}.{name}.weight" for index in range(2) for name in layer)}
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["block_size"] == 2
