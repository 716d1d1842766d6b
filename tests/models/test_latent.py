"""Latent and sparse attention: DeepSeek-V3, V3.2, GLM-MoE-DSA and HY-V4 against transformers, over real pages.

The truth is transformers' forward without a cache. Chosen positions are compared with a naive choice in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cache.groups import plan_groups
from outrider.config import EngineConfig
from outrider.kernels import latent, latent_inputs, ops
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts
from outrider.mixers.latent.latent_mixer import (
    BoundLatentLayer,
    ChosenPositions,
    GroupPlan,
    IndexedPositions,
    LatentLayer,
    SharedPositions,
)
from outrider.models.config import ConfigError
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from outrider.models.sources.safetensors_files import safetensors_tensors
from outrider.runner.target import with_index_keys
from tests.models.oracle import LATENT_FAMILIES, hf_config, hf_model, load, make_folder, tokens_of
from tests.models.paged import PagedModel, Piece

Folders = Callable[[str], Path]
BENCH = Path(__file__).parents[2] / "bench" / "configs" / "dsv32-8b-a2b"
ARCHITECTURE = {family: f"{name}ForCausalLM" for family, (name, _) in LATENT_FAMILIES.items()}


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    """Contexts below and above top-k, whole and in chunks, alone and beside others, padded, with dead tokens."""
    reference, model = hf_model(folder_of(family)), load(folder_of(family))
    tokens, other = tokens_of(1, 60), tokens_of(2, 25)
    wanted = reference(tokens[None], use_cache=False).logits[0]
    beside = reference(other[None], use_cache=False).logits[0]
    whole = PagedModel(model).logits([Piece(0, tokens.tolist())])[0]
    assert (whole - wanted).abs().max() < 1e-4
    paged, chunks, others = PagedModel(model), [], []
    for index, (first, last) in enumerate(((0, 5), (5, 6), (6, 30), (30, 33), (33, 60))):
        pieces = [Piece(5, other[5 * index : 5 * index + 5].tolist()),
                  Piece(3, tokens[first:last].tolist(), num_dead=index)]
        found = paged.logits(pieces, requests=4, tokens=50)
        others.append(found[0])
        chunks.append(found[1])
    assert (torch.cat(chunks) - wanted).abs().max() < 1e-4
    assert (torch.cat(others) - beside).abs().max() < 1e-4


def test_a_model_without_shared_experts_equals_transformers(tmp_path: Path) -> None:
    make_folder("deepseek_v32", tmp_path, n_shared_experts=0, first_k_dense_replace=0)
    tokens = tokens_of(1, 30)
    wanted = hf_model(tmp_path)(tokens[None], use_cache=False).logits[0]
    assert (PagedModel(load(tmp_path)).logits([Piece(0, tokens.tolist())])[0] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_every_value_of_a_checkpoint_is_loaded(folder_of: Folders, family: str) -> None:
    model, saved = load(folder_of(family)), dict(safetensors_tensors(folder_of(family)))
    slots = {name: slot.target for name, slot in model.weights().items()}
    found = {}
    for name, tensor in saved.items():
        name = model.slot_name(name)
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":  # of all experts
            gate, up = tensor.chunk(2, dim=1)
            parts = {"gate_proj": gate, "up_proj": up}
        else:
            parts = {last: tensor} if last == "down_proj" else {}
        found |= {f"{prefix}.{i}.{part}.weight": one for part, each in parts.items() for i, one in enumerate(each)}
        found |= {} if parts else {name: tensor}
    assert found.keys() == slots.keys()
    for name, tensor in found.items():
        assert torch.equal(slots[name], tensor), name


def test_greedy_text_equals_transformers_without_a_cache(folder_of: Folders) -> None:
    reference, paged = hf_model(folder_of("deepseek_v32")), PagedModel(load(folder_of("deepseek_v32")))
    text = tokens_of(3, 10).tolist()
    known = list(text)
    for _ in range(20):
        text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    new, mine = known, list(known)
    while len(mine) < 30:
        new = [int(paged.logits([Piece(0, new)])[0][-1].argmax())]
        mine += new
    assert mine == text and len(set(text[10:])) > 4


# The indexer's choice


def naive_choice(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, first: int, stop: int,
                 top_k: int) -> list[int]:
    """One token: the best positions of a plain list, lower ones first among equals."""
    scores = [(sum(float(w) * max(0.0, float(h @ keys[s])) for w, h in zip(weights, q, strict=True)), s)
              for s in range(first, stop)]
    best = sorted(position for _, position in sorted(scores, key=lambda pair: (-pair[0], pair[1]))[:top_k])
    return best + [-1] * (top_k - len(best))


def draw(num_requests: int = 3, num_tokens: int = 20, *, integers: bool = False) -> dict[str, Any]:
    """A pool of 4-token pages with NaN wherever no token's context lies. Integers make equal scores."""
    generator = torch.Generator().manual_seed(num_tokens + integers)

    def values(*shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=generator).double()
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    table = (1 + torch.randperm(num_requests * 8, generator=generator)).view(num_requests, 8)
    keys = torch.full((1 + num_requests * 8, 4, 6), torch.nan, dtype=torch.float64)
    request_of = torch.arange(num_tokens) % num_requests
    stop = torch.randint(0, 33, (num_tokens,), generator=generator)
    first = torch.minimum(torch.randint(0, 9, (num_tokens,), generator=generator), stop)
    by_request = values(num_requests, 32, 6)
    for request in range(num_requests):
        longest = int(stop[request_of == request].max())
        cells = keys[table[request]].flatten(0, 1)
        cells[:longest] = by_request[request, :longest]
        keys[table[request]] = cells.view(8, 4, 6)
    return {"q": values(num_tokens, 5, 6), "weights": values(num_tokens, 5), "keys": keys, "by_request": by_request,
            "contexts": TokenContexts(table, request_of, first, stop)}


