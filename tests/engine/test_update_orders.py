"""Random orders of what a trainer does to an engine: updates of all kinds, whole and broken, pauses, sleep, adapters.

Every token must be the one that a fresh engine with the weights of its version computes, and requests that go on in
place must get the tokens of transformers, which keeps the cache of the old weights as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM
from outrider.core.outputs import CompletionOutput
from outrider.lora_request import LoRARequest
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.runner.commands import WeightsIncomplete
from tests.adapters.folders import write_adapter
from tests.engine.harness import greedy, prompt_of, with_other_weights
from tests.engine.test_update_weights import mtp, speculative
from tests.models.oracle import hf_model, make_folder

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 200))]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_model_len": 96, "max_num_seqs": 16,
                            "num_pages": 1024, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
NUM_EVENTS = 14
STARTS = [prompt_of(seed, 24) for seed in range(3)]  # prompts begin alike, so that prefixes hit
FEW = [5, 6, 7, 8]  # tokens of answers in which drafts of n-grams are accepted
Tensors = dict[str, torch.Tensor]


class Weights:
    """One of the sets of weights that versions have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: Tensors = load_file(folder / "model.safetensors")
        self.truncated = folder / "truncated.safetensors"
        whole = (folder / "model.safetensors").read_bytes()
        self.truncated.write_bytes(whole[: len(whole) * 2 // 3])

    @cached_property
    def fresh(self) -> LLM:
        return LLM(str(self.folder), **SETTINGS)

    @cached_property
    def reference(self) -> Any:
        return hf_model(self.folder, torch.float64, experts_implementation="eager")


@dataclass
class Rig:
    sets: list[Weights]
    adapter: LoRARequest
    drafts: list[Any]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Rig]]:
    made: dict[str, Rig] = {}

    def rig(kind: str) -> Rig:
        if kind not in made:
            path = tmp_path_factory.mktemp("orders")
            folder, drafts = (make_folder("llama", path / "llama"), None) if kind == "attention" else mtp(
                "nemotron_h" if kind == "Mamba-2" else "qwen3_5_moe")(path)
            others = [folder, with_other_weights(folder, path / "second")]
            others.append(with_other_weights(others[1], path / "third"))
            model = load_model(resolve(str(folder)), dtype=torch.float64, device="cpu")
            adapter = write_adapter(path / "adapter", model, seed=5, names=("q_proj", "down_proj"))
            made[kind] = Rig([Weights(each) for each in others], LoRARequest("tuned", 1, str(adapter)),
                             [None, speculative("ngram"), drafts])
        return made[kind]

    with ExitStack() as stack:
        yield rig
        for each in made.values():
            for weights in each.sets:
                if "fresh" in vars(weights):
                    stack.enter_context(weights.fresh)


@dataclass
class Asked:
    prompt: list[int]
    adapter: LoRARequest | None
    version: int  # of the weights when it was added
    output: CompletionOutput | None = None
    in_place: set[int] = field(default_factory=set)  # versions from whose predecessors it went on in place
    may_be_again: bool = False  # a refused update may have preempted it since: then it was computed again


