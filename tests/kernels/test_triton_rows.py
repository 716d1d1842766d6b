"""Triton kernels that work token row by token row: norms, activations, rope with cache write; and whole pages."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import reference
from outrider.kernels.gpu import (
    add_rms_norm,
    cache_write,
    gelu_tanh_mul,
    limited_silu_mul,
    norm_add_norm,
    rms_norm,
    rope_cache_write,
    silu_mul,
)

NAN = float("nan")


def rows(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random, with a row stride that is not the width."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + 8, generator=generator).to(device, dtype)[..., : shape[-1]]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [1, 96, 1000])
def test_norms(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (rows(device, dtype, 3, width, seed=i) for i in range(3))
    weight = weight[0]
    wanted = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), wanted)
    summed = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, summed), "the residual is updated in place, rounded once"
    assert torch.equal(normed, rms_norm(summed, weight, 1e-5)), "fused equals add, then norm"


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_norm_add_norm_is_its_three_parts(device: torch.device, dtype: torch.dtype, factor: float) -> None:
    x, residual, weights = (rows(device, dtype, 3, 96, seed=i) for i in range(3))
    wanted = residual * factor + rms_norm(x, weights[0], 1e-5)
    normed = norm_add_norm(x, weights[0], residual, weights[1], 1e-5, factor=factor)
    assert torch.equal(residual, wanted)
    assert torch.equal(normed, rms_norm(wanted, weights[1], 1e-5))


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(device: torch.device, dtype: torch.dtype, name: str) -> None:
    kernel = {"silu_mul": silu_mul, "gelu_tanh_mul": gelu_tanh_mul}[name]
    x = rows(device, dtype, 3, 2 * 1030) * 4
    x[0, :4] = torch.tensor([-100.0, 100.0, -1e4, 0.0], device=device, dtype=dtype)
    assert_close(kernel(x), getattr(reference, name)(x.double()))


def test_the_limited_activation(device: torch.device, dtype: torch.dtype) -> None:
    x = rows(device, dtype, 3, 2 * 1030) * 4
    x[0, :2], x[0, 1030:1032] = torch.tensor([3.0, -30.0]), torch.tensor([9.0, -9.0])
    x[1, 0] = x[1, 1031] = NAN
    found, wanted = limited_silu_mul(x, 2.5), reference.limited_silu_mul(x.double(), 2.5)
    assert found.isnan().sum() == 2 and found[1, :2].isnan().all(), "a bad value stays bad, and touches no other"
    assert_close(found.nan_to_num(), wanted.nan_to_num())
    assert (wanted - reference.silu_mul(x.double())).nan_to_num().abs().max() > 1


def test_a_row_does_not_depend_on_other_rows(device: torch.device, dtype: torch.dtype) -> None:
    x = rows(device, dtype, 3, 64)
    poisoned = x.clone()
    poisoned[1] = NAN
    weight = rows(device, dtype, 1, 64)[0]
    for run in (silu_mul, gelu_tanh_mul, lambda t: rms_norm(t, weight, 1e-5)):
        assert torch.equal(run(x)[::2], run(poisoned)[::2])
        assert torch.equal(run(x)[2:], run(x[2:]))


def make_rope(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rot: int, page: int,
) -> tuple[torch.Tensor, ...]:
    qkv = rows(device, dtype, 5, (heads + 2 * kv_heads) * dim)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(40, rot, generator=generator).to(device)
    positions = torch.tensor([3, 39, 0, 17, 1 << 40], device=device)  # the last row is padding
    slots = torch.tensor([2 * page + 1, -1, 0, 4 * page + page - 1, -1], device=device)
    pool = torch.full((6, 3, page, kv_heads, dim), NAN, device=device, dtype=dtype)
    return qkv, positions, table, slots, pool


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rot", "page"), [(9, 3, 16, 16, 16), (4, 1, 80, 32, 64), (2, 2, 24, 6, 16)]
)
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
def test_rope_and_cache_write(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rot: int, page: int,
    has_norm: bool,
) -> None:
    qkv, positions, table, slots, pool = make_rope(device, dtype, heads, kv_heads, dim, rot, page)
    weights = [rows(device, dtype, 1, dim, seed=i)[0] for i in (5, 6)] if has_norm else [None, None]
    before = qkv.clone()
    q = rope_cache_write(qkv, positions, table, slots, pool[:, 0], pool[:, 1], *weights, 1e-6)
    assert torch.equal(qkv, before)

    wide = torch.full(pool.shape, NAN, dtype=torch.float64, device=device)
    doubled = qkv.double().contiguous()
    cos, sin = table.double().chunk(2, dim=-1)
    wide_weights = [None if w is None else w.double() for w in weights]
    reference.rope_write(doubled, positions.clamp(max=39), cos, sin, slots, wide[:, 0], wide[:, 1], *wide_weights,
                         1e-6, rot)
    assert_close(q, doubled[:, : heads * dim].view(5, heads, dim))
    written = ~wide.isnan()
    assert int(written.sum()) == 3 * 2 * kv_heads * dim
    assert torch.equal(written, ~pool.isnan()), "only the tokens' slots are written"
    assert_close(pool[written], wide[written])


@pytest.mark.parametrize(("kv_heads", "dim", "page"), [(3, 16, 16), (1, 80, 64)])
def test_cache_write(device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int, page: int) -> None:
    """Keys and values as parts of a wider projection, into pages that hold more than this layer's."""
    width = kv_heads * dim
    projected = rows(device, dtype, 4, 24 + 2 * width)
    k, v = (part.unflatten(1, (kv_heads, dim)) for part in projected.split((24, width, width), dim=1)[1:])
    slots = torch.tensor([2 * page + 1, -1, 0, 4 * page + page - 1], device=device)
    pool = torch.full((6, 3, page, kv_heads, dim), NAN, device=device, dtype=dtype)
    wanted = pool.clone()
    reference.write_slots(wanted[:, 0], k, slots)
    reference.write_slots(wanted[:, 1], v, slots)
    cache_write(k, v, slots, pool[:, 0], pool[:, 1])
    assert int((~pool.isnan()).sum()) == 3 * 2 * kv_heads * dim
    assert torch.equal(pool.nan_to_num(7), wanted.nan_to_num(7))
    cache_write(k, v, torch.full_like(slots, -1), pool[:, 0], pool[:, 1])
    assert torch.equal(pool.nan_to_num(7), wanted.nan_to_num(7)), "no token has a slot"