@pytest.mark.parametrize("integers", [False, True], ids=["numbers", "ties"])
@pytest.mark.parametrize("budget", [latent.MAX_ELEMENTS, 300, 1])
def test_the_choice_is_the_naive_one(monkeypatch: pytest.MonkeyPatch, budget: int, integers: bool) -> None:
    """In one go and in chunks of token rows and pages, down to one of each."""
    monkeypatch.setattr(latent, "MAX_ELEMENTS", budget)
    inputs = draw(integers=integers)
    contexts = inputs["contexts"]
    chosen = torch.full((20, 7), -99)
    ops.choose_positions(inputs["q"], inputs["weights"], inputs["keys"], contexts, chosen)
    for row in range(20):
        keys = inputs["by_request"][contexts.request_of[row]]
        span = int(contexts.first[row]), int(contexts.stop[row])
        assert chosen[row].tolist() == naive_choice(inputs["q"][row], inputs["weights"][row], keys, *span, 7)


def test_scores_of_minus_infinity_are_better_than_what_is_not_visible() -> None:
    contexts = TokenContexts(torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([2, 4]), torch.tensor([7, 6]))
    scores = torch.full((2, 8), -torch.inf)
    scores[0, 5] = 1.0
    assert latent.best_positions(scores, contexts, 3).tolist() == [[2, 3, 5], [4, 5, NOT_CHOSEN]]


def test_a_short_context_is_attended_whole() -> None:
    """All of at most top-k positions chosen is the same as no choice."""
    inputs = draw()
    contexts = inputs["contexts"]
    short = contexts._replace(stop=torch.minimum(contexts.stop, contexts.first + 7))
    chosen = torch.empty(20, 7, dtype=torch.int64)
    ops.choose_positions(inputs["q"], inputs["weights"], inputs["keys"], short, chosen)
    q = torch.randn(20, 3, 6, dtype=torch.float64)
    sparse = ops.latent_attention(q, inputs["keys"], short, chosen, 0.3, 4)
    torch.testing.assert_close(sparse, ops.dense_latent_attention(q, inputs["keys"], short, 32, 0.3, 4))
    assert not sparse.isnan().any() and (sparse[short.stop <= short.first] == 0).all()