class Order:
    """One random order. Remembers what must be true."""

    def __init__(self, rig: Rig, llm: LLM, chance: random.Random) -> None:
        self.rig, self.llm, self.chance = rig, llm, chance
        self.held: int | None = 0  # the set of weights that the engine has; None: it must refuse requests
        self.of_version = [0]  # the set of each version
        self.asked: dict[str, Asked] = {}
        self.is_in_place = False
        self.seen: set[str] = set()

    @property
    def live(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if asked.output is None]

    def run(self) -> None:
        events = [self.ask, self.ask, self.step, self.step, self.update, self.update, self.session, self.fail_first,
                  self.fail_later, self.update_asleep, self.pause, self.pause, self.crowd]
        for _ in range(NUM_EVENTS):
            mending = [self.update, self.session, self.fail_first, self.fail_later, self.update_asleep]
            event = self.chance.choice(events if self.held is not None else mending)
            self.seen.add(event.__name__)
            event()
            assert self.llm.weights_version == len(self.of_version) - 1
            if self.held is None:
                with pytest.raises(WeightsIncomplete):
                    self.ask()
            self.llm.engine.scheduler.check_integrity()
        if self.held is None:
            self.update()
        self.ask()
        self.finish()

    # Requests

    def ask(self) -> None:
        start = self.chance.choice(STARTS)
        end = prompt_of(self.chance.randrange(4), self.chance.randrange(1, 9))
        prompt = start[: self.chance.choice((8, 16, 24))] + end
        adapter = self.rig.adapter if self.chance.random() < 0.2 else None
        name = str(len(self.asked))
        params = greedy(self.chance.randrange(4, 24), ignore_eos=True, allowed_token_ids=FEW)
        self.llm.llm_engine.add_request(name, prompt, params, lora_request=adapter)
        self.asked[name] = Asked(prompt, adapter, len(self.of_version) - 1)

    def crowd(self) -> None:
        if self.held is not None:
            for _ in range(64):
                self.ask()
            self.step()
            self.update()

    def step(self) -> None:
        for _ in range(self.chance.randrange(1, 8)):
            if not self.llm.engine.has_work:
                return  # else it would wait for another thread
            self.take()

    def take(self) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                self.asked[output.request_id].output = output.outputs[0]

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.take()

    # Updates

    def took(self, number: int) -> None:
        """An update was whole."""
        self.held = number
        self.of_version.append(number)
        if self.is_in_place:
            for asked in self.live:
                asked.in_place.add(len(self.of_version) - 1)

    def update(self) -> None:
        number = self.chance.randrange(len(self.rig.sets))
        weights, llm = self.rig.sets[number], self.llm
        match self.chance.randrange(4):
            case 0:
                llm.update_weights(weights.folder / "model.safetensors")
            case 1:
                llm.update_weights(weights.tensors)
            case 2:
                for pair in weights.tensors.items():
                    llm.load_weights([pair])
                llm.reset_prefix_cache()
            case 3:
                llm.start_weight_update()
                llm.load_weights(weights.tensors)
                llm.finish_weight_update()
        self.took(number)

    def session(self) -> None:
        """An update in chunks, between which others try what they must not."""
        number = self.chance.randrange(len(self.rig.sets))
        llm, pairs = self.llm, list(self.rig.sets[number].tensors.items())
        self.chance.shuffle(pairs)
        llm.start_weight_update()
        size = self.chance.randrange(3, 20)
        for start in range(0, len(pairs), size):
            llm.load_weights(pairs[start : start + size])
            match self.chance.randrange(5):
                case 0:
                    with pytest.raises(ValueError, match="is in progress: end it"):
                        llm.start_weight_update()
                case 1:
                    with pytest.raises(ValueError, match="an update of weights is in progress"):
                        llm.update_weights(self.rig.sets[0].tensors)
                case 2:
                    with pytest.raises(WeightsIncomplete):
                        self.ask()
                case 3:  # the adapter is loaded, its request is refused
                    with pytest.raises(WeightsIncomplete):
                        llm.enqueue([STARTS[0]], lora_request=self.rig.adapter)
                case 4:
                    self.step()
        llm.finish_weight_update()
        self.took(number)

    def bad_pair(self) -> tuple[str, torch.Tensor]:
        pairs = [(name, tensor) for name, tensor in self.rig.sets[0].tensors.items()
                 if tensor.dim() == 2 and not name.startswith("mtp.")]  # which a model without drafts does not read
        name, tensor = self.chance.choice(pairs)
        broken = tensor.clone()
        broken[0, 0] = torch.nan
        return self.chance.choice([(name, tensor[1:]), (name, broken), ("model.extra", tensor), (name, tensor.int())])

    def fail_first(self) -> None:
        """Refused before anything changes."""
        pair = self.bad_pair()
        for asked in self.live if not self.is_in_place else ():
            asked.may_be_again = bool(asked.in_place)
        tries: list[Callable[[], Any]] = [
            lambda: self.llm.update_weights(self.rig.sets[1].truncated),
            lambda: self.llm.update_weights(self.rig.sets[1].tensors | dict([pair])),
            lambda: self.llm.load_weights([pair]),
            lambda: self.llm.load_weights(self.rig.sets[1].truncated),  # type: ignore[arg-type]
        ]
        with pytest.raises(Exception, match="."):
            self.chance.choice(tries)()

    def fail_later(self) -> None:
        """An update that ends in the middle: by a bad tensor, or with its trainer."""
        weights = self.rig.sets[self.chance.randrange(len(self.rig.sets))]
        pairs = [pair for pair in weights.tensors.items() if not pair[0].startswith("mtp.")]  # those need not come
        num = self.chance.randrange(1, len(pairs))

        def killed() -> Iterator[tuple[str, torch.Tensor]]:
            yield from pairs[:num]
            raise KeyboardInterrupt

        self.held = None
        match self.chance.randrange(3):
            case 0:
                with pytest.raises(WeightsIncomplete):
                    self.llm.load_weights([*pairs[:num], ("model.extra", pairs[0][1])])
            case 1:
                with pytest.raises(KeyboardInterrupt):
                    self.llm.load_weights(killed())
            case 2:
                self.llm.start_weight_update()
                self.llm.load_weights(pairs[:num])
                with pytest.raises(WeightsIncomplete):
                    self.llm.finish_weight_update()

    # Pauses and sleep

    def update_asleep(self) -> None:
        if any(asked.in_place for asked in self.live):
            if self.held is None:
                return
            self.llm.resume_generation()
            self.is_in_place = False
            self.finish()  # sleep would compute them again
        level = self.chance.choice((1, 2))
        self.llm.sleep(level)
        match self.chance.randrange(3):
            case 0:
                self.update()
                self.llm.wake_up()
            case 1:
                self.llm.wake_up(tags=["weights"])
                self.update()
                self.llm.wake_up(tags=["kv_cache"])
            case 2:
                before = self.llm.weights_version
                self.llm.wake_up()
                if level == 2 or self.held is None:  # the files' weights have been read
                    self.held = 0
                    if before:
                        self.of_version.append(0)

    def pause(self) -> None:
        if self.held is None:
            return
        modes = [("abort", True), ("wait", False), ("keep", True), ("keep", False), ("keep", False)]
        mode, clear_cache = self.chance.choice(modes)
        if mode == "keep":
            self.ask()
            self.step()
        self.llm.pause_generation(mode, clear_cache)
        assert mode == "keep" or not self.llm.engine.num_requests
        self.is_in_place = (mode, clear_cache) == ("keep", False)
        for _ in range(self.chance.randrange(4)):
            self.chance.choice([self.update, self.session, self.fail_first, self.ask])()
        self.is_in_place = False
        self.llm.resume_generation()

    # What must be true

    def check(self) -> None:
        for asked in self.asked.values():
            assert asked.output is not None and asked.output.finish_reason in ("length", "abort")
            assert asked.output.error is None
            if asked.in_place:
                self.check_in_place(asked)
        again: dict[int, list[tuple[Asked, int, int]]] = {}
        for asked in self.asked.values():
            assert asked.output is not None
            spans = asked.output.weight_versions if asked.output.token_ids else []
            assert sum(end - start for _, start, end in spans) == len(asked.output.token_ids)
            for version, start, end in () if asked.in_place else spans:
                again.setdefault(self.of_version[version], []).append((asked, start, end))
        for number, parts in again.items():
            prompts = [asked.prompt + asked.output.token_ids[:start] for asked, start, _ in parts if asked.output]
            params = [greedy(end - start, ignore_eos=True, allowed_token_ids=FEW) for _, start, end in parts]
            fresh = self.rig.sets[number].fresh.generate(prompts, params, use_tqdm=False,
                                                         lora_request=[asked.adapter for asked, _, _ in parts])
            for (asked, start, end), output in zip(parts, fresh, strict=True):
                assert asked.output is not None and output.outputs[0].token_ids == asked.output.token_ids[start:end]

    @torch.no_grad()
    def check_in_place(self, asked: Asked) -> None:
        """Hold tokens against transformers, whose cache goes on under the next weights as the request's pages do."""
        assert asked.output is not None
        known, cache, num_cached, before = list(asked.prompt), None, 0, asked.version
        for version, start, end in asked.output.weight_versions:
            stays = [each in asked.in_place for each in range(before + 1, version + 1)]
            if asked.adapter is not None or asked.may_be_again or (any(stays) and not (start and all(stays))):
                return  # what was computed between two versions, without a token, is not known here
            if not all(stays):
                cache, num_cached = None, 0  # computed again
            model = self.rig.sets[self.of_version[version]].reference
            for token in asked.output.token_ids[start:end]:
                result = model(torch.tensor([known[num_cached:]]), past_key_values=cache, use_cache=True)
                cache, num_cached = result.past_key_values, len(known)
                assert FEW[int(result.logits[0, -1][FEW].argmax())] == token
                known.append(token)
            before = version


@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_comes_from_the_version_that_its_span_names(seed: int, rigs: Callable[[str], Rig]) -> None:
    chance = random.Random(seed)
    rig = rigs(("attention", "Mamba-2", "attention", "gated delta")[seed % 4])
    settings = SETTINGS | {"speculative_config": chance.choice(rig.drafts)}
    with LLM(str(rig.sets[0].folder), **settings) as llm:
        order = Order(rig, llm, chance)
        order.run()
        order.check()
        assert len(order.seen) > 3 and any(asked.output and asked.output.token_ids for asked in order.asked.values())
