"""Recurrences: scans against steps in float64, any split and any boundary; rows that do not see each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels import recurrent
from outrider.layers import recurrent as mixers
from outrider.layers.gated_delta import GatedDeltaMixer, GatedDeltaShape
from outrider.layers.kda import KDAMixer, KDANames, KDAShape
from outrider.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from outrider.layers.recurrent import ConvMixer, GatedNorm
from outrider.mixers.recurrent.recurrent_mixer import Gates, RecurrentState
from tests.engine.test_no_host_reads import NoHostReads, no_host_reads

CPU = torch.device("cpu")
MAMBA = Mamba2Shape(num_heads=6, head_dim=5, num_groups=2, state_size=7, conv_width=4)
DELTA = GatedDeltaShape(num_key_heads=2, num_value_heads=6, key_dim=7, value_dim=5, conv_width=4)
KIMI = KDAShape(num_heads=6, head_dim=5, conv_width=4)
KINDS = ("mamba2", "mamba2_limited", "gated_delta", "kda", "kda_bounded")


def make_mixer(kind: str, dtype: torch.dtype, seed: int = 0) -> ConvMixer:
    generator = torch.Generator().manual_seed(seed)
    mixer: Mamba2Mixer | GatedDeltaMixer | KDAMixer
    if kind == "gated_delta":
        mixer = GatedDeltaMixer(DELTA, dtype=dtype, device=CPU)
    elif kind.startswith("kda"):
        bound = -5.0 if kind == "kda_bounded" else None
        mixer = KDAMixer(replace(KIMI, lower_bound=bound), KDANames(), dtype=dtype, device=CPU)
    else:
        limits = (0.3, 0.8) if kind == "mamba2_limited" else (0.0, float("inf"))
        shape = Mamba2Shape(**vars(MAMBA) | {"dt_limits": limits, "conv_bias": kind == "mamba2"})
        mixer = Mamba2Mixer(shape, dtype=dtype, device=CPU)
    for slot in mixer.weights("").values():
        # Drawn in one type, or mixers of different types would differ.
        slot.target.copy_(torch.empty(slot.shape, dtype=torch.float32).normal_(0.0, 0.7, generator=generator))
    mixer.finalize()
    return mixer


def draw(mixer: ConvMixer, tokens: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, Gates]:
    """Inputs as a layer gives them: slices of one projection."""
    generator, spec = torch.Generator().manual_seed(seed), mixer.spec
    sizes = (3, spec.conv_dim, *spec.gate_sizes)
    projected = torch.empty(tokens, sum(sizes), dtype=dtype).normal_(0.0, 1.5, generator=generator)
    _, conv_in, *gates = projected.split(sizes, dim=1)
    return conv_in, tuple(gates)


def start(mixer: ConvMixer, dtype: torch.dtype, seed: int = 2) -> RecurrentState:
    generator, spec = torch.Generator().manual_seed(seed), mixer.spec
    wide = torch.promote_types(dtype, torch.float32)
    state = torch.empty(spec.state_shape, dtype=wide).normal_(generator=generator)
    tail = torch.empty(spec.conv_width - 1, spec.conv_dim, dtype=dtype)
    return RecurrentState(state, tail.normal_(generator=generator))


def by_steps(
    mixer: ConvMixer, begin: RecurrentState, conv_in: torch.Tensor, gates: Gates
) -> tuple[torch.Tensor, list[RecurrentState]]:
    """y, and the state after every number of tokens."""
    (state, tail), outputs, states = begin, [], [begin]
    for token in range(conv_in.shape[0]):
        y, rows, tails = mixer.step(state[None], tail[None], conv_in[token, None], tuple(g[token, None] for g in gates))
        state, tail = rows[0], tails[0]
        outputs.append(y)
        states.append(RecurrentState(state, tail))
    return torch.cat(outputs) if outputs else conv_in.new_empty(0, mixer.spec.out_dim), states


def far(a: RecurrentState, b: RecurrentState) -> float:
    return max(float((a.state - b.state).abs().max()), float((a.tail - b.tail).abs().max()))


def naive(mixer: ConvMixer, begin: RecurrentState, conv_in: torch.Tensor, gates: Gates) -> torch.Tensor:
    """The definitions, head by head with Python loops: what a step must compute."""
    state, seen, outputs = begin.state.clone(), torch.cat((begin.tail, conv_in)), []
    for token in range(conv_in.shape[0]):
        u = sum(seen[token + tap] * mixer.conv_weight[tap] for tap in range(4))
        u = u if mixer.conv_bias is None else u + mixer.conv_bias
        u = u / (1 + (-u).exp())
        y = []
        for head in range(6):
            if isinstance(mixer, Mamba2Mixer):
                x, b, c = u[5 * head : 5 * head + 5], u[30 + 7 * (head // 3) :][:7], u[44 + 7 * (head // 3) :][:7]
                dt = (1 + (gates[0][token, head] + mixer.dt_bias[head]).exp()).log()
                dt = min(max(float(dt), mixer.shape.dt_limits[0]), mixer.shape.dt_limits[1])
                decay = torch.exp(-mixer.log_decay[head].exp() * dt)
                state[head] = state[head] * decay + dt * torch.outer(x, b)
                y.append(state[head] @ c + mixer.skip[head] * x)
            elif isinstance(mixer, KDAMixer):
                q, k, v = (u[30 * part + 5 * head :][:5] for part in range(3))
                q, k = q / (q @ q + 1e-6).sqrt() / 5**0.5, k / (k @ k + 1e-6).sqrt()
                step, rate = (gates[0][token] + mixer.dt_bias)[5 * head :][:5], mixer.log_decay[head].exp()
                bound = mixer.shape.lower_bound
                g = -rate * (1 + step.exp()).log() if bound is None else bound / (1 + (-rate * step).exp())
                beta = 1 / (1 + (-gates[1][token, head]).exp())
                kept = state[head] * g.exp()
                state[head] = kept + beta * torch.outer(v - kept @ k, k)
                y.append(state[head] @ q)
            else:
                assert isinstance(mixer, GatedDeltaMixer)
                q, k, v = u[7 * (head // 3) :][:7], u[14 + 7 * (head // 3) :][:7], u[28 + 5 * head :][:5]
                q, k = q / (q @ q + 1e-6).sqrt() / 7**0.5, k / (k @ k + 1e-6).sqrt()
                soft = (1 + (gates[0][token, head] + mixer.dt_bias[head]).exp()).log()
                beta = 1 / (1 + (-gates[1][token, head]).exp())
                kept = state[head] * torch.exp(-mixer.log_decay[head].exp() * soft)
                state[head] = kept + beta * torch.outer(v - kept @ k, k)
                y.append(state[head] @ q)
        outputs.append(torch.cat(y))
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_definition(kind: str) -> None:
    mixer = make_mixer(kind, torch.float64)
    begin, (conv_in, gates) = start(mixer, torch.float64), draw(mixer, 9, torch.float64)
    y, _ = by_steps(mixer, begin, conv_in, gates)
    assert (y - naive(mixer, begin, conv_in, gates)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_scans_equal_steps_in_any_split(kind: str, data: st.DataObject) -> None:
    """Splits into calls and boundaries inside of calls, around the sizes of chunks and pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "CHUNK", data.draw(st.sampled_from((1, 4, 8)), "chunk"))
        patch.setattr(mixers, "PIECE_TOKENS", data.draw(st.sampled_from((8, 16, 64)), "piece"))
        mixer = make_mixer(kind, torch.float64)
        tokens = data.draw(st.integers(0, 40), "tokens")
        conv_in, gates = draw(mixer, tokens, torch.float64)
        begin = start(mixer, torch.float64)
        expected, states = by_steps(mixer, begin, conv_in, gates)
        cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts"))
        (state, tail), outputs = begin, []
        for first, last in zip([0, *cuts], [*cuts, tokens], strict=True):
            boundaries = sorted(data.draw(st.lists(st.integers(0, last - first), max_size=3), "boundaries"))
            part = tuple(gate[first:last] for gate in gates)
            y, state, tail, at = mixer.scan(state, tail, conv_in[first:last], part, boundaries)
            assert len(at) == len(boundaries)
            for boundary, found in zip(boundaries, at, strict=True):
                assert far(found, states[first + boundary]) < 1e-10
            outputs.append(y)
        assert far(RecurrentState(state, tail), states[-1]) < 1e-10
        if tokens:
            assert (torch.cat(outputs) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_long_scans_equal_steps(kind: str) -> None:
    """With the real sizes of chunk and piece, boundaries at them and beside them."""
    mixer = make_mixer(kind, torch.float64)
    begin, (conv_in, gates) = start(mixer, torch.float64), draw(mixer, 1100, torch.float64)
    expected, states = by_steps(mixer, begin, conv_in, gates)
    boundaries = [63, 64, 65, 1023, 1024, 1025, 1100]
    y, state, tail, at = mixer.scan(*begin, conv_in, gates, boundaries)
    assert (y - expected).abs().max() < 1e-10
    assert max(far(found, states[b]) for found, b in zip(at, boundaries, strict=True)) < 1e-10
    assert torch.equal(at[-1].state, state) and torch.equal(at[-1].tail, tail)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_scans_are_steps_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    mixer = make_mixer(kind, dtype)
    begin, (conv_in, gates) = start(mixer, dtype), draw(mixer, 21, dtype)
    expected, states = by_steps(mixer, begin, conv_in, gates)
    y, state, tail, at = mixer.scan(*begin, conv_in, gates, [0, 5, 21], exact=True)
    assert y.dtype == tail.dtype == dtype and state.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(y, expected) and torch.equal(state, states[-1].state) and torch.equal(tail, states[-1].tail)
    assert all(far(found, states[b]) == 0 for found, b in zip(at, [0, 5, 21], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_scans_are_near_float64(kind: str) -> None:
    """Strong decay beside weak: sums from a chunk's start would lose the weak one."""
    mixer, exact = make_mixer(kind, torch.float32), make_mixer(kind, torch.float64)
    begin, (conv_in, gates) = start(mixer, torch.float32), draw(mixer, 200, torch.float32)
    strong = torch.where(torch.arange(200)[:, None] % 7 == 0, 3000.0, gates[0])
    gates = (strong, *gates[1:])
    y, state, _, _ = mixer.scan(*begin, conv_in, gates, [])
    doubled = tuple(gate.double() for gate in gates)
    wide = exact.scan(begin.state.double(), begin.tail.double(), conv_in.double(), doubled, [])
    assert (y - wide.y).abs().max() < 2e-6 * wide.y.abs().max()
    assert (state - wide.state).abs().max() < 2e-6 * wide.state.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_see_each_other(kind: str) -> None:
    """A dead row may hold anything; and nothing that goes in is written to."""
    mixer = make_mixer(kind, torch.float64)
    conv_in, gates = draw(mixer, 5, torch.float64)
    begins = [start(mixer, torch.float64, seed) for seed in range(5)]
    state, tail = (torch.stack(parts) for parts in zip(*begins, strict=True))
    alone = mixer.step(state, tail, conv_in, gates)
    given = [state.clone(), tail.clone(), conv_in.clone(), *(g.clone() for g in gates)]
    for tensor in given:
        tensor[2] = torch.nan
    kept = [tensor.clone() for tensor in given]
    together = mixer.step(given[0], given[1], given[2], tuple(given[3:]))
    rows = torch.tensor([0, 1, 3, 4])
    for a, b in zip(alone, together, strict=True):
        assert (a[rows] - b[rows]).abs().max() < 1e-14 and b[2].isnan().any()
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(given, kept, strict=True))


@pytest.mark.parametrize("bad_at", [0, 7, 8, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_finite_fails_no_token_before_it(
    kind: str, bad_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a chunk, the last one, and one in the last chunk, which is not full: as steps have it. One input
    after the other, because some reach the state and some reach only the token's own output."""
    monkeypatch.setattr(recurrent, "CHUNK", 8)
    mixer = make_mixer(kind, torch.float64)
    begin, (conv_in, gates) = start(mixer, torch.float64), draw(mixer, 21, torch.float64)
    clean = mixer.scan(*begin, conv_in, gates, [bad_at])
    for part in (conv_in, conv_in[:, :1], conv_in[:, 20:21], conv_in[:, -1:], *gates):
        kept, part[bad_at] = part[bad_at].clone(), torch.nan
        y, states = by_steps(mixer, begin, conv_in, gates)
        found = mixer.scan(*begin, conv_in, gates, [bad_at])
        assert (found.y[:bad_at] - clean.y[:bad_at]).abs().sum() < 1e-10
        assert far(found.states_at[0], clean.states_at[0]) == 0
        assert found.y.isnan().any(dim=1).tolist() == y.isnan().any(dim=1).tolist()
        assert found.y[bad_at].isnan().any() and found.state.isnan().any() == states[-1].state.isnan().any()
        part[bad_at] = kept


@pytest.mark.parametrize("kind", KINDS)
def test_containment_changes_no_bit_of_finite_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = make_mixer(kind, torch.float32)
    begin, (conv_in, gates) = start(mixer, torch.float32), draw(mixer, 150, torch.float32)
    contained = mixer.scan(*begin, conv_in, gates, [70])
    monkeypatch.setattr(recurrent, "_zero_unless", lambda is_finite, *inputs: inputs)
    monkeypatch.setattr(recurrent, "_nan_unless", lambda is_finite, y, state: (y, state))
    plain = mixer.scan(*begin, conv_in, gates, [70])
    assert torch.equal(contained.y, plain.y) and torch.equal(contained.state, plain.state)
    assert far(contained.states_at[0], plain.states_at[0]) == 0


def test_a_width_of_one_needs_no_tail() -> None:
    mixer = Mamba2Mixer(Mamba2Shape(2, 3, 1, 4, conv_width=1), dtype=torch.float64, device=CPU)
    for slot in mixer.weights("").values():
        slot.target.normal_(generator=torch.Generator().manual_seed(0))
    mixer.finalize()
    begin, (conv_in, gates) = start(mixer, torch.float64), draw(mixer, 6, torch.float64)
    expected, states = by_steps(mixer, begin, conv_in, gates)
    y, state, tail, _ = mixer.scan(*begin, conv_in, gates, [])
    assert tail.shape == (0, 14)
    assert (y - expected).abs().max() < 1e-12 and (state - states[-1].state).abs().max() < 1e-12


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norm(gate_first: bool, activation: str) -> None:
    norm = GatedNorm(12 if gate_first else 4, 4, 1e-5, gate_first=gate_first, activation=activation,
                     dtype=torch.float64, device=CPU)
    norm.weight.normal_(1.0)
    y, z = torch.randn(5, 12, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    gate = z * z.sigmoid() if activation == "silu" else z.sigmoid()
    x = (y * gate if gate_first else y).view(5, 3, 4)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.view(-1, 4)
    expected = x.flatten(1) if gate_first else x.flatten(1) * gate
    assert (norm(y, z) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_on_the_host(kind: str) -> None:
    mixer = make_mixer(kind, torch.float32)
    begin, (conv_in, gates) = start(mixer, torch.float32), draw(mixer, 70, torch.float32)
    guard = NoHostReads()
    with torch.inference_mode(), no_host_reads(guard):
        mixer.step(begin.state[None], begin.tail[None], conv_in[:1], tuple(gate[:1] for gate in gates))
        mixer.scan(*begin, conv_in, gates, [16, 64])
    assert guard.num_operations > 20
