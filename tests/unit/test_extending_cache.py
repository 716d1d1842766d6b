"""The worked examples of docs/extending.md that concern the cache. Nothing here touches a file of the package."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cache.kinds import ElementType, Part
from outrider.config import EngineConfig
from outrider.mixers.paged import codecs
from outrider.mixers.paged.codecs import CacheCodec, DecodedTokens, register_cache_type
from outrider.mixers.paged.registry import make_backend
from outrider.models.base import Model
from outrider.runner.check import check_target
from tests.drafters.checkpoints import make_drafter
from tests.drafters.latent_rig import latent_of
from tests.drafters.rig import DraftRig
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import (
    CONFIGS,
    CPU,
    Ask,
    Rig,
    greedy,
    prompt_of,
    random_model,
    save_folder,
    tiny_model,
    tokens_of,
)

TYPE, DRAFTS = "int8_heads", 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "auto": False, "prompt_lookup_min": 1}
STEM = prompt_of(21, 20)
ASKS = [Ask([*STEM, *STEM, *prompt_of(22, 5)], greedy(12)), Ask(prompt_of(23, 33), greedy(10)),
        Ask([7, 8, 9] * 9, greedy(14))]


# A cache type


class Int8Heads(CacheCodec):
    """int8 numbers and one scale for each token and head. int8 has no NaN, so a bad token has scales of NaN.

    The numbers are few, so that a query that read its own keys unrounded would choose other tokens."""

    most = 3
    scales = Part("k_scale", (), 4, "float32"), Part("v_scale", (), 4, "float32")
    cache_type = ElementType(TYPE, "int8", 1, scales)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        is_bad = ~(k.isfinite() & v.isfinite()).all(dim=(1, 2))
        encoded: dict[str, torch.Tensor] = {}
        for name, values in (("k", k), ("v", v)):
            values = values.masked_fill(is_bad[:, None, None], 0)
            scale = values.abs().amax(dim=-1).float().clamp_min(1e-30) / self.most
            encoded[name] = (values / scale[..., None]).round().to(torch.int8)
            encoded[f"{name}_scale"] = scale.masked_fill(is_bad[:, None], torch.nan)
        return encoded

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> DecodedTokens:
        k, v = (parts[name].to(dtype) * parts[f"{name}_scale"].to(dtype)[..., None] for name in ("k", "v"))
        return DecodedTokens(k, v, ~parts["k_scale"][..., 0].isnan())


@pytest.fixture(autouse=True)
def int8_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    register_cache_type(Int8Heads())
    yield
    codecs.SETTINGS.remove(TYPE)


def tokens(model: Model, asks: list[Ask] = ASKS, **settings: Any) -> tuple[list[list[list[int]]], Rig]:
    with Rig(model, **{"kv_cache_dtype": TYPE} | settings) as rig:
        return tokens_of(rig.run(asks)), rig


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_type_gives_the_same_tokens_however_they_are_computed(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    whole, rig = tokens(model, overlap=False, enable_prefix_caching=False)
    assert whole != tokens(model, kv_cache_dtype="auto")[0], "the cache rounds"
    chunked, _ = tokens(model, max_num_batched_tokens=24)
    assert chunked == whole
    eagle = make_drafter("eagle", family, tmp_path).speculative(DRAFTS)
    for speculative in (NGRAM, eagle):
        drafted, rig = tokens(model, speculative_config=speculative)
        assert drafted == whole and rig.engine.stats.num_draft_tokens > 0
    assert {str(part.dtype) for part in rig.step.pool.layer(0).values()} == {"torch.int8", "torch.float32"}
    right = {tuple(ask.prompt): answer for ask, (answer,) in zip(ASKS, whole, strict=True)}
    wrong = ScriptedDrafter(DRAFTS, lambda prompt, _: [5 if i % 4 == 2 else t for i, t in enumerate(right[prompt])])
    drafted, rig = tokens(model, drafter=wrong)
    assert drafted == whole and rig.engine.stats.num_accepted_tokens > 0


def test_prefix_hits_read_what_the_type_has_stored() -> None:
    model = tiny_model("llama")
    expected, _ = tokens(model, enable_prefix_caching=False, speculative_config=NGRAM)
    with Rig(model, kv_cache_dtype=TYPE, speculative_config=NGRAM) as rig:
        assert tokens_of(rig.run(ASKS)) == expected
        again = rig.run(ASKS)
        assert tokens_of(again) == expected and rig.engine.stats.num_draft_tokens > 0
        assert [output.metrics.num_cached_tokens for output in again] == [32, 32, 16]


def test_a_page_has_the_bytes_of_its_type() -> None:
    sizes = {name: tokens(tiny_model("llama"), kv_cache_dtype=name)[1].step.pool.layout.page_bytes
             for name in ("auto", "float32", TYPE)}
    layers, page, heads, dim = 2, 16, 2, 8
    assert sizes == {"auto": layers * page * 2 * heads * dim * 8, "float32": layers * page * 2 * heads * dim * 4,
                     TYPE: layers * page * 2 * heads * (dim + 4)}


@pytest.mark.parametrize("name", [TYPE, "float32", "float16"])
def test_a_bad_token_fails_its_request_alone(name: str) -> None:
    """The prompt's pages with the bad token are published, and serve another prompt as far as it."""
    cursed, bad_at = 7, 37
    model: Any = random_model(CONFIGS["llama"], torch.float64, seed=3)
    model.embed_tokens.weight[cursed] = torch.nan
    stem = [token for token in prompt_of(1, 60) if token != cursed]
    healthy = Ask([*stem[:bad_at], 9, 10], greedy(8, logit_bias={cursed: -100.0}))
    expected, _ = tokens(model, [healthy], enable_prefix_caching=False, kv_cache_dtype=name)
    with Rig(model, kv_cache_dtype=name, max_num_batched_tokens=48, speculative_config=NGRAM) as rig:
        beside = Ask(stem[40:49], greedy(8, logit_bias={cursed: -100.0}))
        failed, good = rig.run([Ask([*stem[:bad_at], cursed, *prompt_of(2, 12)], greedy(4)), beside])
        assert "not finite" in (failed.outputs[0].error or "")
        assert tokens_of([good]) == tokens(model, [beside], kv_cache_dtype=name)[0]
        (output,) = rig.run([healthy])
        assert tokens_of([output]) == expected and output.metrics.num_cached_tokens == 32


