"""Engines around tiny models, with poisoned pages, and runners that answer late, through pickle or elsewhere.

Models come from configs alone and need no transformers. Everything here goes through `Worker` and `engine_around`, so
a test of an engine is a test of what `LLM` runs.
"""

from __future__ import annotations

import functools
import shutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig
from outrider.core import ScheduledBatch, StepResult
from outrider.core.hidden_params import RequestParams
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.drafters.base import Drafter
from outrider.engine.assembly import engine_around
from outrider.engine.engine import Engine
from outrider.engine.text import Tokenizer
from outrider.formats import RankGroup
from outrider.models.base import Model
from outrider.models.registry import build_model
from outrider.runner.local import LocalRunner
from outrider.runner.step import DeviceStep
from outrider.runner.worker import Worker
from outrider.sched.scheduler import Scheduler
from outrider.sched.updates import Update
from outrider.speculation.draft_counts import DraftCounts
from outrider.speculation.step_drafts import StepDrafts

VOCAB = 256
CPU = torch.device("cpu")

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | {"architectures": ["LlamaForCausalLM"]},
    "sliding": _BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "gemma3": _BASE | {
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}


def choose_drafts(scheduler: Scheduler, counts: DraftCounts) -> None:
    """From now on the numbers of drafts are these."""
    assert isinstance(scheduler.speculation, StepDrafts), "the engine has no drafter"
    scheduler.speculation.counts = counts


@functools.cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> Model:
    return random_model(CONFIGS[family], dtype, zlib.crc32(family.encode()))


def random_model(config: dict[str, Any], dtype: torch.dtype, seed: int, group: RankGroup | None = None) -> Model:
    """Weights spread so that greedy text varies. Drawn in float64: every dtype gets the same ones, rounded. group:
    ranks that hold the model together."""
    model = build_model(config, dtype=dtype, device="cpu")
    if group is not None:
        model.shard(group)
    generator = torch.Generator().manual_seed(seed)
    is_gemma = config["architectures"] == ["Gemma3ForCausalLM"]
    for name, slot in model.weights().items():
        center = 0.0 if is_gemma or "norm" not in name else 1.0
        if is_gemma and "post_" in name:
            center = 4.0  # layers must outweigh the scaled embedding, or every token predicts itself
        values = torch.empty(slot.shape, dtype=torch.float64).normal_(center, 0.25, generator=generator)
        slot.store(values)
    model.finalize()
    return model


def save_folder(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A model folder as Hugging Face writes it, without transformers."""
    import json

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    model = random_model(config, torch.float32, seed)
    tensors = {name: slot.target.reshape(slot.shape).clone(memory_format=torch.contiguous_format)
               for name, slot in model.weights().items()}
    save_file(tensors, path / "model.safetensors")
    return path


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 to 258 are special."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    char_of = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    backend = Backend(models.BPE(vocab={char_of[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|begin|>", "<|end|>", "<|pad|>")])
    return Tokenizer(backend)


@dataclass(frozen=True)
class DeepConfig(EngineConfig):
    """More steps in flight than an engine would want, so that results come later still."""

    depth: int = 2

    def steps_in_flight(self, on_cuda: bool) -> int:
        return self.depth


SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 16,
    "num_pages": 64, "max_logprobs": VOCAB,
}


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    embeds: Any = None  # in place of the prompt's ids, which stand beside them if there are any
    embeds_at: Sequence[int] | None = None  # positions of the embeddings; None: they are those of all tokens


def add_request(engine: Engine, request_id: str, prompt: Prompt, params: RequestParams, priority: int = 0) -> None:
    engine.add({request_id: engine.checks.check(prompt, params, priority)})


class GrowingOutputs:
    """A front in its simplest form: what an engine's increments make of its requests' outputs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outputs: dict[str, RequestOutput] = {}

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, priority: int = 0,
            spans: Sequence[tuple[int, int]] = (), embeds: Any = None, embeds_at: Sequence[int] | None = None) -> None:
        given = {"prompt_token_ids": prompt or None, "bidirectional_spans": spans, "prompt_embeds": embeds,
                 "prompt_embeds_positions": embeds_at}
        add_request(self._engine, request_id, given, params, priority)
        self._outputs[request_id] = RequestOutput.empty(request_id, None, prompt, params)

    def step(self) -> list[RequestOutput]:
        """The outputs that a step changed."""
        changed: dict[str, None] = {}
        for increment in self._engine.step():
            self._outputs[increment.sample.request_id].grow(increment)
            changed[increment.sample.request_id] = None
        return [self._outputs[request_id] for request_id in changed]


