"""Which captured step serves a batch. A key must leave room for everything the batch has, drafts above all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider.core import Admission, CheckpointWrite, Limits, ScheduledBatch, StepForm, Uncaptured
from outrider.core.checked_request import CheckedRequest
from outrider.core.decode_sizes import size_for, unequal_sizes
from outrider.core.params import SamplingParams
from outrider.core.step_messages import CacheOrders, DraftOrders, StepMode
from outrider.features.embeddings.part import PromptEmbeds
from outrider.features.spans.part import PromptSpans
from outrider.kernels.packet import StepPacket, empty_packet, unpack
from outrider.kernels.step import NUM_COUNTS
from outrider.mixers import EveryPosition, LatentLayer
from outrider.mixers.batch import DecodeQueries, LengthBound, MixedQueries
from outrider.mixers.mixer import EVERY_LENGTH
from outrider.pooling_params import PoolingParams
from outrider.runner.batch import CapturedShape, pack_captured
from outrider.runner.graphs import costs
from outrider.runner.graphs.keys import GraphKey, GraphKeys, SamplerForm
from outrider.runner.graphs.losses import LossRates
from outrider.runner.graphs.mixed_costs import attend_costs, seconds_up_to, useful_sizes, with_larger_sizes
from outrider.runner.graphs.sizes import PROMPTS_AT_START, GraphSizes, next_size
from outrider.runner.plan import RowCheckpoints
from outrider.runner.results import read_result
from outrider.runner.row_state import RowParams
from outrider.runner.step import DeviceResult, DeviceStep
from outrider.runner.worker_ranks import ONE_RANK

LIMITS = Limits(max_requests=64, max_batched_tokens=512, max_len=128, max_drafts=3, vocab_size=100)


def batch_of(num_drafts: list[int], num_known: int = 1) -> ScheduledBatch:
    count = len(num_drafts)
    rows = list(range(1, count + 1))
    return ScheduledBatch(0, list(range(count)), [0] * count, rows, [num_known] * count, num_drafts,
                          [True] * count, [50] * count)


def rows_of(*, prompt_len: int = 1, is_placed: bool = True, pooling: PoolingParams | None = None,
            num_embeds: int = 0, spans: tuple[tuple[int, int], ...] = (), **params: Any) -> Any:
    """Rows that all ask for the same; a request that wants nothing special had them first."""
    made = RowParams()
    for asked in (SamplingParams(temperature=0), pooling or SamplingParams(temperature=0, **params)):
        values = np.zeros((num_embeds, 4), dtype=np.float32)
        embeds = (PromptEmbeds(values, np.arange(num_embeds), ""),) if num_embeds else ()
        request = CheckedRequest((1,) * prompt_len, asked, parts=(PromptSpans(spans), *embeds))
        made.admit([Admission(row, request, computed=0, max_len=9) for row in range(1, 70)])
    return SimpleNamespace(params=made, sampling=SimpleNamespace(lists=SimpleNamespace(
        are_placed=lambda rows: is_placed)))


PLAIN = rows_of()


def graphs(*, is_costly: bool = True, takes_prompts: bool = True, takes_parameters: bool = True,
           takes_checkpoints: bool = False) -> GraphKeys:
    drafting = SimpleNamespace(has_layers=is_costly)
    return GraphKeys(LIMITS, drafting, takes_prompts=takes_prompts,  # type: ignore[arg-type]
                     takes_parameters=takes_parameters, takes_checkpoints=takes_checkpoints)


def served(made: GraphKeys, batch: ScheduledBatch, state: Any = PLAIN) -> GraphKey:
    key = made.key_for(batch, state)
    assert isinstance(key, GraphKey), key
    return key


@pytest.mark.parametrize("num_drafts", [[0], [3], [0] * 9, [3, 1] + [0] * 7, [3] * 9, [1] * 64, [0] * 63 + [2]])
def test_a_batch_fits_its_graph(num_drafts: list[int]) -> None:
    """Nine requests with four drafts among them are thirteen tokens: they fit sixteen padded requests of one token
    each, and still need room for three drafts a request."""
    made, batch = graphs(), batch_of(num_drafts)
    key = served(made, batch)
    assert key.requests >= len(num_drafts) and key.tokens >= batch.num_tokens
    shape = made.shape(key)
    assert shape.max_drafts >= max(num_drafts) and shape.queries == DecodeQueries(1 + shape.max_drafts)
    assert len(pack_captured(batch, shape)) == sum(shape.field_sizes) and shape.logit_rows_are_tokens


def test_large_steps_with_prompts_run_at_their_own_size() -> None:
    """Where launches take 10 ms and a token 0.01 ms, from 2000 tokens on, unless there is little padding to save."""
    times, key = LossRates(10e-3, 10e-6), GraphKey(4, 4096, 0, False, has_prompts=True)
    for num_tokens, own in ((3500, 3520), (3968, 3968), (2000, 2048)):
        assert times.own_size(key, num_tokens) == replace(key, tokens=own)
    assert times.own_size(key, 3969) is None and times.own_size(key, 1999) is None
    assert LossRates().own_size(key, 3500) is None, "nothing was measured"
    largest = graphs().largest_with_prompts()
    assert largest == graphs().largest() in list(graphs().at_start()) and largest.tokens == 512
    assert graphs(takes_prompts=False).largest_with_prompts() is None


@pytest.mark.parametrize(("batch", "state", "reason"), [
    (batch_of([0]), rows_of(logprobs=-1), Uncaptured.MANY_LOGPROBS),
    (batch_of([0]), rows_of(logprobs=21), Uncaptured.MANY_LOGPROBS),
    (batch_of([0]), rows_of(logit_bias={3: 1.0}, is_placed=False), Uncaptured.UNPLACED_LISTS),
    (batch_of([0], num_known=9), rows_of(prompt_logprobs=1, prompt_len=50), Uncaptured.PROMPT_LOGPROBS),
    (batch_of([0], num_known=9), rows_of(pooling=PoolingParams(pooling="mean")), Uncaptured.HIDDEN_STATES),
    (batch_of([0], num_known=9), rows_of(num_embeds=42), Uncaptured.PROMPT_EMBEDS),
    (batch_of([0], num_known=9), rows_of(spans=((2, 20), (41, 50))), Uncaptured.SPANS),
    (batch_of([]), PLAIN, Uncaptured.NO_REQUESTS),
    (batch_of([0] * 65), PLAIN, Uncaptured.TOO_MANY_REQUESTS),
    (batch_of([0], num_known=513), PLAIN, Uncaptured.TOO_MANY_TOKENS),
], ids=["all logprobs", "many logprobs", "unplaced", "prompt logprobs", "hidden states", "embeddings", "spans",
        "no requests", "too many requests", "too many tokens"])
def test_what_no_graph_serves_runs_eagerly(batch: ScheduledBatch, state: Any, reason: Uncaptured) -> None:
    assert graphs().key_for(batch, state) is reason


@pytest.mark.parametrize("inputs", [{"num_embeds": 41}, {"spans": ((2, 41), (50, 60))}], ids=["embeddings", "spans"])
def test_inputs_outside_of_the_step_keep_no_graph_away(inputs: dict[str, Any]) -> None:
    batch, state = batch_of([0], num_known=9), rows_of(**inputs)
    assert graphs().key_for(batch, state) == graphs().key_for(batch, PLAIN)


@pytest.mark.parametrize(("params", "form"), [
    ({"logprobs": 20}, SamplerForm.FULL), ({"min_tokens": 2}, SamplerForm.FULL), ({"top_p": 0.5}, SamplerForm.DRAW),
    ({"logit_bias": {3: 1.0}}, SamplerForm.FULL), ({"presence_penalty": 1.0}, SamplerForm.FULL),
    ({"prompt_logprobs": 1, "prompt_len": 47}, SamplerForm.FULL),
])
def test_parameters_choose_the_sampler(params: dict[str, Any], form: SamplerForm) -> None:
    """Greedy requests: a filter does nothing for them. The prompt of the last one is computed."""
    for batch in (batch_of([0, 0]), batch_of([2] * 9)):
        plain, key = served(graphs(), batch), served(graphs(), batch, rows_of(**params))
        assert key == replace(plain, sampler=form)
        needs = graphs().plan(key).needs
        assert needs.is_draw == (form is SamplerForm.DRAW) and needs.any_penalties == (form is SamplerForm.FULL)
    without = graphs(takes_parameters=False).key_for(batch, rows_of(**params))
    assert without == plain if form is SamplerForm.DRAW else without is Uncaptured.SAMPLING_PARAMETERS


@pytest.mark.parametrize("is_costly", [False, True])
@pytest.mark.parametrize("takes_checkpoints", [False, True])
def test_graphs_of_start_up_stand_in_for_all_decode_steps_with_parameters(is_costly: bool,
                                                                          takes_checkpoints: bool) -> None:
    made = graphs(is_costly=is_costly, takes_checkpoints=takes_checkpoints)
    at_start = set(made.at_start())
    assert sum(key.sampler is SamplerForm.FULL for key in at_start) <= 9 + len(PROMPTS_AT_START)
    asked = rows_of(logprobs=1)
    for requests, drafts, num_wanted in itertools.product((1, 5, 40, 64), range(4), (0, 3)):
        key = served(made, replace(batch_of([drafts] * requests), drafting=DraftOrders(num_wanted)), asked)
        wide = made.wider(key, at_start)
        assert wide is not None and wide.covers(key) and wide.sampler is SamplerForm.FULL
        assert made.wider(replace(key, form=StepForm.SPLIT), at_start) is None


@pytest.mark.parametrize(("num_known", "num_drafts"), [
    (2, [0]), (60, [0] * 5), (7, [3, 0, 1]), (400, [0]), (8, [0] * 64),
])
def test_a_batch_with_prompts_fits_its_graph(num_known: int, num_drafts: list[int]) -> None:
    made, batch = graphs(), batch_of(num_drafts, num_known)
    key = served(made, batch)
    assert key.has_prompts
    assert key.requests >= batch.num_requests and batch.num_tokens <= key.tokens <= batch.num_tokens * 9 // 8 + 64
    shape = made.shape(key)
    assert len(pack_captured(batch, shape)) == sum(shape.field_sizes)
    assert shape.queries == MixedQueries(1 + shape.max_drafts)
    assert shape.logit_rows >= sum(1 + n for n in num_drafts) and not shape.logit_rows_are_tokens


def test_prompts_that_no_graph_serves() -> None:
    prompt, decoding = batch_of([0], num_known=9), batch_of([0])
    assert graphs(takes_prompts=False).key_for(prompt, PLAIN) is Uncaptured.PROMPTS
    assert served(graphs(takes_prompts=False), decoding)


@pytest.mark.parametrize("is_costly", [False, True])
def test_few_graphs_serve_all_numbers_of_drafts_and_proposals(is_costly: bool) -> None:
    """And whatever a batch has or wants fits the graph captured at start-up that stands in for a new one."""
    made = graphs(is_costly=is_costly)
    at_start = set(made.decoding())
    for requests in (1, 5, 40, 64):
        keys = set()
        for drafts, num_wanted in itertools.product(range(4), range(4)):
            if not is_costly and num_wanted not in (0, 3):
                continue  # it always proposes all it can
            batch = replace(batch_of([drafts] + [0] * (requests - 1)), drafting=DraftOrders(num_wanted))
            key = served(made, batch)
            keys.add(key)
            serving = key if key in at_start else made.wider(key, at_start)
            assert serving is not None
            for one in (key, serving):
                assert one.tokens >= batch.num_tokens and one.num_wanted >= max(drafts, num_wanted)
            shape = made.shape(serving)
            assert len(pack_captured(batch, shape)) == sum(shape.field_sizes)
        assert len(keys) <= (7 if is_costly else 5)


@pytest.mark.parametrize("num_requests", [9, 17, 33, 48, 64])
def test_different_numbers_of_drafts_share_sizes_at_most_32_apart(num_requests: int) -> None:
    """With equal numbers a batch has the graph of that number. Of different numbers only their sum counts."""
    made = graphs()
    padded = next_size(made.sizes.requests, num_requests)
    sizes = set()
    for total in range(1, 3 * num_requests):
        base, more = divmod(total, num_requests)
        even = [base + (i < more) for i in range(num_requests)]
        first = [min(3, max(0, total - 3 * i)) for i in range(num_requests)]
        for num_drafts in (even, first):
            key = served(made, replace(batch_of(num_drafts), drafting=DraftOrders(3)))
            sizes.add(key.tokens)
            if more == 0 and num_drafts is even:
                assert key.tokens == padded * (1 + 3), "the graph of start-up that proposes three"
            else:
                most = padded * (1 + max(num_drafts))
                assert num_requests + total <= key.tokens <= min(most, max(padded, num_requests + total + 31))
            packet = unpack(made.shape(key), torch.tensor(pack_captured(batch_of(num_drafts), made.shape(key))))
            assert packet.query_starts.diff().tolist()[:num_requests] == [1 + n for n in num_drafts]
    gaps = [high - low for low, high in itertools.pairwise(sorted(sizes))]
    assert max(gaps) <= 32 and len(sizes) <= 10


@pytest.mark.parametrize("is_costly", [False, True])
def test_graphs_that_are_captured_when_idle_stand_in_for_different_numbers_of_drafts(is_costly: bool) -> None:
    """Start-up has a graph for requests that all have three drafts; half as many drafts need not run on that."""
    made = graphs(is_costly=is_costly)
    later = {*made.decoding(), *made.usual()}
    assert len(later) == len([*made.decoding(), *made.usual()])
    batch = replace(batch_of([3] * 32 + [0] * 32), drafting=DraftOrders(3))
    key, wider = served(made, batch), made.wider(served(made, batch), later)
    assert key == GraphKey(64, 160, 3, True) and wider == GraphKey(64, 192, 3, True)
    assert made.wider(key, list(made.decoding())) == GraphKey(64, 256, 3, True)


@pytest.mark.parametrize(("token_seconds", "stands_in"), [(1e-6, GraphKey(64, 192, 1, True)),
                                                        (1e-4, GraphKey(64, 128, 3, True))])
def test_the_graph_that_loses_the_least_time_stands_in(token_seconds: float, stands_in: GraphKey) -> None:
    """More token rows or two more drafts to propose, by what a token row costs."""
    captured = [GraphKey(64, 128, 3, True), GraphKey(64, 192, 1, True)]
    key, times = GraphKey(40, 80, 1, True), LossRates(1e-3, token_seconds)
    assert GraphKeys.wider(key, captured, partial(times.of_padding, key)) == stands_in


@pytest.mark.parametrize("requests", [9, 16, 17, 32, 33, 40, 64, 250, 256])
@pytest.mark.parametrize("max_drafts", [1, 3, 5])
def test_the_scheduler_fills_sizes_that_are_captured(requests: int, max_drafts: int) -> None:
    most = requests * (1 + max_drafts)
    sizes = [*unequal_sizes(requests, max_drafts), most]
    assert sizes[0] <= requests + 32 and all(high - low <= 32 for low, high in itertools.pairwise(sizes))
    for size in sizes:
        assert size_for(requests, size, max_drafts) == size
        assert size_for(requests, size - 1, max_drafts) in (size, most)
    assert not unequal_sizes(8, max_drafts) and size_for(8, 9, max_drafts) == 8 * (1 + max_drafts)


@pytest.mark.parametrize("num_requests", [1, 3, 5, 17, 33, 48, 64])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_start_up_has_a_graph_for_every_number_of_drafts(num_requests: int, num_drafts: int) -> None:
    """A batch of a new size is padded to more requests, but neither to more drafts nor to a longer proposal."""
    batch = replace(batch_of([num_drafts] * num_requests), drafting=DraftOrders(num_drafts))
    for takes_checkpoints in (False, True):
        made = graphs(takes_checkpoints=takes_checkpoints)
        captured = [*made.decoding_at_start(), *made.fewer_drafts()]
        assert len(captured) == len(set(captured))
        wider = made.wider(served(made, batch), captured)
        assert wider is not None
        assert wider.num_wanted == num_drafts and wider.tokens == wider.requests * (1 + num_drafts)
    assert not list(graphs(is_costly=False).fewer_drafts()), "their proposals cost nothing"


def test_costs_of_proposals_are_measured_on_graphs_that_serve_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured to be measured alone but steps that check drafts and propose none, which are dropped."""
    made, timed = graphs(), list[GraphKey]()
    at_start = {*made.decoding_at_start(), *made.fewer_drafts()}

    @contextmanager
    def borrowed(key: GraphKey) -> Iterator[Any]:
        timed.append(key)
        yield SimpleNamespace(replay=lambda host_turn: None)

    def seconds(run: Any, device: torch.device) -> float:
        """A millisecond for each token, ten more for the first draft and two for every other."""
        return 1e-3 * (timed[-1].tokens + 10 * (timed[-1].num_wanted > 0) + 2 * max(0, timed[-1].num_wanted - 1))

    monkeypatch.setattr(costs, "best_seconds", seconds)
    monkeypatch.setattr(costs, "sampler_costs", lambda step, graphs: (0.0, 0.0, 0.0))
    device = torch.device("cpu")
    step = SimpleNamespace(drafter=SimpleNamespace(attention_layers=(None,)), state=SimpleNamespace(device=device),
                           pool=SimpleNamespace(data=torch.zeros(1)))
    lent = cast(Any, SimpleNamespace(keys=made, borrowed=borrowed))
    found = costs.measure_costs(cast(DeviceStep, step), LIMITS, lent, [1, 4, 16, 64, 256])
    assert {key for key in timed if key not in at_start} == {GraphKey(64, 256, 0, True)}
    assert found.drafting == tuple((n, pytest.approx(10e-3), pytest.approx(2e-3)) for n in (1, 8, 64))