def test_a_number_beyond_the_range_of_a_float_type_makes_a_bad_token() -> None:
    k = torch.tensor([1.0, 7e4, -2.0]).view(3, 1, 1).expand(3, 2, 4)
    codec = codecs.codec_of(codecs.find_cache_type("float16", torch.float32))
    decoded = codec.decode(codec.encode(k, k), torch.float32)
    assert decoded.is_finite.tolist() == [True, False, True] and decoded.k.dtype == torch.float32


# What is refused


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_dtype must be one of auto, float32, .*, {TYPE}, got 'fp9'"):
        EngineConfig("m", kv_cache_dtype="fp9")
    del codecs._CODECS[TYPE]  # as in a worker's process that did not register it
    with pytest.raises(ValueError, match=f"kv_cache_dtype='{TYPE}' is not registered in the worker's process"):
        Rig(tiny_model("llama"), kv_cache_dtype=TYPE)


@pytest.mark.parametrize("backend", ["native", "triton", "flex"])
def test_backends_with_kernels_refuse_a_type_that_they_cannot_read(backend: str) -> None:
    cache_type = Int8Heads.cache_type
    with pytest.raises(ValueError, match=f"with kv_cache_dtype='{TYPE}' .{backend}: it cannot read keys and values"):
        make_backend(backend, CPU, torch.float32, cache_type=cache_type)
    assert make_backend("auto", CPU, torch.float32, cache_type=cache_type).name == "torch"


