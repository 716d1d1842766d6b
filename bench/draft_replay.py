"""How near do the chosen numbers of drafts come to the best ones? Replays a head's recorded drafts with step costs.

    python bench/draft_replay.py record smollm2 DRAFTER spec_bench.jsonl chains.jsonl
    python bench/draft_replay.py replay chains.jsonl --costs cpu,h200,h200-8b --batches 1,4,8,64

`record` notes the chain of 4 drafts that the head makes behind every token of a text, and how many of each are right.
From these chains follow the runs of every way to choose numbers of drafts. `replay` runs the engine's own scheduler in
simulated time, with a device that answers from the chains. Speeds are tokens per second over those without drafts:

- fixed: the best of all fixed numbers of drafts;
- own: the best fixed number of each request, told beforehand (of one request at a time);
- chosen: by the chooser of the engine, which learns on the way;
- told: by the same chooser, which is told each request's rates and how often drafts of each level are right.

A drafter that rested has not seen the text since, and is right less often for a while (`SEEN_FACTORS`, measured with
`record --rest 40`: the head then rests for 40 steps, proposes for 40, and so on).
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from watched_drafts import DEPTH, FIRST_SEED, WatchedDrafts

from outrider import LLM
from outrider.benchmarks.prompt_sets import read_sets
from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullSpec
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, SamplingParams, ScheduledBatch, StepResult
from outrider.core.checked_request import CheckedRequest
from outrider.core.costs import DraftCost, StepCosts
from outrider.core.decode_sizes import FEW, size_for
from outrider.core.draft_confidence import CHANCE_BITS, NUM_LEVELS, WEIGHT_BITS, levels_of
from outrider.sched.request import Request
from outrider.sched.scheduler import Scheduler
from outrider.speculation.acceptance import Acceptance
from outrider.speculation.choosers import auto_drafts
from outrider.speculation.draft_counts import DraftCounts, DraftPlan, FixedDrafts
from outrider.speculation.individual_drafts import IndividualDrafts
from outrider.speculation.sized_drafts import SizedDrafts
from outrider.speculation.step_drafts import StepDrafts

PROMPT = 16  # tokens of a prompt in a replay
# Of drafts that are right if their head has seen the whole text, those still right if it has seen so many tokens.
SEEN_FACTORS = {1: 0.02, 2: 0.1, 4: 0.3, 9: 0.44, 17: 0.64, 25: 0.8, 41: 0.9}
COSTS = {  # milliseconds
    "cpu": StepCosts((1, 2, 3, 4, 5, 8, 16, 20), (7.4, 8.1, 9.5, 10.8, 12.8, 18.0, 33.8, 41.2), drafting=(
        DraftCost(1, 2.0, 1.3),)),
    "cpu-8bit": StepCosts((1, 2, 3, 4, 5, 8, 16, 32, 48), (4.04, 4.18, 4.35, 4.44, 4.6, 4.97, 6.19, 8.02, 9.96),
                          drafting=(DraftCost(1, 1.44, 1.27),)),
    "h200": StepCosts((1, 64, 128, 256, 512), (0.62, 0.70, 0.80, 1.05, 1.60),
                      drafting=(DraftCost(1, 0.09, 0.07), DraftCost(64, 0.11, 0.08)), is_padded=True),
    "h200-8b": StepCosts((1, 64, 128, 256, 512), (3.6, 4.0, 4.5, 6.3, 10.5), drafting=(DraftCost(1, 0.3, 0.25),),
                         is_padded=True),
}


class Chain(NamedTuple):
    """The drafts behind a token: how many are right, and their levels."""

    num_right: int
    levels: int


class Text(NamedTuple):
    """A recorded request: the chain behind each of its tokens but the first and the last few."""

    category: str
    chains: list[Chain]

    @property
    def rates(self) -> list[float]:
        """The share of drafts that is right of those that are reached, by place."""
        rights = [chain.num_right for chain in self.chains]
        reached = [sum(right >= place for right in rights) for place in range(DEPTH + 1)]
        return [after / max(1, before) for before, after in zip(reached, reached[1:], strict=False)]


@dataclass(slots=True)
class Row:
    """The device's progress with a request. Lengths are in tokens of output, negative in the prompt."""

    text: Text
    known: int = 0  # sampled tokens
    seen_from: int = -PROMPT  # the drafter has seen all tokens from here on
    computed: int = -PROMPT
    waiting: Chain = field(default=Chain(0, 0))
    num_waiting: int = 0


