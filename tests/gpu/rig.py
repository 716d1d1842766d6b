"""Engines on the card with free pages poisoned, and their tokens against a reference that shares nothing with them.

The reference is the torch backend on the CPU in float64, each request alone. Where tokens part, the reference's scores
of the two must be a near-tie, and are shown.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.commands.compare import noise_of
from outrider.commands.run_prompts import Ask as CommandAsk
from outrider.config import EngineConfig
from outrider.core import ScheduledBatch, StepResult
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.engine.assembly import engine_around
from outrider.engine.engine import Engine
from outrider.models.base import Model
from outrider.models.loader import load_model
from outrider.models.sources import resolve
from outrider.runner.commands import Answer, Command
from outrider.runner.step import DeviceStep
from outrider.runner.worker import Worker
from tests.engine.harness import Ask, GrowingOutputs, Rig, greedy, prompt_of
from tests.gpu.conftest import HAS_CARD

DEVICE = torch.device("cuda", 0) if HAS_CARD else torch.device("cpu")
CPU = torch.device("cpu")
VOCAB = 256
TIE = 1e-4  # of logits of order one, in float32
LENGTH = 20
# More requests than rows, and prompts that need several steps.
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 5, "max_num_batched_tokens": 48, "num_pages": 400,
                            "max_logprobs": VOCAB}


def sampled(seed: int, max_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def asks() -> list[Ask]:
    """Greedy and sampled in turn. One prompt repeats itself, for lookups; two begin with the same page."""
    prompts = [prompt_of(i, n) for i, n in enumerate((3, 17, 40, 61, 9, 33))]
    prompts.append(prompt_of(7, 6) * 5)
    prompts.append([*prompts[2][:32], *prompt_of(8, 5)])
    return [Ask(prompt, greedy(LENGTH, ignore_eos=True) if i % 2 else sampled(i)) for i, prompt in enumerate(prompts)]


@functools.cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="outrider-gpu-models-"))


@functools.cache
def loaded(folder: Path, dtype: torch.dtype = torch.float32, on_cpu: bool = False) -> Model:
    return load_model(resolve(folder), dtype=dtype, device="cpu" if on_cpu else str(DEVICE))


class GpuRig:
    """An engine on the card. `close` it; it holds captured steps. `source`: where an MTP module's tensors lie."""

    def __init__(self, model: Model, *, poison: bool = True, source: str | Path = "tiny", grammars: Any = None,
                 eos_ids: tuple[int, ...] = (), **settings: Any) -> None:
        config = EngineConfig(str(source), **SETTINGS | settings)
        worker = Worker(config, model, eos_ids=eos_ids)
        self.engine: Engine = engine_around(config, worker)
        if grammars is not None:
            grammars.serve(self.engine, worker)
        self.runner: Any = worker.runner
        self.step: DeviceStep = worker.device_step
        self.outputs = GrowingOutputs(self.engine)
        self.num_poisoned = 0
        if poison:
            self.engine.worker.runner = _Poisoning(self)

    def run(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for index, ask in enumerate(asks):
            self.outputs.add(str(index), ask.prompt, ask.params, spans=ask.spans, embeds=ask.embeds)
        for _ in range(3000):
            if not self.engine.has_work:
                break
            outputs |= {output.request_id: output for output in self.outputs.step() if output.finished}
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.cache.usage() == 0
        return [outputs[str(index)] for index in range(len(asks))]

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> GpuRig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Poisoning:
    """Pages that nobody owned when a step was scheduled are NaN before it runs, after the steps in flight."""

    def __init__(self, rig: GpuRig) -> None:
        self._rig, self._inner = rig, rig.runner

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        pages = self._rig.engine.scheduler.cache.pool.blank_pages()
        self._rig.num_poisoned += len(pages)
        if DEVICE.type == "cuda":  # on the CPU steps run in a thread of their own
            self._rig.step.pool.poison(torch.tensor(pages, dtype=torch.int64, device=DEVICE))
        return self._inner.submit(batch)

    def command(self, command: Command[Answer]) -> Future[Answer]:
        return self._inner.command(command)

    def idle(self, quiet_seconds: float) -> float | None:
        return self._inner.idle(quiet_seconds)

    def close(self) -> None:
        self._inner.close()


@functools.cache
def reference(folder: Path) -> list[RequestOutput]:
    """Every request alone, with all log-probabilities of every position."""
    model = loaded(folder, torch.float64, on_cpu=True)
    settings = SETTINGS | {"attention_backend": "torch", "max_num_seqs": 1, "enable_prefix_caching": False}
    with Rig(model, **settings) as rig:
        return rig.run_one_by_one([Ask(ask.prompt, replace(ask.params, logprobs=-1)) for ask in asks()])


def assert_same_tokens(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput], asked: Sequence[Ask], *,
                       tie: float = TIE) -> int:
    """Returns the number of near-ties, after which a request is not compared any further."""
    ties = 0
    for index, (ours, theirs, ask) in enumerate(zip(outputs, expected, asked, strict=True)):
        mine, right = ours.outputs[0], theirs.outputs[0]
        assert mine.error is None, f"request {index}: {mine.error}"
        assert len(mine.token_ids) == len(right.token_ids) or mine.token_ids != right.token_ids[: len(mine.token_ids)]
        at = next((i for i, (a, b) in enumerate(zip(mine.token_ids, right.token_ids, strict=False)) if a != b), None)
        if at is None:
            continue
        apart = margin(theirs, ask, at, mine.token_ids[at])
        tokens = f"{mine.token_ids[at]}, reference {right.token_ids[at]}"
        message = f"request {index}, token {at}: {tokens}, apart {apart:.2e}"
        assert apart < tie, message
        warnings.warn(f"near-tie: {message}", stacklevel=2)
        ties += 1
    assert ties <= len(asked) // 3, "near-ties are rare"
    return ties


def margin(expected: RequestOutput, ask: Ask, position: int, token: int) -> float:
    """The margin by which the reference prefers its own token, noise included."""
    right = expected.outputs[0].token_ids[position]
    logprobs = expected.outputs[0].logprobs
    assert logprobs is not None
    entry = {int(key): value.logprob for key, value in logprobs[position].items()}
    noise = noise_of(CommandAsk(ask.prompt, ask.params), len(ask.prompt) + position, (right, token))
    temperature = ask.params.temperature or 1.0
    return (entry[right] / temperature + noise[0]) - (entry[token] / temperature + noise[1])
