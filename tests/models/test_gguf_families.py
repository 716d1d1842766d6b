"""GGUF files of every family that is read, against transformers on the checkpoint that the file was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.formats.gguf import GgufLinear
from outrider.formats.gguf_experts import GgufExperts
from outrider.kernels import cpu as native
from outrider.layers import LatentAttention, Linear
from outrider.layers.base import find_modules
from outrider.layers.fuse import use_activation_bits
from outrider.layers.moe import Experts
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import gguf_source
from tests.models.gguf_files import FAMILIES, write
from tests.models.oracle import all_logits, hf_model, load, tokens_of
from tests.models.paged import PagedModel, Piece


def logits_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    if find_modules([model], LatentAttention):
        return PagedModel(model).logits([Piece(0, tokens.tolist())])[0]
    return all_logits(model, tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_the_family_gives_the_logits_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)
    folder = FAMILIES[name].checkpoint(tmp_path / "hf")
    source, tokens = gguf_source(write(tmp_path / "m.gguf", folder, FAMILIES[name])), tokens_of(1, 40)
    with torch.no_grad():
        expected = hf_model(folder)(tokens[None], use_cache=False).logits[0]
    kept, expanded = (load_model(source, dtype=torch.float32, device="cpu", keep_quantized=keep)
                      for keep in (True, False))
    use_activation_bits(kept, 32)
    for ours in (kept, expanded):
        with torch.no_grad():
            torch.testing.assert_close(logits_of(ours, tokens), expected, rtol=1e-3, atol=2e-3)
        assert all(isinstance(experts.format, GgufExperts) == (ours is kept) for experts in
                   find_modules([ours], Experts))
    # Adapters have the order of the checkpoint, although some scores are the same in every order.
    plain = load(folder)
    weights = [[linear.format.dense() for linear in find_modules([model], Linear)] for model in (expanded, plain)]
    for one, other in zip(*weights, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    pairs = [(ours.format, plain.format.plain_weight) for ours, plain in zip(
        find_modules([kept], Linear), find_modules([expanded], Linear), strict=True)
        if isinstance(ours.format, GgufLinear)]
    assert len(pairs) > 2
    assert all(torch.equal(ours.dense(), plain) for ours, plain in pairs if plain is not None)
