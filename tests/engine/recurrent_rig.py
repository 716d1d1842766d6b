"""Tiny hybrid models, and rigs that compare every recurrent state with a recomputation token by token.

`BackendRig` drives rows and backend alone, with any counts one can think of; `StateRig` is an engine whose rows and
checkpoints are looked at after every step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec
from outrider.core import NULL_PAGE, NULL_ROW, Admission, CheckpointWrite, Limits, ScheduledBatch, StepResult
from outrider.core.checked_request import NO_REQUEST
from outrider.core.step_messages import CacheOrders
from outrider.layers import StepContext
from outrider.layers.gated_delta import GatedDeltaMixer, GatedDeltaShape
from outrider.layers.kda import KDAMixer, KDANames, KDAShape
from outrider.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from outrider.layers.short_conv import ShortConvMixer
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.checkpoint_pages import RecurrentState
from outrider.mixers.recurrent.recurrent_mixer import RecurrentMixer, StepCounts
from outrider.mixers.recurrent.recurrent_rows import RecurrentRows
from outrider.models.base import Model
from outrider.sched.request import Request
from outrider.sched.updates import Update
from tests.engine.harness import CPU, VOCAB, Rig, random_model
from tests.models.oracle import DenseAttend

WITHIN = 1e-10
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "eos_token_id": 2,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba2": _SIZES | {
        "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*M-", "ssm_state_size": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16, "conv_kernel": 4,
    },
    "gated_delta": _SIZES | {
        "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 3, "linear_key_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
    },
    "kda": _SIZES | {
        "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 3, "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_head_dim": 8,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "mlp_layer_types": ["dense"] * 3,
    },
}
# Models without a layer that attends.
ALONE: dict[str, dict[str, Any]] = {
    "mamba2_alone": HYBRIDS["mamba2"] | {"hybrid_override_pattern": "MM-M"},
    "gated_delta_alone": HYBRIDS["gated_delta"] | {"layer_types": ["linear_attention"] * 3},
    "kda_alone": HYBRIDS["kda"] | {"layer_types": ["linear_attention"] * 3},
}


@functools.cache
def hybrid(name: str) -> Model:
    return random_model(HYBRIDS[name], torch.float64, 3)


# Rows and backend alone

K = 4
PAGE = 16
LENGTH = 96
LIMITS = Limits(max_requests=4, max_batched_tokens=64, max_len=LENGTH, max_drafts=K, vocab_size=8)


@functools.cache
def mixers() -> dict[int, RecurrentMixer]:
    made = {
        0: Mamba2Mixer(Mamba2Shape(2, 4, 1, 4, 4), dtype=torch.float64, device=CPU),
        1: GatedDeltaMixer(GatedDeltaShape(1, 2, 4, 4, 3), dtype=torch.float64, device=CPU),
        2: KDAMixer(KDAShape(2, 4, 3), KDANames(), dtype=torch.float64, device=CPU),
        3: ShortConvMixer(6, 4, bias=True, dtype=torch.float64, device=CPU),
    }
    generator = torch.Generator().manual_seed(0)
    for mixer in made.values():
        for slot in mixer.weights("").values():
            slot.store(torch.empty(slot.shape, dtype=torch.float64).normal_(0, 0.5, generator=generator))
        mixer.finalize()
    return made


Inputs = tuple[torch.Tensor, ...]  # conv_in, gates: [tokens, ..] each


def noise(mixer: RecurrentMixer, count: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = (mixer.spec.conv_dim, *mixer.spec.gate_sizes)
    return tuple(torch.randn(count, size, dtype=torch.float64, generator=generator) for size in sizes)


def walked(mixer: RecurrentMixer, begin: RecurrentState, inputs: Inputs) -> tuple[list[torch.Tensor], RecurrentState]:
    """Token by token: the definition."""
    (state, tail), ys = begin, []
    for i in range(inputs[0].shape[0]):
        y, states, tails = mixer.step(state[None], tail[None], inputs[0][i : i + 1],
                                      tuple(gate[i : i + 1] for gate in inputs[1:]))
        state, tail = states[0], tails[0]
        ys.append(y[0])
    return ys, RecurrentState(state, tail)


def empty_state(mixer: RecurrentMixer) -> RecurrentState:
    spec = mixer.spec
    return RecurrentState(torch.zeros(spec.state_shape, dtype=torch.float64),
                          torch.zeros(spec.conv_width - 1, spec.conv_dim, dtype=torch.float64))


class Stream:
    """A request's true tokens, as inputs of every layer, and the states after each."""

    def __init__(self, row: int, seed: int) -> None:
        self.row, self.seed = row, seed
        self.computed = self.pending = 0
        self.alive = True
        self.inputs = {layer: noise(mixer, LENGTH, 100 * seed + layer) for layer, mixer in mixers().items()}
        self._states: dict[int, list[RecurrentState]] = {layer: [empty_state(m)] for layer, m in mixers().items()}

    def state(self, layer: int, tokens: int) -> RecurrentState:
        states = self._states[layer]
        while len(states) <= tokens:
            last = len(states) - 1
            states.append(walked(mixers()[layer], states[-1], self.cut(layer, last, last + 1))[1])
        return states[tokens]

    def cut(self, layer: int, start: int, stop: int) -> Inputs:
        return tuple(part[start:stop] for part in self.inputs[layer])