class RecordedDevice:
    """Answers batches from recorded chains."""

    def __init__(self, seed: int = 0) -> None:
        self.rows: dict[int, Row] = {}  # by request
        self._chance = random.Random(seed)

    def run(self, batch: ScheduledBatch) -> StepResult:
        counts = batch.num_drafts if batch.drafting.sharing is None else self._shared(batch)
        parts = zip(batch.request_ids, batch.epochs, batch.num_known, counts, batch.samples, strict=True)
        return StepResult(batch.step, [self._advance(batch.drafting.num_wanted, *part) for part in parts])

    def _shared(self, batch: ScheduledBatch) -> list[int]:
        """Drafts of each request, where the device shares token rows out by how sure the drafter is."""
        sharing, found = batch.drafting.sharing, []
        assert sharing is not None
        for index, (request_id, weight) in enumerate(zip(batch.request_ids, sharing.weights, strict=True)):
            row, gain = self.rows[request_id], 1.0
            for place, level in enumerate(levels_of(row.waiting.levels, min(row.num_waiting, batch.num_drafts[index]))):
                chance = sharing.chances[place * NUM_LEVELS + level] / (1 << CHANCE_BITS)
                gain *= min(0.99, chance * weight / (1 << WEIGHT_BITS))
                found.append((-gain, index))
        taken = [index for _, index in sorted(found)[: sharing.total]]
        return [taken.count(index) for index in range(batch.num_requests)]

    def _advance(self, num_wanted: int, request_id: int, epoch: int, num_known: int, num_drafts: int,
                 samples: bool) -> RequestResult:
        row = self.rows[request_id]
        end = len(row.text.chains)
        if row.known >= end:
            return RequestResult(request_id, epoch, [], 0, 0, 0)
        alive = min(num_drafts, row.num_waiting) if samples else 0
        accepted = min(row.waiting.num_right, alive, end - row.known - 1) if alive else 0
        row.computed += num_known + accepted
        row.known += (1 + accepted) * samples
        if not num_wanted:
            row.seen_from = row.computed
        row.num_waiting = num_wanted * samples
        if row.num_waiting and row.known < end:
            row.waiting = self._proposal(row)
        finish = Finish.LENGTH if row.known >= end else Finish.NO
        levels = row.waiting.levels & (1 << 4 * row.num_waiting) - 1 if row.num_waiting else 0
        return RequestResult(request_id, epoch, [1] * ((1 + accepted) * samples), num_known + accepted, alive, accepted,
                             row.num_waiting, finish, levels=levels)

    def _proposal(self, row: Row) -> Chain:
        chain, num_seen = row.text.chains[row.known], row.computed - row.seen_from
        if row.seen_from == -PROMPT:
            return chain
        factor = max((share for least, share in SEEN_FACTORS.items() if num_seen >= least), default=0.0)
        return chain if self._chance.random() < factor else Chain(0, chain.levels)