def test_attention_over_chosen_positions_means_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw()
    contexts: TokenContexts = inputs["contexts"]
    q = torch.randn(20, 3, 6, dtype=torch.float64)
    positions = torch.full((20, 5), -1)
    for row in range(20):
        span = torch.arange(int(contexts.first[row]), int(contexts.stop[row]))
        positions[row, : min(5, len(span))] = span[:: max(1, len(span) // 5)][:5]
    monkeypatch.setattr(latent, "MAX_ELEMENTS", 100)
    out = ops.latent_attention(q, inputs["keys"], contexts, positions, 0.3, 4)
    for row in range(20):
        entries = inputs["by_request"][contexts.request_of[row]][[p for p in positions[row].tolist() if p >= 0]]
        shares = (q[row] @ entries.T * 0.3).softmax(-1) if len(entries) else torch.zeros(3, 0, dtype=torch.float64)
        torch.testing.assert_close(out[row], shares @ entries[:, :4])


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ not in ("view", "slice", "select", "index_put_", "copy_"):
            for tensor in made if isinstance(made, (tuple, list)) else [made]:
                self.elements = max(self.elements, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return made


def test_131072_positions_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores, gathered keys and gathered entries exist for a chunk at a time."""
    monkeypatch.setattr(latent, "MAX_ELEMENTS", 1 << 18)
    generator = torch.Generator().manual_seed(0)
    q, weights = torch.randn(5, 4, 6, generator=generator), torch.randn(5, 4, generator=generator)
    keys = torch.randn(1 + 8192, 16, 6, generator=generator)
    pages = (1 + torch.randperm(8192, generator=generator))[None]
    contexts = TokenContexts(pages, torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64),
                             torch.arange(131072 - 5, 131072))
    chosen = torch.empty(5, 2048, dtype=torch.int64)
    with LargestTensor() as largest:
        ops.choose_positions(q, weights, keys, contexts, chosen)
        ops.latent_attention(q, keys, contexts, chosen, 0.3, 4)
    assert 1 << 17 <= largest.elements <= 1 << 18
    scores = (weights[4][:, None] * (q[4] @ keys[pages[0]].flatten(0, 1)[:131071].T).relu()).sum(0)
    assert set(chosen[4].tolist()) == set(scores.topk(2048).indices.tolist())


def test_token_rows_that_disagree_are_refused() -> None:
    inputs = draw()
    with pytest.raises(ValueError, match="queries 20, weights 19"):
        ops.choose_positions(inputs["q"], inputs["weights"][:19], inputs["keys"], inputs["contexts"],
                             torch.empty(20, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="cannot choose 33 of 32 positions"):
        ops.choose_positions(inputs["q"], inputs["weights"], inputs["keys"], inputs["contexts"],
                             torch.empty(20, 33, dtype=torch.int64))


def test_a_layer_that_shares_a_choice_refuses_to_attend_before_one_is_made() -> None:
    one = torch.ones(1, dtype=torch.int64)
    plan = GroupPlan(one, TokenContexts(one[None].int(), 0 * one, 0 * one, one), num_positions=4)
    shared = LatentLayer(index=3, num_heads=2, latent_dim=4, rope_dim=2, scale=1.0, attends_to=SharedPositions())
    bound = BoundLatentLayer(shared, {"latent": torch.zeros(2, 4, 6)}, plan, ChosenPositions())
    with pytest.raises(AssertionError, match="layer 3 attends before an indexer has chosen"):
        bound(torch.zeros(1, 2, 6))


# Configs and memory


def test_layers_share_the_choice_as_the_config_says() -> None:
    base = hf_config("glm_moe_dsa").to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": None}

    def kinds(**values: Any) -> str:
        model = build_model(base | values, dtype=torch.float32, device="cpu")
        return "".join("S" if isinstance(layer.attends_to, SharedPositions) else "F"
                       for layer in model.attention_layers)

    assert kinds() == "FFFF"
    assert kinds(index_topk_freq=4, index_skip_topk_offset=2) == "FFSS"
    assert kinds(index_topk_pattern="FSSF") == "FSSF"
    assert kinds(index_topk_pattern="FSSF", indexer_types=["full", "full", "shared", "full"]) == "FFSF"
    for wrong in ("SFFF", "FF", "FFXF"):
        with pytest.raises(ConfigError, match="index_topk_pattern=.* 4 layers, full or shared, and the first must"):
            kinds(index_topk_pattern=wrong)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("scoring_func", "softmax", "supported: 'sigmoid'"),
        ("moe_layer_freq", 2, "supported: 1"),
        ("kv_lora_rank", None, "kv_lora_rank is missing"),
        ("q_lora_rank", None, "q_lora_rank is missing"),
        ("index_head_dim", 8, "it must be at least qk_rope_head_dim .16"),
        ("mlp_layer_types", ["dense"], "each of the 4 layers"),
        ("n_group", 8, "groups are ranked by their two best experts"),
    ],
)
def test_unsupported_values_are_refused(key: str, value: Any, says: str) -> None:
    config = hf_config("deepseek_v32").to_dict() | {"architectures": ["DeepseekV32ForCausalLM"], key: value}
    with pytest.raises(ConfigError, match=says):
        build_model(config, dtype=torch.float32, device="cpu")


def test_the_benchmarks_config_has_the_layers_it_should() -> None:
    model = build_model(read_config(BENCH), dtype=torch.bfloat16, device="meta", max_len=4096)
    slots = model.weights()
    shapes = {name: slots[f"model.layers.3.{name}.weight"].shape for name in (
        "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
        "self_attn.o_proj", "self_attn.indexer.wq_b", "self_attn.indexer.wk", "self_attn.indexer.weights_proj",
        "mlp.experts.63.down_proj", "mlp.shared_experts.up_proj",
    )}
    assert list(shapes.values()) == [(1024, 2048), (6144, 1024), (576, 2048), (8192, 512), (2048, 4096),
                                     (8192, 1024), (128, 2048), (64, 2048), (2048, 1024), (1024, 2048)]
    assert slots["model.layers.0.mlp.down_proj.weight"].shape == (2048, 8192)
    first = model.attention_layers[0]
    assert first.attends_to == IndexedPositions(64, 128, 2048)
    assert first.scale == pytest.approx(192**-0.5 * (0.1 * torch.tensor(40.0).log().item() + 1) ** 2)
    layout = plan_groups(model.cache_layers(), 64)
    assert layout.page_bytes == 16 * 64 * 2 * (512 + 64 + 128) and layout.padding == 0


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_the_pool_holds_what_capacity_counts(folder_of: Folders, family: str) -> None:
    paged = PagedModel(load(folder_of(family)))
    layout = paged.pool.layout
    held = sum(view[0].numel() * view.element_size() for layer in range(4) for view in paged.pool.layer(layer).values())
    assert held == sum(group.used_bytes for group in layout.groups)
    indexed = sum(layer.attends_to.head_dim for layer in paged.model.attention_layers
                  if isinstance(layer.attends_to, IndexedPositions))
    per_token = {group.page_tokens for group in layout.groups}
    assert len(per_token) > 1 or held == per_token.pop() * 4 * (4 * (32 + 16) + indexed)
    assert paged.pool.num_bytes == len(paged.pool.data) * layout.page_bytes


# Index keys in fp8


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_fp8_index_keys_take_a_byte_a_number_and_a_scale(folder_of: Folders, family: str) -> None:
    config = read_config(folder_of(family)) | {"index_key_dtype": "fp8"}
    paged = PagedModel(build_model(config, dtype=torch.float32, device="cpu"))
    layout, layers = paged.pool.layout, paged.model.attention_layers
    for layer in layers:
        parts = paged.pool.layer(layer.index)
        held = sum(view[0].numel() * view.element_size() for view in parts.values())
        group = layout.groups_of(layer.index)[0]
        scaled = 32 + 4 if isinstance(layer.attends_to, IndexedPositions) else 0
        assert held == group.page_tokens * (4 * (32 + 16) + scaled) == group.page_tokens * group.spec.token_bytes
        assert ("index_scale" in parts) == bool(scaled)
    held = sum(view[0].numel() * view.element_size() for layer in layers
               for view in paged.pool.layer(layer.index).values())
    assert held == sum(group.used_bytes for group in layout.groups)
    assert paged.pool.num_bytes == len(paged.pool.data) * layout.page_bytes


def test_fp8_index_keys_are_the_models_own_rounded(folder_of: Folders) -> None:
    """The choice differs here and there; everything else is the same, whole, in chunks and beside others."""
    model = load(folder_of("deepseek_v32"))
    rounded = build_model(model.config.values | {"index_key_dtype": "fp8"}, dtype=torch.float32, device="cpu")
    load_weights(rounded, safetensors_tensors(folder_of("deepseek_v32")))
    tokens = tokens_of(1, 60).tolist()
    whole = PagedModel(rounded).logits([Piece(0, tokens)])[0]
    paged = PagedModel(rounded)
    chunks = [paged.logits([Piece(5, [3, 4]), Piece(3, tokens[first:last], num_dead=2)], requests=4, tokens=50)[1]
              for first, last in ((0, 5), (5, 6), (6, 30), (30, 33), (33, 60))]
    assert (torch.cat(chunks) - whole).abs().max() < 1e-4
    for layer in range(4):
        own = PagedModel(rounded)
        own.logits([Piece(0, tokens)])
        keys, scales = (own.pool.layer(layer)[name] for name in ("index_key", "index_scale"))
        written = ~scales[..., 0].isnan()  # pages of nobody are poisoned
        assert written.sum() >= 60 and (scales[written].log2() % 1 == 0).all(), "powers of two"
        assert keys[written].float().abs().amax(dim=1).ge(224).all(), "the least that fits"
    exact = PagedModel(model).logits([Piece(0, tokens)])[0]
    assert torch.equal(whole[:12], exact[:12]), "contexts of at most top-k positions have no choice"
    assert not torch.equal(whole, exact), "rounding moves a choice of random keys"


def test_fp8_numbers_are_within_their_rounding() -> None:
    keys = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-10, 30, 50)[:, None]
    keys[7], keys[8, 3], keys[9, 4] = 0.0, torch.nan, torch.inf
    numbers, scales = latent_inputs.to_fp8(keys)
    back = numbers.float() * scales
    sound = torch.tensor([row not in (8, 9) for row in range(50)])
    error = (back - keys)[sound].abs().amax(dim=1)
    assert (error <= keys[sound].abs().amax(dim=1) / 16).all()
    assert back[8, 3].isnan() and back[9].isnan().all(), "numbers that are not finite stay so"


@pytest.mark.parametrize(("values", "says"), [({}, "has no indexer"), ({"index_topk": 8}, None)])
def test_fp8_index_keys_are_asked_of_the_engine(values: dict[str, Any], says: str | None) -> None:
    config = EngineConfig("some-model", index_key_dtype="fp8")
    if says is None:
        assert with_index_keys(config, values, torch.device("cpu")) == values | {"index_key_dtype": "fp8"}
    else:
        with pytest.raises(ValueError, match=f"index_key_dtype='fp8': some-model {says}"):
            with_index_keys(config, values, torch.device("cpu"))


def test_a_card_without_fp8_refuses_fp8_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    with pytest.raises(ValueError, match="index_key_dtype='fp8': an old card cannot convert numbers to fp8"):
        with_index_keys(EngineConfig("m", index_key_dtype="fp8"), {"index_topk": 8}, torch.device("cuda"))


# Block-scaled checkpoints


def test_fp8_weights_with_block_scales_load_as_numbers(tmp_path: Path) -> None:
    """Matrices of more than one block, the last ones cut short."""
    make_folder("deepseek_v32", tmp_path, hidden_size=160)
    tensors, numbers = load_file(tmp_path / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if "_proj" not in name or name.endswith("weights_proj.weight"):
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        scales = 0.01 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
        wide = scales.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        tensors[name] = (tensor / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        numbers[name] = tensors[name].float() * wide
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    slots = load(tmp_path).weights()
    assert len(numbers) > 60
    for name, tensor in numbers.items():
        assert torch.equal(slots[name].target, tensor), name
    other = config | {"quantization_config": quantization | {"weight_block_size": [64, 64]}}
    with pytest.raises(ConfigError, match=r"quantization_config=.* weight_block_size=\[64, 64\] is not supported"):
        build_model(other, dtype=torch.float32, device="cpu")