@dataclass
class Part:
    """A request's share of a step: known tokens and drafts, of which the first `accepted` are right."""

    stream: Stream
    known: int
    drafts: int = 0
    accepted: int = 0
    dead_drafts: int = 0  # scheduled behind the live ones


class BackendRig:
    """Every row that nobody owns holds NaN, the null row too, and so does the pool."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        claims = [LayerCache(layer, mixer.spec) for layer, mixer in mixers().items()]
        layout = plan_groups([LayerCache(9, FullSpec(1, 2, 8)), *claims], PAGE)
        self.pool = DevicePool(layout, 200, torch.float64, CPU)
        self.pool.data.fill_(torch.nan)
        self.rows = RecurrentRows(mixers(), limits, self.pool)
        self.num_pages = layout.recurrent.capacity(limits).checkpoint_pages
        self.streams: dict[int, Stream] = {}
        self._next_page, self._next_id = NULL_PAGE + 1, 1
        for row in range(limits.max_requests + 1):
            self.poison(row)

    def poison(self, row: int) -> None:
        for own in self.rows.layers.values():
            for tensor in (own.state, own.tail, own.conv_in, *own.gates):
                tensor[row] = torch.nan

    def admit(self, row: int, seed: int, computed: int = 0, pages: Sequence[int] = ()) -> Stream:
        stream = self.streams[row] = Stream(row, seed)
        stream.computed = computed
        self.rows.admit([Admission(row, NO_REQUEST, computed, LENGTH, output_ids=[0] * computed,
                                   checkpoint=list(pages))])
        self.check()
        return stream

    def release(self, stream: Stream) -> None:
        del self.streams[stream.row]
        self.poison(stream.row)

    def target(self, stream: Stream, boundary: int) -> CheckpointWrite:
        pages = list(range(self._next_page, self._next_page + self.num_pages))
        self._next_page += self.num_pages
        self._next_id += 1
        return CheckpointWrite(self._next_id, stream.row, boundary, pages)

    def step(self, parts: Sequence[Part], targets: Sequence[CheckpointWrite] = (), padded: tuple[int, int] = (0, 0),
             most_pending: int = K) -> list[CheckpointWrite]:
        """One step of every layer; compares outputs, states and checkpoints. Returns those that were written."""
        counts, flat = self._counts(parts, targets, padded, most_pending)
        step = self.rows.backend.begin(counts)
        for layer in mixers():
            conv_in, *gates = flat[layer]
            y = step.run(layer, conv_in, tuple(gates))
            self._check_outputs(layer, parts, y)
        accepted = torch.tensor([p.accepted if p.stream.alive else 0 for p in parts] + [0] * padded[0])
        flags = self.rows.commit(step, accepted)
        for part in parts:
            if part.stream.alive:
                part.stream.computed += part.known + part.accepted
                part.stream.pending = part.accepted
        self.check()
        written = [t for t, was in zip(targets, flags.tolist(), strict=True) if was]
        self.check_checkpoints(targets, written)
        return written

    def fold(self, targets: Sequence[CheckpointWrite]) -> list[CheckpointWrite]:
        computed = torch.zeros(LIMITS.max_requests + 1, dtype=torch.int64)
        for stream in self.streams.values():
            computed[stream.row] = stream.computed
        flags = self.rows.fold(list(targets), computed)
        written = [t for t, was in zip(targets, flags.tolist(), strict=True) if was]
        self.check()
        self.check_checkpoints(targets, written)
        return written

    def check(self) -> None:
        """Every row's state and tail are those of its tokens; rows of nobody are as they were."""
        for layer, own in self.rows.layers.items():
            for row in range(own.state.shape[0]):
                if row not in self.streams:
                    assert own.state[row].isnan().all() and own.tail[row].isnan().all(), f"row {row} is nobody's"
                    continue
                stream = self.streams[row]
                assert int(self.rows.pending[row]) == stream.pending
                truth = stream.state(layer, stream.computed - stream.pending)
                assert_near(RecurrentState(own.state[row], own.tail[row]), truth, f"layer {layer}, row {row}")

    def check_checkpoints(self, targets: Sequence[CheckpointWrite], written: Sequence[CheckpointWrite]) -> None:
        for write in targets:
            if write not in written:
                assert self.pool.data[write.pages].isnan().all(), "a page was touched and not reported"
                continue
            for layer in mixers():
                state, tail = self.rows.pages.read(layer, torch.tensor([write.pages]))
                truth = self.streams[write.row].state(layer, write.boundary)
                assert_near(RecurrentState(state[0], tail[0]), truth, f"layer {layer}, checkpoint {write.boundary}")

    # Inside

    def _counts(self, parts: Sequence[Part], targets: Sequence[CheckpointWrite], padded: tuple[int, int],
                most_pending: int) -> tuple[StepCounts, dict[int, Inputs]]:
        extra_requests, extra_tokens = padded
        known = [p.known for p in parts]
        drafts = [p.drafts + p.dead_drafts for p in parts]
        lens = [k + d for k, d in zip(known, drafts, strict=True)] + [0] * extra_requests
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        request_of = [i for i, n in enumerate(lens) for _ in range(n)] + [len(lens) - 1] * extra_tokens
        live = [p.stream.alive for p in parts]
        scheduled = ScheduledBatch(
            0, [p.stream.row for p in parts], [0] * len(parts), [p.stream.row for p in parts], known, drafts,
            [True] * len(parts), [p.stream.computed + k + d for p, k, d in zip(parts, known, drafts, strict=True)],
            cache=CacheOrders(checkpoints=list(targets)),
        )
        ints = torch.tensor([
            [*(p.stream.row for p in parts), *[NULL_ROW] * extra_requests],
            [*(p.stream.computed for p in parts), *[0] * extra_requests],
            [*(k if is_live else 0 for k, is_live in zip(known, live, strict=True)), *[0] * extra_requests],
            [*(p.drafts if is_live else 0 for p, is_live in zip(parts, live, strict=True)), *[0] * extra_requests],
        ])
        counts = StepCounts(
            ints[0], torch.tensor(starts), torch.tensor(request_of), ints[1], ints[2], ints[3],
            self.rows.pending[ints[0]], tuple(lens),
            (*known, *[0] * extra_requests), max(drafts), most_pending, self.rows.targets(scheduled, len(lens)),
        )
        return counts, {layer: self._flat(layer, parts, extra_tokens) for layer in mixers()}

    def _flat(self, layer: int, parts: Sequence[Part], extra_tokens: int) -> Inputs:
        mixer, pieces = mixers()[layer], []
        for part in parts:
            pieces += [self._inputs(layer, part), noise(mixer, part.dead_drafts, 7)]
        pieces.append(tuple(torch.full_like(t, torch.nan) for t in noise(mixer, extra_tokens, 7)))
        return tuple(torch.cat(tensors) for tensors in zip(*pieces, strict=True))

    def _inputs(self, layer: int, part: Part) -> Inputs:
        stream = part.stream
        right = stream.cut(layer, stream.computed, stream.computed + part.known + part.accepted)
        wrong = noise(mixers()[layer], part.drafts - part.accepted, 1000 + stream.computed)
        return tuple(torch.cat(pair) for pair in zip(right, wrong, strict=True))

    def _check_outputs(self, layer: int, parts: Sequence[Part], y: torch.Tensor) -> None:
        """Check the outputs of live tokens, rejected ones too; those of dead and padded tokens are zero."""
        start = 0
        for part in parts:
            count = part.known + part.drafts
            stop = start + count + part.dead_drafts
            if part.stream.alive:
                begin = part.stream.state(layer, part.stream.computed)
                ys, _ = walked(mixers()[layer], begin, self._inputs(layer, part))
                assert (y[start : start + count] - torch.stack(ys)).abs().max() < WITHIN, f"layer {layer}: outputs"
            else:
                count = 0
            assert (y[start + count : stop] == 0).all(), "a dead token has an output"
            start = stop
        assert (y[start:] == 0).all()


