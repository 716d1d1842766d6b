"""Experts and routers in Triton: every method and activation against the plain twin, and pairs that do not meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.kernels import moe as reference
from outrider.kernels.activations import limited_silu
from outrider.kernels.moe import RouteRule

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.gpu.experts import moe, router
from outrider.kernels.gpu.experts import shared as shared_expert
from outrider.kernels.gpu.launch.triton_kernel import collecting

SMALL = moe.TileConfig(16, 32, 32, 4, 2)
ACTIVATIONS = ["silu", "gelu_pytorch_tanh", "relu2", limited_silu(0.3)]


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Rows are packed, and further apart than they are long."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape[:-1], shape[-1] + 8, generator=generator) / 4).to(device, dtype)[..., : shape[-1]]


class Case:
    """Inputs of `experts`, with odd sizes: no axis is a multiple of a tile."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, num_tokens: int, *, top_k: int = 2, num_experts: int = 5,
        activation: str = "silu", hidden: int = 34, width: int = 20, seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        self.ids = scores.topk(top_k, dim=-1).indices.to(device)
        self.weights = torch.rand(num_tokens, top_k, generator=generator).to(device)
        self.x = draw(device, dtype, num_tokens, hidden, seed=seed)
        rows = width if activation == "relu2" else 2 * width
        self.gate_up = draw(device, dtype, num_experts, rows, hidden, seed=seed + 1)
        self.down = draw(device, dtype, num_experts, hidden, width, seed=seed + 2)
        self.activation = activation

    def run(self, method: str | None = None, config: moe.TileConfig | None = SMALL) -> torch.Tensor:
        return moe.experts(
            self.x, self.ids, self.weights, self.gate_up, self.down, self.activation, method=method,
            up_config=config, down_config=config,
        )

    def wanted(self) -> torch.Tensor:
        wide = [t.double() for t in (self.x, self.weights, self.gate_up, self.down)]
        return reference.experts(wide[0], self.ids, wide[1], wide[2], wide[3], self.activation)

    def cut(self, tokens: slice) -> Case:
        part = Case.__new__(Case)
        part.__dict__ = self.__dict__ | {n: getattr(self, n)[tokens].contiguous() for n in ("x", "ids", "weights")}
        return part


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    limit = 2e-2 if actual.dtype == torch.bfloat16 else 1e-5
    assert float((actual.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("method", ["rows", "few", "tiles"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_experts(device: torch.device, dtype: torch.dtype, num_tokens: int, activation: str, method: str) -> None:
    case = Case(device, dtype, num_tokens, activation=activation)
    assert_close(case.run(method), case.wanted())


@pytest.mark.parametrize("method", ["rows", "few", "tiles"])
@pytest.mark.parametrize("is_half", [False, True], ids=["given", "half"])
def test_what_is_added_comes_last(device: torch.device, dtype: torch.dtype, method: str, is_half: bool) -> None:
    """It is added to a sum that has been rounded, which float32 cannot show; float16 can, also in the interpreter."""
    dtype = torch.float16 if is_half else dtype
    case = Case(device, dtype, 7)
    added = draw(device, dtype, 7, 34, seed=9)
    found = moe.experts(case.x, case.ids, case.weights, case.gate_up, case.down, case.activation, added, method=method,
                        up_config=SMALL, down_config=SMALL)
    assert torch.equal(found, case.run(method) + added)


@pytest.mark.parametrize("config", [moe.TileConfig(16, 64, 64, 4, 2), moe.TileConfig(32, 16, 16, 4, 2), None])
def test_tile_shapes_do_not_matter(device: torch.device, dtype: torch.dtype, config: moe.TileConfig | None) -> None:
    case = Case(device, dtype, 3, hidden=48, width=16)
    for method in ("few", "tiles"):
        assert_close(case.run(method, config), case.wanted())


@pytest.mark.parametrize("method", ["rows", "few", "tiles"])
def test_an_expert_with_more_pairs_than_a_tile(device: torch.device, dtype: torch.dtype, method: str) -> None:
    case = Case(device, dtype, 19, num_experts=3, hidden=32, width=16)
    case.ids[:, 0], case.ids[:, 1] = 2, 0
    case.ids[15:, 1] = 2  # an expert twice in one token row: nothing needs them to be distinct
    assert_close(case.run(method), case.wanted())


@pytest.mark.parametrize("programs", [1, 8])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_crowded_experts_have_taller_tiles(device: torch.device, dtype: torch.dtype, activation: str, programs: int,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with no pair, one, as many as a tile, one more, as many as a tall tile, and one more than that; and
    programs that go through several tiles, or find none. Bits are those of other tiles, as exact results need."""
    counts = [0, 1, 16, 17, 64, 65, 0, 5]
    case = Case(device, dtype, sum(counts), top_k=1, num_experts=len(counts), activation=activation, hidden=32)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    case.ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[order][:, None].to(device).contiguous()
    plain = case.run("tiles")
    assert_close(plain, case.wanted())
    monkeypatch.setattr(moe, "PROGRAMS_PER_SM", programs)
    monkeypatch.setattr(moe, "num_sms", lambda device: 2)
    assert torch.equal(case.run("tiles", replace(SMALL, tall_m=64, tall_k=32)), plain)


def test_the_grouped_product_of_the_library(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype != torch.bfloat16:
        pytest.skip("the card's grouped product takes bfloat16")
    for activation in ACTIVATIONS:
        case = Case(device, dtype, 5, activation=activation, hidden=64, width=32)
        case.x = case.x.contiguous()
        case.gate_up, case.down = case.gate_up.contiguous(), case.down.contiguous()
        assert_close(case.run("library"), case.wanted())


@pytest.mark.parametrize("method", ["rows", "few", "tiles"])
def test_a_token_row_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype, method: str) -> None:
    case = Case(device, dtype, 5)
    whole = case.run(method)
    assert torch.equal(case.cut(slice(2, 5)).run(method), whole[2:])
    assert torch.equal(case.cut(slice(4, 5)).run(method), whole[4:])
    poisoned = case.cut(slice(0, 5))
    poisoned.x, poisoned.ids = case.x.clone(), case.ids.clone()
    poisoned.x[:2] = float("nan")
    poisoned.ids[:2] = case.ids[4]  # dead token rows that sit in the same tiles
    result = poisoned.run(method)
    assert torch.equal(result[2:], whole[2:]) and result[:2].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_shared_expert_beside_the_chosen_ones(device: torch.device, dtype: torch.dtype, num_tokens: int,
                                                activation: str) -> None:
    case = Case(device, dtype, num_tokens, activation=activation)
    given = (case.x, case.ids, case.weights, case.gate_up, case.down, activation)
    shared = tuple(torch.empty_strided(own.shape, own.stride(), dtype=dtype, device=device).copy_(own * 0.5)
                   for own in (case.gate_up[1], case.down[2]))
    assert shared_expert.takes_shared(*given, *shared)
    assert not shared_expert.takes_shared(*given, shared[0][1:], shared[1])
    found = shared_expert.experts_with_shared(*given, *shared, pdl=False)
    wide = [t.double() for t in (case.x, case.weights, case.gate_up, case.down, *shared)]
    wanted = reference.experts_with_shared(wide[0], case.ids, *wide[1:4], activation, *wide[4:])
    assert_close(found, wanted)
    if num_tokens > 1:
        alone = case.cut(slice(1, 2))
        alike = shared_expert.experts_with_shared(alone.x, alone.ids, alone.weights, *given[3:], *shared, pdl=False)
        assert torch.equal(found[1:2], alike)


def test_both_ways_to_find_pairs_give_the_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(device, dtype, 6)
    assert torch.equal(case.run("few"), case.run("tiles"))


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 4), (30, 9), (1000, 3)])
def test_pairs_are_sorted_by_expert_and_in_order(device: torch.device, num_tokens: int, num_experts: int) -> None:
    ids = torch.randint(0, num_experts, (num_tokens, 3), generator=torch.Generator().manual_seed(0)).to(device)
    ids[ids == 1] = 2  # an expert without pairs
    pairs = moe.sort_pairs(ids, num_experts)
    order = ids.flatten().sort(stable=True).indices
    assert torch.equal(pairs.order.long(), order)
    assert torch.equal(pairs.place.long()[order], torch.arange(ids.numel(), device=device))
    assert torch.equal(pairs.ends.long(), ids.flatten().bincount(minlength=num_experts).cumsum(0))
    x = torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(1)).to(device)[:, 2:37]
    assert torch.equal(moe.spread(x, pairs.place), x[order // 3])


@pytest.mark.parametrize("num_experts", [4, 5], ids=["at a power of two", "between two"])
def test_all_methods_of_a_power_of_two_are_compiled_together(monkeypatch: pytest.MonkeyPatch, num_experts: int) -> None:
    """Start-up meets one number of pairs up to each power of two. Fewer pairs, which the library would not multiply,
    must not have to compile their tiles when they come."""
    monkeypatch.setattr(moe, "_library_serves", lambda gate_up, down: True)
    monkeypatch.setattr(moe, "_library", lambda x, pairs, *_: x.new_zeros(pairs.place.numel(), x.shape[1]))

    def tiles_of(num_pairs: int) -> set[tuple[str, int]]:
        x, ids = torch.zeros(num_pairs // 4, 16), torch.zeros(num_pairs // 4, 4, dtype=torch.int64)
        found = set()
        with collecting(lambda function, args, options: found.add((function.__name__, options.get("BLOCK_M", 0)))):
            moe.experts(x, ids, ids.float(), torch.zeros(num_experts, 16, 16), torch.zeros(num_experts, 16, 8), "silu")
        return {launch for launch in found if launch[0] == "_expert_kernel"}

    least = moe.LIBRARY_PAIRS_PER_EXPERT * num_experts
    most = moe.next_power_of_two(least)
    below, above = tiles_of(least - 4), tiles_of(most)
    assert below and below <= above
    assert not tiles_of(2 * most), "there the library multiplies all"


def test_no_choice_makes_more_tiles_than_there_are_programs() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        num_pairs, num_experts, block = (int(torch.randint(1, n, (), generator=generator)) for n in (90, 20, 17))
        # Pairs fall on few experts or on many; the tightest choice is one pair for each expert and the rest on one.
        skew = torch.rand(num_pairs, generator=generator) ** int(torch.randint(1, 6, (), generator=generator))
        counts = (skew * num_experts).long().bincount(minlength=num_experts)
        assert int((-(-counts // block)).sum()) <= moe.max_tiles(num_pairs, num_experts, block)
    assert moe.max_tiles(7 + 17, 8, 16) == 9  # seven experts with a pair each, one with 17


def test_configs_give_every_multiprocessor_work() -> None:
    for num_pairs in (8, 64, 128, 512, 4096, 65536):
        for n, is_gated in ((768, True), (2048, False)):
            config = moe.tile_config(num_pairs, 128, n, is_gated, 132)
            programs = min(num_pairs, 128) * -(-n // config.block_n)
            assert programs >= 132 and config.block_m * config.block_n <= 128 * 128


RULES = {
    "softmax": RouteRule(7, 3),
    "softmax, as it is": RouteRule(7, 3, renormalise=False, scale=2.5),
    "sigmoid": RouteRule(8, 2, scoring="sigmoid", scale=1.5),
    "groups by two": RouteRule(16, 4, scoring="sigmoid", num_groups=4, top_groups=2, group_score="top2"),
    "groups by best": RouteRule(16, 3, num_groups=8, top_groups=3),
    "one": RouteRule(3, 1),
    "all": RouteRule(4, 4),
}


@pytest.mark.parametrize("extra", ["none", "bias", "expert scale"])
@pytest.mark.parametrize("name", RULES)
def test_route(device: torch.device, name: str, extra: str) -> None:
    rule = RULES[name]
    logits = 8 * draw(device, torch.float32, 13, rule.num_experts)
    bias = draw(device, torch.float32, 1, rule.num_experts, seed=1)[0] if extra == "bias" else None
    scale = draw(device, torch.float32, 1, rule.num_experts, seed=2)[0] if extra == "expert scale" else None
    assert router.can_route(rule)
    ids, weights = router.route(logits, rule, bias, scale)
    wanted = reference.route(logits, rule, bias, scale)
    assert torch.equal(ids, wanted.ids) and ids.dtype == torch.int64
    torch.testing.assert_close(weights, wanted.weights)


def test_ties_go_to_the_lowest_id_and_dead_rows_stay_in_range(device: torch.device) -> None:
    rule = replace(RULES["groups by two"], top_k=6)  # more than a group has
    logits = torch.zeros(3, 16, device=device)
    logits[0, [5, 9]] = 1.0
    logits[1] = float("nan")
    ids, weights = router.route(logits, rule)
    assert ids.tolist() == [[5, 9, 4, 6, 7, 8], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert torch.equal(ids, reference.route(logits, rule).ids)
    assert weights[1].isnan().all() and weights[[0, 2]].isfinite().all()


def test_groups_that_are_no_power_of_two_are_left_to_torch(device: torch.device) -> None:
    rule = RouteRule(12, 2, num_groups=3, top_groups=1)
    assert not router.can_route(rule) and router.can_route(RouteRule(12, 2, num_groups=3, top_groups=3))
    with pytest.raises(ValueError, match="route: rule "):
        router.route(torch.zeros(1, 12, device=device), rule)


def test_wrappers_name_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    case = Case(device, dtype, 2)
    for argument, changes in (
        ("x", {"x": case.x[:, :9]}),
        ("gate_up", {"gate_up": case.gate_up[:, 1:]}),
        ("down", {"down": case.down.double()}),
        ("ids", {"ids": case.ids.int()}),
        ("ids", {"ids": case.ids[:1]}),
        ("weights", {"weights": case.weights.double()}),
        ("activation", {"activation": "tanh"}),
    ):
        broken = case.cut(slice(0, 2))
        broken.__dict__.update(changes)
        with pytest.raises(ValueError, match=f"experts: {argument} "):
            broken.run()
    with pytest.raises(ValueError, match="experts: method "):
        case.run("all")
    with pytest.raises(ValueError, match="combine: made "):
        moe.combine(case.x, case.weights)