class Replay(NamedTuple):
    """What came of decoding texts."""

    tokens: int
    seconds: float
    num_steps: int
    num_drafts: int

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def replay(texts: Sequence[Text], drafts: DraftCounts, costs: StepCosts, batch_size: int) -> Replay:
    """Decode the texts, the next one as soon as one of `batch_size` requests has ended."""
    depth = 2 if costs.is_padded else 1
    limits = Limits(batch_size, 4096, max(1024, batch_size * (1 + DEPTH)), DEPTH, 32000, steps_in_flight=depth)
    layout = plan_groups([LayerCache(0, FullSpec(1, 8, 2))], checkpoint_interval=64)
    cache = CacheManager(layout, PagePool(batch_size * 600), limits, lookahead=DEPTH, enable_prefix_caching=False)
    scheduler, device = Scheduler(cache, limits, speculation=StepDrafts(drafts)), RecordedDevice()
    coming, in_flight = deque(enumerate(texts)), deque[StepResult]()
    tokens, seconds, num_steps, num_drafts = 0, 0.0, 0, 0
    while coming or scheduler.has_work:
        while coming and scheduler.num_running + scheduler.num_waiting < batch_size:
            request_id, text = coming.popleft()
            device.rows[request_id] = Row(text)
            prompt = CheckedRequest((1,) * PROMPT, SamplingParams(temperature=0.0, seed=0, ignore_eos=True))
            scheduler.add(Request(request_id, prompt, PROMPT + len(text.chains)))
        while len(in_flight) < depth and (batch := scheduler.schedule()) is not None:
            result = device.run(batch)
            in_flight.append(result)
            seconds += step_cost(batch, costs)
            num_steps += batch.num_requests
            num_drafts += sum(part.num_drafted for part in result.requests)
            tokens += sum(len(part.run) for part in result.requests)
        if in_flight:
            scheduler.update(in_flight.popleft())
    return Replay(tokens, seconds, num_steps, num_drafts)


def step_cost(batch: ScheduledBatch, costs: StepCosts) -> float:
    """A captured step has the token rows of its graph."""
    requests, rows = batch.num_requests, batch.num_tokens
    if costs.is_padded and max(batch.num_known) == 1 and all(batch.samples):
        most = max(batch.num_drafts)
        if requests <= FEW:
            rows = requests * (1 + max(most, batch.drafting.num_wanted))
        else:
            total = rows if batch.drafting.sharing is None else requests + batch.drafting.sharing.total
            rows = requests * (1 + most) if total == requests * (1 + most) else size_for(requests, total, most)
    return costs.step(rows) + costs.draft(batch.drafting.num_wanted, requests)


class TrueAcceptance(Acceptance):
    """Knows the rates of every request."""

    are_alike = False

    def __init__(self, texts: Iterable[Text]) -> None:
        super().__init__(DEPTH)
        self._true: dict[int, list[float]] = {}
        for request_id, text in enumerate(texts):
            gains, reached = [], 1.0
            for rate in text.rates:
                reached *= rate
                gains.append(reached)
            self._true[request_id] = gains

    def observe(self, drafts: Sequence[tuple[int, int, int]]) -> None:
        pass

    def expect(self, proposed: Sequence[tuple[int, list[float]]]) -> None:
        pass

    def learn_spread(self, request_ids: Iterable[int]) -> None:
        pass

    def gains(self, request_id: int) -> list[float]:
        return self._true[request_id]


def told_chooser(texts: Sequence[Text], costs: StepCosts) -> SizedDrafts | IndividualDrafts:
    chooser = auto_drafts(DEPTH, costs, always_propose=False)
    chooser.acceptance = TrueAcceptance(texts)
    for request_id, text in enumerate(texts):
        for chain in text.chains:
            chooser.chances.observe([(request_id, chain.levels, DEPTH, chain.num_right)])
    return chooser


def compare(name: str, texts: Sequence[Text], costs: StepCosts, batch: int) -> None:
    fixed = [replay(texts, FixedDrafts(count), costs, batch) for count in range(DEPTH + 1)]
    plain = fixed[0].speed
    best = max(range(DEPTH + 1), key=lambda count: fixed[count].speed)
    chosen = replay(texts, auto_drafts(DEPTH, costs, always_propose=False), costs, batch)
    told = replay(texts, told_chooser(texts, costs), costs, batch)
    shown = f"fixed {fixed[best].speed / plain:.3f} ({best})"
    if batch == 1:
        seconds = sum(min(replay([text], FixedDrafts(count), costs, 1).seconds for count in range(DEPTH + 1))
                      for text in texts)
        shown += f", own {fixed[0].tokens / seconds / plain:.3f}"
    print(f"{name}: {shown}, chosen {chosen.speed / plain:.3f}, told {told.speed / plain:.3f}; chosen: "
          f"{chosen.tokens / chosen.num_steps:.2f} tokens and {chosen.num_drafts / chosen.num_steps:.2f} drafts a step")