def assert_near(found: RecurrentState, truth: RecurrentState, what: str) -> None:
    for name, a, b in zip(("state", "tail"), found, truth, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if not a.numel():  # a convolution has a tail alone
            continue
        assert (a - b).abs().max() < WITHIN, f"{what}: the {name} is wrong"


# A whole engine


class Reference:
    """States of one request's tokens, computed one by one without rows, pages or batches."""

    def __init__(self, model: Model) -> None:
        self._model, self._attend = model, DenseAttend(model)
        self._mixers: dict[int, RecurrentMixer] = model.recurrent_layers
        self._states: list[dict[int, RecurrentState]] = [{i: empty_state(m) for i, m in self._mixers.items()}]

    def states(self, tokens: Sequence[int], count: int) -> dict[int, RecurrentState]:
        while len(self._states) <= count:
            last = len(self._states) - 1
            self._model.forward(torch.tensor([tokens[last]]), StepContext(
                self._attend, torch.tensor([last]), history=self._attend.history(torch.tensor([tokens[last]]))))
            self._states.append(dict(self._attend.states))
        return self._states[count]


class StateRig(Rig):
    """Rows of nobody hold NaN. With `overlap=False`, states and checkpoints are compared after every step."""

    def __init__(self, model: Model, *, compares: bool = True, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.requests: dict[int, Request] = {}
        self.num_compared = self.num_checkpoints = 0
        self._compares = compares
        self._references: dict[int, Reference] = {}
        self._owner: dict[int, int] = {}  # request that had a row last
        self._free_rows: dict[int, list[int]] = {}

    def _watched_schedule(self) -> ScheduledBatch | None:
        batch = super()._watched_schedule()
        if batch is not None:
            self.requests |= {request.id: request for request in self.scheduler._running}
            folds = [fold.row for fold in batch.cache.folds]
            self._free_rows[batch.step] = [row for row in (NULL_ROW, *self.scheduler._free_rows) if row not in folds]
        return batch

    def _poison(self, batch: ScheduledBatch) -> None:
        super()._poison(batch)
        for own in self.step.recurrent.layers.values():
            for tensor in (own.state, own.tail, own.conv_in, *own.gates):
                tensor[self._free_rows[batch.step]] = torch.nan

    def _watched_update(self, result: StepResult, seconds: float | None = None) -> list[Update]:
        batch = next(b for b in self.batches if b.step == result.step)
        owners = dict(self._owner)
        self._owner |= dict(zip(batch.rows, batch.request_ids, strict=True))
        updates = super()._watched_update(result, seconds)
        if self._compares:
            for write in [*batch.cache.checkpoints, *batch.cache.folds]:
                if write.id in result.checkpoints:
                    owner = owners[write.row] if write in batch.cache.folds else self._owner[write.row]
                    self._compare_checkpoint(owner, write)
            self._compare_rows()
        return updates

    def _truth(self, request_id: int, count: int) -> dict[int, RecurrentState]:
        reference = self._references.setdefault(request_id, Reference(self.step.model))
        return reference.states(self.requests[request_id].token_ids, count)

    def _compare_checkpoint(self, request_id: int, write: CheckpointWrite) -> None:
        self.num_checkpoints += 1
        for layer, truth in self._truth(request_id, write.boundary).items():
            state, tail = self.step.recurrent.pages.read(layer, torch.tensor([write.pages]))
            assert_near(RecurrentState(state[0], tail[0]), truth, f"checkpoint {write.boundary} of {request_id}")

    def _compare_rows(self) -> None:
        recurrent = self.step.recurrent
        for request in self.scheduler._running:
            if request.settled.at_least == 0:
                continue  # its first step is still to come
            self.num_compared += 1
            folded = int(self.step.state.computed[request.row] - recurrent.pending[request.row])
            assert folded == request.folded, "the host is wrong about what is folded"
            for layer, truth in self._truth(request.id, folded).items():
                own = recurrent.layers[layer]
                found = RecurrentState(own.state[request.row], own.tail[request.row])
                assert_near(found, truth, f"layer {layer}, request {request.id} after {folded} tokens")