def test_the_models_own_dtype_by_its_name_is_no_other_type(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", torch.float32)
    with Rig(model, kv_cache_dtype="float32") as rig:
        assert rig.step.backend.name == make_backend("auto", CPU, torch.float32).name and not caplog.messages
    with Rig(model, kv_cache_dtype="float16"):
        assert "kv_cache_dtype='float16' costs time: no kernel serves it" in caplog.text


def test_exact_mode_refuses_a_type_without_an_exact_form_by_name() -> None:
    model = tiny_model("llama", torch.float32)
    with pytest.raises(ValueError, match=f"exact=True: kv_cache_dtype='{TYPE}' has no exact form"):
        Rig(model, kv_cache_dtype=TYPE, exact=True)
    with pytest.raises(ValueError, match="exact=True: .* with kv_cache_dtype='bfloat16'"):
        make_backend("auto", CPU, torch.float32, exact=True,
                     cache_type=codecs.find_cache_type("bfloat16", torch.float32))


def test_layers_without_keys_and_values_refuse_a_type() -> None:
    model = latent_of("deepseek_v32")
    config = EngineConfig("m", kv_cache_dtype=TYPE, device="cpu", max_model_len=64)
    source: Any = type("Source", (), {"kept_bytes": staticmethod(dict), "config_file": "config.json"})
    with pytest.raises(ValueError, match=f"kv_cache_dtype='{TYPE}' is for layers that keep keys and values"):
        check_target(config, source, model, CPU)


# A page that is moved


LONG = Ask(prompt_of(31, 73), greedy(4))
LATER = Ask([*LONG.prompt[:70], *prompt_of(32, 5)], greedy(12))
HIT = 64
Key = tuple[int, bytes]  # group and content of a page
Outcome = tuple[list[Any], list[tuple[int, ...]], int]  # tokens, drafts of every step, accepted drafts


def published(rig: Rig) -> dict[Key, int]:
    return dict(rig.scheduler.cache.pool._page_of)


def copy_published(rig: Rig) -> dict[Key, torch.Tensor]:
    return {key: rig.step.pool.copy_page(page) for key, page in published(rig).items()}


def overwrite(rig: Rig) -> None:
    rig.step.pool.poison(torch.tensor(list(published(rig).values())))


def restore(rig: Rig, copies: Mapping[Key, torch.Tensor]) -> None:
    for key, page in published(rig).items():
        if key in copies:
            rig.step.pool.restore_page(page, copies[key])


def later(rig: DraftRig) -> Outcome:
    """What a prompt makes of the pages that another one has published."""
    rig.proposals.clear()
    before = rig.engine.stats.num_accepted_tokens
    (output,) = rig.run([LATER])
    assert output.metrics.num_cached_tokens == HIT
    return tokens_of([output]), [each.drafts for each in rig.proposals], rig.engine.stats.num_accepted_tokens - before


def drafting(kind: str, folder: Path) -> dict[str, Any]:
    """A head with pages of its own, one whose layer shares the target's, or a draft model that is the target."""
    if kind == "draft_model":
        save_folder(folder, CONFIGS["llama"], seed=zlib.crc32(b"llama"))
        return {"method": kind, "model": str(folder), "num_speculative_tokens": DRAFTS, "auto": False}
    return make_drafter(kind, "llama", folder).speculative(DRAFTS)


@pytest.mark.parametrize(("kind", "kv_cache_dtype"), [("eagle", "auto"), ("mtp", TYPE), ("draft_model", "auto")])
def test_one_copy_moves_a_page_with_its_drafters_part(kind: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    settings: Any = {"speculative_config": drafting(kind, tmp_path), "kv_cache_dtype": kv_cache_dtype}
    with DraftRig(tiny_model("llama"), **settings) as rig:
        rig.run([LONG])
        numbers, copies = published(rig), copy_published(rig)
        assert {copy.nbytes for copy in copies.values()} == {rig.step.pool.layout.page_bytes}
        expected = later(rig)
        assert (expected[2] > 0) == (kind == "draft_model") and expected[1]
    with DraftRig(tiny_model("llama"), **settings) as rig:  # to the host and back
        rig.run([LONG])
        own = copy_published(rig)
        overwrite(rig)
        restore(rig, own)
        assert later(rig) == expected
    with DraftRig(tiny_model("llama"), **settings) as rig:  # to pages of other numbers, in another engine
        rig.run([Ask(prompt_of(33, 40), greedy(4)), LONG])
        assert all(published(rig)[key] != page for key, page in numbers.items())
        overwrite(rig)
        restore(rig, copies)
        assert later(rig) == expected


def test_without_their_drafters_part_pages_give_other_drafts(tmp_path: Path) -> None:
    with DraftRig(tiny_model("llama"), speculative_config=drafting("mtp", tmp_path)) as rig:
        rig.run([LONG])
        copies = copy_published(rig)
        expected = later(rig)
        restore(rig, copies)
        layout = rig.step.pool.layout
        for part in rig.step.pool.page_parts(layout.page_parts[0].layer).values():
            part.zero_()
        tokens, drafts, _ = later(rig)
        assert tokens == expected[0] and drafts != expected[1]