def test_wrappers_name_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    x = rows(device, dtype, 2, 32)
    with pytest.raises(ValueError, match="silu_mul: x "):
        silu_mul(x[:, :31])
    with pytest.raises(ValueError, match="rms_norm: weight "):
        rms_norm(x, x[0, :31], 1e-5)
    with pytest.raises(ValueError, match="add_rms_norm: residual "):
        add_rms_norm(x, x[:1], x[0], 1e-5)
    qkv, positions, table, slots, pool = make_rope(device, dtype, 4, 2, 16, 16, 16)
    good = {"qkv": qkv, "positions": positions, "cos_sin": table, "slots": slots}
    good |= {"k_cache": pool[:, 0], "v_cache": pool[:, 1]}
    wrong = {"qkv": qkv[:, :40], "positions": positions[:3], "cos_sin": table.double(), "slots": slots.int(),
             "v_cache": pool[:, 1, :8]}
    for argument, value in wrong.items():
        with pytest.raises(ValueError, match=f"rope_cache_write: {argument} "):
            rope_cache_write(**(good | {argument: value}))


@pytest.mark.parametrize("kind", ["v", "v from k", "q only", "no q"])
def test_rope_cache_write_norms_values_and_serves_layers_without_them(kind: str, device: torch.device) -> None:
    """Gemma 4: values divided by their root mean square, taken from the keys' columns, or not there at all. And
    keys and values without queries."""
    generator = torch.Generator().manual_seed(5)
    tokens, heads, kv_heads, dim, page = 5, 0 if kind == "no q" else 4, 2, 16, 16
    columns = heads + {"v": 2, "v from k": 1, "q only": 0, "no q": 2}[kind] * kv_heads
    qkv = torch.randn(tokens, columns * dim, generator=generator).to(device)
    table = torch.randn(32, dim, generator=generator).to(device)
    positions = torch.tensor([3, 4, 9, 0, 31], device=device)
    slots = torch.tensor([17, 18, -1, 40, 2], device=device)
    q_gain, k_gain = (torch.randn(dim, generator=generator).to(device) for _ in range(2))
    k_cache, v_cache = (torch.full((4, page, kv_heads, dim), 7.0, device=device) for _ in range(2))
    q = rope_cache_write(qkv, positions, table, slots, k_cache, v_cache, q_gain, k_gain, 1e-6, v_norm=True,
                         v_from_k=kind == "v from k", writes=kind != "q only")
    parts = qkv.view(tokens, columns, dim)

    def normed(x: torch.Tensor, gain: torch.Tensor | float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    torch.testing.assert_close(q, turned(normed(parts[:, :heads], q_gain)), atol=1e-5, rtol=1e-5)
    live = slots >= 0
    got_k, got_v = (cache.view(-1, kv_heads, dim)[slots[live]] for cache in (k_cache, v_cache))
    if kind == "q only":
        assert (k_cache == 7).all() and (v_cache == 7).all()
        return
    keys, values = parts[:, heads : heads + kv_heads], parts[:, -kv_heads:]
    torch.testing.assert_close(got_k, turned(normed(keys, k_gain))[live], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_v, normed(values, 1.0)[live], atol=1e-5, rtol=1e-5)