class RestingDrafts(FixedDrafts):
    """Rests for some steps and proposes for as many, in turn. Drafts are not checked."""

    def __init__(self, watched: WatchedDrafts, num_rests: int) -> None:
        super().__init__(DEPTH)
        self._watched, self._num_rests, self._step = watched, num_rests, 0

    def choose(self, requests: list[Request], is_exact: bool) -> DraftPlan:
        self._step += 1
        at = self._step % (2 * self._num_rests) - self._num_rests
        self._watched.num_steps = max(0, at)
        return DraftPlan([0] * len(requests), DEPTH if at >= 0 else 0)


def record(model: str, drafter: str, prompts: str, out: str, count: int, max_tokens: int, num_rests: int) -> None:
    watched = WatchedDrafts.install()
    config = {"method": "eagle3", "model": drafter, "num_speculative_tokens": DEPTH, "auto": False}
    with LLM(model, speculative_config=config, max_num_seqs=16, enable_prefix_caching=False) as llm:
        if num_rests:
            llm.engine.scheduler.speculation = StepDrafts(RestingDrafts(watched, num_rests))
        asked = [(own.name, ids) for own in read_sets([prompts]) for ids in own.encode(llm.get_tokenizer(), count)]
        params = [SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, speculative=False,
                                 seed=FIRST_SEED + index) for index in range(len(asked))]
        outputs = llm.generate([{"prompt_token_ids": ids} for _, ids in asked], params, use_tqdm=False)
    with open(out, "w", encoding="utf-8") as file:
        for index, ((category, ids), output) in enumerate(zip(asked, outputs, strict=True)):
            found = watched.chains(FIRST_SEED + index, ids + list(output.outputs[0].token_ids), len(ids))
            chains = [[position, *chain] for position, chain in found.items()]
            file.write(json.dumps({"category": category, "chains": chains}) + "\n")


def read_texts(path: str) -> list[Text]:
    with open(path, encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    texts = [Text(own["category"], [Chain(right, levels) for _, right, levels, *_ in own["chains"]]) for own in found]
    return [text for text in texts if len(text.chains) >= 2]


def report(texts: list[Text], names: list[str], batches: list[int]) -> None:
    for name in names:
        for batch in batches:
            if batch == 1:
                for category in dict.fromkeys(text.category for text in texts):
                    compare(f"{name}, {category}", [text for text in texts if text.category == category],
                            COSTS[name], 1)
                compare(f"{name}, all one after the other", texts, COSTS[name], 1)
            mixed = random.Random(batch).sample(texts, len(texts))
            compare(f"{name}, all mixed, batch {batch}", mixed, COSTS[name], batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    replaying = commands.add_parser("replay")
    replaying.add_argument("chains", help="written by record")
    replaying.add_argument("--costs", default="cpu,h200", help=", ".join(COSTS))
    replaying.add_argument("--batches", default="1,4,8,64")
    recording = commands.add_parser("record")
    recording.add_argument("model")
    recording.add_argument("drafter")
    recording.add_argument("prompts", help="file of Spec-Bench's form")
    recording.add_argument("out")
    recording.add_argument("--prompts-per-set", type=int, default=6)
    recording.add_argument("--max-tokens", type=int, default=160)
    recording.add_argument("--rest", type=int, default=0)
    args = parser.parse_args()
    if args.command == "record":
        record(args.model, args.drafter, args.prompts, args.out, args.prompts_per_set, args.max_tokens, args.rest)
        return
    report(read_texts(args.chains), args.costs.split(","), [int(count) for count in args.batches.split(",")])


if __name__ == "__main__":
    main()
