"""Heads are checked when they are loaded: what does not fit the target is refused by name, with what to do."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SpeculativeConfig
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.base import DraftBuild
from outrider.drafters.registry import make_drafter as build_drafter
from outrider.models.base import Model
from outrider.models.head import DraftHead
from tests.drafters.checkpoints import DRAFT_VOCAB, HIDDEN, Drafter, make_drafter
from tests.engine.harness import Ask as Request
from tests.engine.harness import Rig, greedy, prompt_of, tiny_model, tokens_of

CPU = torch.device("cpu")


def load(drafter: Drafter, k: int = 3, target: Model | None = None, **build: Any) -> AutoregressiveDrafter:
    target = target or tiny_model("llama")
    fields = DraftBuild(target, torch.float64, CPU, max_len=64, **build)
    made = build_drafter(SpeculativeConfig.parse(drafter.speculative(k)), fields)
    assert isinstance(made, AutoregressiveDrafter)
    return made


def changed(drafter: Drafter, **values: Any) -> Drafter:
    """The checkpoint with other values in its config."""
    (drafter.folder / "config.json").write_text(json.dumps(drafter.config | values))
    return drafter


def with_tensors(drafter: Drafter, drop: tuple[str, ...] = (), **added: torch.Tensor) -> Drafter:
    path = drafter.folder / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if name not in drop}
    save_file(tensors | added, path)
    return drafter


def head_of(drafter: AutoregressiveDrafter) -> Any:
    assert isinstance(drafter.network, DraftHead)
    return drafter.network


# What is refused


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_for_another_hidden_size(kind: str, tmp_path: Path) -> None:
    drafter = changed(make_drafter(kind, "llama", tmp_path), hidden_size=48)
    with pytest.raises(ValueError, match=r"hidden_size=48 is not supported; the target's hidden size is 32. Use a"):
        load(drafter)


def test_a_head_that_says_it_is_for_another_hidden_size(tmp_path: Path) -> None:
    drafter = changed(make_drafter("eagle3_speculators", "llama", tmp_path), target_hidden_size=4096)
    with pytest.raises(ValueError, match=r"target_hidden_size=4096 is not supported; the target's hidden size is 32"):
        load(drafter)


def test_a_reduced_vocabulary_without_d2t(tmp_path: Path) -> None:
    drafter = with_tensors(make_drafter("eagle3", "llama", tmp_path), drop=("d2t",))
    with pytest.raises(ValueError, match=r"knows 100 of the target's 256 tokens and has no tensor d2t.* fetch the"):
        load(drafter)


def test_a_d2t_that_leaves_the_vocabulary_or_has_another_length(tmp_path: Path) -> None:
    drafter = with_tensors(make_drafter("eagle3", "llama", tmp_path), d2t=torch.full((DRAFT_VOCAB,), 200))
    with pytest.raises(ValueError, match="d2t names tokens outside the target's vocabulary of 256"):
        load(drafter)
    with pytest.raises(ValueError, match="d2t must hold 100 integers"):
        load(with_tensors(drafter, d2t=torch.zeros(7, dtype=torch.int64)))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_another_vocabulary(kind: str, tmp_path: Path) -> None:
    drafter = changed(make_drafter(kind, "llama", tmp_path), vocab_size=300)
    with pytest.raises(ValueError, match=r"vocab_size=300 is not supported; the target's vocabulary has 256 tokens"):
        load(drafter)


@pytest.mark.parametrize("ids", [[0, 1, 3], [-1, 0, 1], []])
def test_hidden_layer_ids_out_of_range(ids: list[int], tmp_path: Path) -> None:
    drafter = changed(make_drafter("eagle3_speculators", "llama", tmp_path), eagle_aux_hidden_state_layer_ids=ids)
    with pytest.raises(ValueError, match=r"eagle_aux_hidden_state_layer_ids=.* the target has 2 layers, so ids are 0"):
        load(drafter)


def test_default_hidden_layers_need_a_target_that_has_them(tmp_path: Path) -> None:
    """2, half of the layers and all but three: a target of two layers has no such thing."""
    with pytest.raises(ValueError, match=r"eagle_aux_hidden_state_layer_ids=\[2, 1, -1\] is not supported"):
        load(changed(make_drafter("eagle3", "llama", tmp_path), eagle_config=None))


@pytest.mark.parametrize("kind,asked", [("eagle", "eagle3"), ("eagle3_speculators", "eagle")])
def test_a_head_of_the_other_kind(kind: str, asked: str, tmp_path: Path) -> None:
    drafter = make_drafter(kind, "llama", tmp_path)
    with pytest.raises(ValueError, match=f"EAGLE-. head and the method is '{asked}': use method '{drafter.method}'"):
        load(Drafter(asked, drafter.folder, drafter.config, drafter.tensors))


def test_unknown_methods_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method 'eagle4': did you mean 'eagle.*'. It must be one of .*eagle3"):
        SpeculativeConfig.parse({"method": "eagle4", "model": "x", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="needs 'model'"):
        SpeculativeConfig.parse({"method": "eagle3", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="there is no file or folder"):
        load(Drafter("eagle3", tmp_path / "nothing", {}, {}))


def test_tensors_that_are_missing_or_left_over(tmp_path: Path) -> None:
    drafter = make_drafter("eagle3", "llama", tmp_path)
    message = rf"speculative_config: 'eagle3': the files of {drafter.folder} .*missing: fc\.weight; left over: surplus"
    with pytest.raises(ValueError, match=message):
        load(with_tensors(drafter, drop=("fc.weight",), **{"surplus.weight": torch.ones(2)}))


def test_a_reduced_head_without_its_output(tmp_path: Path) -> None:
    drafter = with_tensors(make_drafter("eagle3", "llama", tmp_path), drop=("lm_head.weight",))
    with pytest.raises(ValueError, match=r"no lm_head.weight and the target's does not fit it \(100 tokens"):
        load(drafter)


@pytest.mark.parametrize("kind,key,value", [
    ("eagle_speculators", "layernorms", True), ("eagle3", "hidden_act", "gelu"),
    ("eagle3", "eagle_config", {"use_aux_hidden_state": False}),
    ("eagle3_speculators", "speculators_model_type", "medusa"),
])
def test_switches_that_are_not_implemented(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    named = next(iter(value)) if isinstance(value, dict) else key
    with pytest.raises(ValueError, match=f"{named}=.* is not supported"):
        load(changed(make_drafter(kind, "llama", tmp_path), **{key: value}))


def test_mtp_of_a_target_that_has_none(tmp_path: Path) -> None:
    class Other:
        num_layers = 2

        def cache_layers(self) -> list[Any]:
            return []

    drafter = make_drafter("mtp", "llama", tmp_path)
    with pytest.raises(ValueError, match="'mtp': Other has no multi-token-prediction module: use another .*Llama"):
        load(drafter, target=Other())  # type: ignore[arg-type]
    config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 1})
    with pytest.raises(ValueError, match="'mtp' needs 'model'"):
        build_drafter(config, DraftBuild(tiny_model("llama"), torch.float64, CPU, 64))


def test_mtp_whose_tensors_are_not_there(tmp_path: Path) -> None:
    drafter = make_drafter("mtp", "llama", tmp_path)
    with pytest.raises(ValueError, match="'mtp': the files of .* cannot be used as this drafter: "
                                         ".*missing: .* and [0-9]+ more"):
        load(with_tensors(drafter, drop=tuple(load_file(drafter.folder / "model.safetensors"))))


# What is warned of


def test_more_drafts_than_the_head_was_made_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drafter = make_drafter("eagle3_speculators", "llama", tmp_path)
    with caplog.at_level(logging.WARNING, "outrider"):
        load(drafter, k=7)
        assert not caplog.records
        load(drafter, k=8)
        assert "num_speculative_tokens is 8 and the eagle3 head was made for 7" in caplog.text
        load(make_drafter("mtp", "llama", tmp_path / "mtp"), k=2)
        assert "the mtp head was made for 1" in caplog.text


def test_fewer_positions_than_max_model_len(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        load(changed(make_drafter("eagle3", "llama", tmp_path), max_position_embeddings=32))
        assert "was made for 32 positions and max_model_len is 64" in caplog.text


# What is shared


def test_embedding_and_output_are_the_targets_where_absent_or_equal(tmp_path: Path) -> None:
    target = tiny_model("llama")
    shared = head_of(load(make_drafter("eagle_speculators", "llama", tmp_path / "a")))
    assert shared.embedding is target.embed_tokens and shared.own_output is None
    copies = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.lm_head.format.dense()}
    drafter = with_tensors(make_drafter("eagle_speculators", "llama", tmp_path / "b"),
                           **{name: weight.clone() for name, weight in copies.items()})
    equal = head_of(load(drafter))
    assert equal.embedding is target.embed_tokens and equal.own_output is None
    assert equal.weight_bytes() == shared.weight_bytes()
    own = head_of(load(make_drafter("eagle", "llama", tmp_path / "c")))
    assert own.embedding is not target.embed_tokens
    assert own.weight_bytes() > 8 * own.embedding.weight.numel()


def test_taps_vocabulary_and_layers(tmp_path: Path) -> None:
    drafter = make_drafter("eagle3", "llama", tmp_path)
    made = load(drafter)
    assert made.aux_layers == (0, 2, 1) and made.network.num_outputs == DRAFT_VOCAB
    assert made.network.target_ids is not None
    assert made.network.target_ids.tolist() == (torch.arange(DRAFT_VOCAB) + drafter.tensors["d2t"]).tolist()
    assert [layer.index for layer in made.attention_layers] == [2], "numbered after the target's"
    assert made.network.hidden_size == HIDDEN


def test_layers_of_several_drafters_have_numbers_of_their_own(tmp_path: Path) -> None:
    mtp = make_drafter("mtp", "llama", tmp_path)
    config = SpeculativeConfig.parse(mtp.speculative(2) | {"method": ["mtp", "mtp"]})
    made = build_drafter(config, DraftBuild(tiny_model("llama"), torch.float64, CPU, 64))
    assert made is not None and [layer.index for layer in made.attention_layers] == [2, 3]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_dummy_weights_need_the_config_alone(kind: str, tmp_path: Path) -> None:
    drafter = make_drafter(kind, "llama", tmp_path)
    (drafter.folder / "model.safetensors").unlink()
    with Rig(tiny_model("llama"), speculative_config=drafter.speculative(2), load_format="dummy") as rig:
        assert len(tokens_of(rig.run([Request(prompt_of(1, 5), greedy(3))]))[0][0]) == 3


def test_mtp_from_the_targets_own_files(tmp_path: Path) -> None:
    folder = make_drafter("mtp", "llama", tmp_path).folder
    config = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 1})
    build = DraftBuild(tiny_model("llama"), torch.float64, CPU, 64, target_source=str(folder))
    assert build_drafter(config, build) is not None