class Rig:
    """A small engine on the CPU with every blank page poisoned, and what a test wants to know of its run.

    `depth`: steps in flight, instead of two with overlap and one without. `expects_faults`: of drafters; an engine
    takes what a drafter raises for a fault of the drafter, assertions of tests included."""

    def __init__(self, model: Model, *, depth: int | None = None, eos_ids: tuple[int, ...] = (),
                 tokenizer: Tokenizer | None = None, drafter: Drafter | None = None, poison: bool = True,
                 grammars: Any = None, expects_faults: bool = False, **settings: Any) -> None:
        self._expects_faults = expects_faults
        values = SETTINGS | settings
        config = EngineConfig("tiny", **values) if depth is None else DeepConfig("tiny", depth=depth, **values)
        worker = Worker(config, model, eos_ids=eos_ids, drafter=drafter)
        self.engine = engine_around(config, worker, tokenizer)
        if grammars is not None:
            grammars.serve(self.engine, worker)
        self.scheduler = self.engine.scheduler
        assert isinstance(worker.runner, LocalRunner)
        self.runner: LocalRunner = worker.runner
        self.step: DeviceStep = worker.device_step
        self.outputs = GrowingOutputs(self.engine)
        self.batches: list[ScheduledBatch] = []
        self.results: list[StepResult] = []
        self.num_poisoned = 0
        self.ended: list[str] = []  # request ids in the order they ended
        self._blank: dict[int, list[int]] = {}
        self._schedule = self.scheduler.schedule
        self._update = self.scheduler.update
        self.scheduler.schedule = self._watched_schedule  # type: ignore[method-assign]
        self.scheduler.update = self._watched_update  # type: ignore[method-assign]
        if poison:
            self.runner._before_step = self._poison

    def _watched_schedule(self) -> ScheduledBatch | None:
        batch = self._schedule()
        if batch is not None:
            self.batches.append(batch)
            self._blank[batch.step] = self.scheduler.cache.pool.blank_pages()
        return batch

    def _watched_update(self, result: StepResult, seconds: float | None = None) -> list[Update]:
        """Without the time that the step took: choices would differ from run to run."""
        self.results.append(result)
        return self._update(result)

    def _poison(self, batch: ScheduledBatch) -> None:
        """The pages that were blank when the step was scheduled: no step from then on may see them until they are
        granted anew, while the steps in flight before it still may."""
        pages = self._blank.pop(batch.step)
        self.num_poisoned += len(pages)
        self.step.pool.poison(torch.tensor(pages, dtype=torch.int64))

    def run(self, asks: Sequence[Ask], *, after_step: Callable[[], None] | None = None,
            limit: int = 2000) -> list[RequestOutput]:
        """All asks at once, to their ends; then the engine must be clean. Outputs in the order of the asks."""
        outputs: dict[str, RequestOutput] = {}
        for index, ask in enumerate(asks):
            self.outputs.add(str(index), ask.prompt, ask.params, priority=ask.priority, spans=ask.spans,
                             embeds=ask.embeds, embeds_at=ask.embeds_at)
        for _ in range(limit):
            if not self.engine.has_work:
                break
            for output in self.outputs.step():
                if output.finished:
                    outputs[output.request_id] = output
                    self.ended.append(output.request_id)
            if after_step is not None:
                after_step()
        self.assert_clean()
        return [outputs[str(index)] for index in range(len(asks))]

    def run_one_by_one(self, asks: Sequence[Ask], **options: Any) -> list[RequestOutput]:
        return [output for ask in asks for output in self.run([ask], **options)]

    def preempt(self) -> None:
        """What the scheduler does when the pool is short: to everyone, once, when three tokens are out. Steps may be
        in flight: their results for it are stale."""
        for request in list(self.scheduler._running):
            if len(request.token_ids) >= request.prompt_len + 3 and request.stats.num_preemptions == 0:
                self.scheduler._preempt(request)

    def assert_clean(self) -> None:
        """Nobody is live, nothing is in flight, every page and row is accounted for."""
        self.scheduler.check_integrity()
        assert not self.engine.has_work and not self.scheduler.has_work
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.cache.usage() == 0
        assert self._expects_faults or not self.engine.stats.drafter_faults, self.engine.stats.drafters_off

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Per request and sample. An error has no place in a comparison of tokens."""
    assert all(sample.error is None for output in outputs for sample in output.outputs)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def tokens_alone(model: Model, asks: Sequence[Ask]) -> list[list[list[int]]]:
    """The tokens of requests that run one by one, each prompt in one chunk, without prefix hits, overlap or drafts."""
    with Rig(model, max_num_seqs=1, enable_prefix_caching=False, overlap=False) as rig:
        return tokens_of(rig.run_one_by_one(asks))


def prompt_of(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()


def greedy(max_tokens: int | None = 16, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **fields)


def with_other_weights(folder: Path, path: Path) -> Path:
    """A copy of a model's folder with other weights of the same shapes."""
    shutil.copytree(folder, path)
    generator = torch.Generator().manual_seed(8)
    tensors = load_file(folder / "model.safetensors")
    other = {name: tensor + torch.empty(tensor.shape).normal_(0, 0.1, generator=generator)
             if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(other, path / "model.safetensors")
    return path