@pytest.mark.parametrize("seed", range(8))
def test_a_busy_machine_measures_nearly_an_idle_ones_draft_cost(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """All steps of a while take up to twice as long, and some are held up: differences of times would be noise."""
    chance, slowness = random.Random(seed), [1.0]

    def seconds(step: Any, limits: Any, graphs: None, tokens: int, num_wanted: int, repeats: int) -> float:
        """7 ms and one for each token; 1.2 for a first draft, 0.5 for each further one."""
        if chance.random() < 0.05:
            slowness[0] = chance.uniform(1, 2)
        own = 7 + tokens + (1.2 + 0.5 * (num_wanted - 1) if num_wanted else 0)
        return min(own * slowness[0] * (1.5 if chance.random() < 0.1 else 1) for _ in range(repeats))

    monkeypatch.setattr(costs, "step_seconds", seconds)
    step = SimpleNamespace(drafter=SimpleNamespace(attention_layers=(None,)), pool=SimpleNamespace(data=torch.zeros(1)),
                           state=SimpleNamespace(device=torch.device("cpu")), ranks=ONE_RANK)
    found = costs.measure_costs(cast(DeviceStep, step), LIMITS)
    assert list(found.seconds) == sorted(found.seconds)
    assert found.draft(1) / found.step(1) == pytest.approx(1.2 / 8, rel=0.5)


def test_short_contexts_have_graphs_of_their_own() -> None:
    """Up to 40 tokens nothing is looked for: 37 and three drafts, which are guessed behind the longest context."""
    drafting: Any = SimpleNamespace(has_layers=True)
    made = GraphKeys(LIMITS, drafting, takes_parameters=True, whole_len=40)
    at_start, later = set(made.decoding()), list(made.usual())
    for drafts in ([0], [3], [1] * 9, [0] * 64):
        short, long = (replace(batch_of(drafts), bounds=[1] * (len(drafts) - 1) + [most]) for most in (37, 38))
        key, usual = served(made, short), served(made, long)
        assert key == replace(usual, longest=37) == made.shortened(usual) and usual == served(graphs(), long)
        assert made.shape(key) == replace(made.shape(usual), max_length=LengthBound(37))
        assert usual.covers(key) and not key.covers(usual) and not replace(key, longest=36).covers(key)
        wide = made.wider(key, at_start)
        assert wide is not None and wide.longest == 37 and made.wider(usual, at_start) is None
        assert made.wider(key, {usual, key}) == key and made.wider(usual, {key}) is None
        assert LossRates().of_padding(key, usual) > 0 == LossRates().of_padding(key, key)
        assert made.wider(usual, set(later)) is not None, "there once nobody has waited for a while"
    assert {key.longest for key in at_start} == {37} and not at_start & set(later)
    plain = GraphKeys(LIMITS, drafting, takes_parameters=True)
    assert [replace(key, longest=EVERY_LENGTH) for key in made.decoding()] == list(
        plain.decoding())
    is_long = [key.longest == EVERY_LENGTH for key in later]
    assert is_long == sorted(is_long) and sum(is_long) == 2 * len(made.sizes.at_start), "the first to be captured"
    assert len(plain_later := list(plain.usual())) == is_long.count(False)
    assert {key.longest for key in plain_later} == {EVERY_LENGTH}
    assert {key.longest for key in made.behind_long_contexts()} == {EVERY_LENGTH}
    likely = set(made.likely())
    assert {key.longest for key in likely} == {37} and not likely & at_start
    assert served(made, replace(batch_of([1] * 9), bounds=[9] * 9)) in likely
    prompt = served(made, replace(batch_of([0], num_known=9), bounds=[9]))
    assert prompt.longest == EVERY_LENGTH
    for nothing in (3, 131, EVERY_LENGTH):  # no context is so short, or all are
        unlimited = GraphKeys(LIMITS, drafting, whole_len=nothing)
        assert served(unlimited, short).longest == EVERY_LENGTH and not list(unlimited.behind_long_contexts())


def writes(*targets: tuple[int, int]) -> list[CheckpointWrite]:
    """(row, boundary) each."""
    return [CheckpointWrite(10 + i, row, boundary, [2 * i, 2 * i + 1]) for i, (row, boundary) in enumerate(targets)]


def test_checkpoints_are_integers_of_a_captured_batch() -> None:
    """One boundary per padded request, or -1; a step without checkpoints has none, and other integers are the same."""
    made, batch = graphs(), replace(batch_of([1, 0, 2]), cache=CacheOrders(checkpoints=writes((3, 48), (1, 32))))
    key = served(made, batch)
    assert key.takes_checkpoints and key != served(made, batch_of([1, 0, 2]))
    shape = made.shape(key)
    packet = unpack(shape, torch.tensor(pack_captured(batch, shape)))
    assert packet.boundaries.tolist() == [32, -1, 48] + [-1] * (key.requests - 3)
    plain = made.shape(replace(key, takes_checkpoints=False))
    without = unpack(plain, torch.tensor(pack_captured(batch, plain)))
    assert without.boundaries.tolist() == [-1] * key.requests
    for name in set(StepPacket._fields) - {"boundaries"}:
        assert torch.equal(getattr(packet, name), getattr(without, name)), name


def test_an_empty_packet_is_all_padding() -> None:
    shape = CapturedShape.decoding(4, 8, 3, window=3, max_len=80)
    packet = unpack(shape, empty_packet(shape, torch.device("cpu")))
    expected = {"request_of": [3] * 8, "offset": [8] * 8, "logit_request": [3] * 8, "logit_draft": [4] * 8,
                "boundaries": [-1] * 4}
    for name, values in packet._asdict().items():
        assert values.tolist() == expected.get(name, [0] * len(values)), name
    assert [len(values) for values in packet] == shape.field_sizes


def test_several_checkpoints_of_a_request_and_folds_run_eagerly() -> None:
    several = replace(batch_of([0, 0]), cache=CacheOrders(checkpoints=writes((1, 32), (2, 48), (1, 48))))
    assert graphs().key_for(several, PLAIN) is Uncaptured.SEVERAL_CHECKPOINTS
    assert graphs().key_for(replace(batch_of([0]), cache=CacheOrders(folds=writes((2, 16)))), PLAIN) is Uncaptured.FOLDS
    with pytest.raises(ValueError, match="several checkpoints"):
        pack_captured(several, CapturedShape.decoding(2, 2, 0, window=0, max_len=80, takes_checkpoints=True))


def test_a_split_step_has_a_graph_of_its_own() -> None:
    made, batch = graphs(takes_checkpoints=True), batch_of([1, 0, 2])
    whole, split = served(made, batch), served(made, replace(batch, mode=StepMode(form=StepForm.SPLIT)))
    assert split == replace(whole, form=StepForm.SPLIT) and made.shape(split) == made.shape(whole)
    assert all(key.form is StepForm.WHOLE for key in made.at_start()), "captured when it is met"


def test_what_was_written_by_request_is_reported_by_checkpoint() -> None:
    batch = replace(batch_of([0, 0, 0]), cache=CacheOrders(checkpoints=writes((3, 48), (1, 32)), folds=writes((9, 16))))
    counts, run = torch.zeros(4, NUM_COUNTS, dtype=torch.int64), torch.zeros(4, 1, dtype=torch.int64)
    for flags, ids in (([1, 0, 0, 0, 0], [11]), ([0, 1, 1, 1, 0], [10]), ([1, 1, 1, 1, 1], [10, 11, 10])):
        written, folded = torch.tensor(flags, dtype=torch.bool).split((4, 1))
        result = DeviceResult(counts, run, None, None, RowCheckpoints(), written, folded)
        assert read_result(batch, result, 0.0).checkpoints == ids


def test_the_ladders_end_at_the_most_there_may_be() -> None:
    for most, max_drafts in itertools.product((1, 3, 8, 64, 200, 256), (0, 3)):
        sizes = GraphSizes.from_limits(replace(LIMITS, max_requests=most, max_drafts=max_drafts))
        assert sizes.requests[-1] == sizes.at_start[-1] == sizes.prompt_requests[-1] == most
        assert sizes.prompt_tokens[-1] == LIMITS.max_batched_tokens
        for ladder in (sizes.requests, sizes.at_start, sizes.prompt_requests, sizes.prompt_tokens):
            assert ladder == sorted(set(ladder))
        assert set(sizes.at_start) <= set(sizes.requests), "no size is captured that no batch asks for"
        assert set(sizes.full_at_start) <= set(sizes.at_start)
        padded = [requests / next_size(sizes.at_start, requests) for requests in range(33, most + 1)]
        assert all(share > (1 / 2 if max_drafts else 2 / 3) for share in padded)


def test_graphs_of_start_up_stand_in_for_steps_with_prompts() -> None:
    for takes_checkpoints in (False, True):
        at_start = list(graphs(takes_checkpoints=takes_checkpoints).at_start())
        for requests, tokens, serving in ((1, 64, 256), (4, 256, 256), (16, 256, 512), (4, 320, 512), (16, 512, 512)):
            saves = takes_checkpoints and requests * tokens <= 1024
            key = GraphKey(requests, tokens, 0, False, saves, has_prompts=True)
            wide = GraphKeys.wider(key, at_start)
            assert wide is not None and wide.tokens == serving


def test_sizes_that_take_longer_than_larger_ones_are_left_out() -> None:
    """The larger size is given where as many tokens are asked for as fit into a time."""
    assert useful_sizes({64: 5.0, 128: 6.0, 192: 9.0, 256: 9.5, 320: 8.0}) == {64: 5.0, 128: 6.0, 320: 8.0}
    assert list(useful_sizes({64: 1.0, 128: 1.0})) == [64, 128]


def test_sizes_are_measured_up_to_twice_the_bound_or_twice_the_smallest_step() -> None:
    """A model whose weights take longer than the bound computes many tokens of a prompt in hardly more time."""
    sizes = [64, 128, 256, 512, 1024]
    assert seconds_up_to(10.0, sizes, lambda size: size / 10) == {64: 6.4, 128: 12.8, 256: 25.6}
    assert list(seconds_up_to(10.0, sizes, lambda size: 30 + size / 16)) == [64, 128, 256, 512, 1024]
    assert list(seconds_up_to(10.0, sizes, lambda size: 30 + size / 8)) == [64, 128, 256, 512]


def test_sizes_beyond_the_measured_ones_take_time_in_proportion_to_their_tokens() -> None:
    sizes = [64, 128, 256, 512, 1024]
    assert with_larger_sizes({64: 5.0, 256: 8.0}, sizes) == {64: 5.0, 256: 8.0, 512: 16.0, 1024: 32.0}
    assert with_larger_sizes({64: 5.0}, [64]) == {64: 5.0}


def test_latent_layers_have_no_costs_of_attention_over_keys_and_values() -> None:
    """They have neither key/value heads nor windows: a model of nothing else must start all the same."""
    layers = [LatentLayer(index, 4, 16, 8, 1.0, EveryPosition()) for index in range(2)]
    step = SimpleNamespace(model=SimpleNamespace(attention_layers=layers),
                           drafter=SimpleNamespace(attention_layers=layers[:1]))
    assert attend_costs(cast(DeviceStep, step)) == ()
