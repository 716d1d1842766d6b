"""What must not happen once an engine is warm: a host wait while a step is queued, or a kernel compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider.core import ScheduledBatch, StepResult
from outrider.runner.graphs import losses
from tests.engine.harness import Ask, greedy, prompt_of
from tests.gpu.rig import SETTINGS, GpuRig, asks, loaded, sampled
from tests.gpu.test_engines import ASSETS, assistant_of, folder_of, spec

pytestmark = pytest.mark.gpu


class _NoWaiting:
    """A runner around a runner: no operation of `submit` may wait for the device."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_steps = 0

    def submit(self, batch: ScheduledBatch) -> Future[StepResult]:
        self.num_steps += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._inner.submit(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def idle(self, quiet_seconds: float) -> float | None:
        return self._inner.idle(quiet_seconds)

    def close(self) -> None:
        self._inner.close()


STEADY = {
    "llama, plain": lambda: ("llama", None),
    "llama, ngram": lambda: ("llama", spec("ngram")),
    "llama, draft model": lambda: ("llama", spec("draft_model", folder_of("llama"))),
    "gemma4, assistant": lambda: ("gemma4_shared", spec("mtp", assistant_of("gemma4_shared"))),
    "nemotron_h, mtp": lambda: ("nemotron_h", spec("mtp")),
    "qwen3_moe, plain": lambda: ("qwen3_moe", None),
}


EAGER = ("llama, ngram", "nemotron_h, mtp")  # the others with OUTRIDER_GPU_ALL=1
CASES = [
    pytest.param(name, is_eager, id=f"{name}, {'eager' if is_eager else 'captured'}", marks=[
        pytest.mark.together(f"steady {name}"), *([pytest.mark.long] if is_eager and name not in EAGER else [])])
    for name in STEADY
    for is_eager in (False, True)
]


@pytest.mark.parametrize(("name", "is_eager"), CASES)
def test_queueing_a_step_never_waits(name: str, is_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture waits, once, where a size is first met: whatever waits in every round is none."""
    for constant in ("PATIENCE", "DECODE_PATIENCE", "PAUSE"):
        monkeypatch.setattr(losses, constant, 0.0)
    family, speculative = STEADY[name]()
    folder = folder_of(family)
    with GpuRig(loaded(folder), poison=False, source=folder, speculative_config=speculative, enforce_eager=is_eager,
                enable_prefix_caching=False) as rig:
        for _ in range(3):
            rig.engine.worker.runner = rig.runner
            rig.run(asks())  # what is captured or allocated when it is first met
            watched = rig.engine.worker.runner = _NoWaiting(rig.runner)
            errors = [output.outputs[0].error for output in rig.run(asks()) if output.outputs[0].error]
            if not errors:
                break
        assert not errors, errors[0]
        assert watched.num_steps > 10
        assert (rig.runner.num_replays == 0) == is_eager


def test_a_planted_wait_is_noticed() -> None:
    with GpuRig(loaded(folder_of("llama")), poison=False) as rig:
        queue = rig.runner._queue

        def waits(batch: ScheduledBatch) -> Future[StepResult]:
            rig.step.state.known[1].item()
            return queue(batch)

        rig.runner._queue = waits
        rig.engine.worker.runner = _NoWaiting(rig.runner)
        (output,) = rig.run([Ask(prompt_of(1, 5), greedy(3))])
        assert "synchronizing" in (output.outputs[0].error or "")


# Compiling


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or fetches compiled from its folder, inside."""
    import triton

    names: list[str] = []

    def note(*args: Any, **kwargs: Any) -> None:
        names.append(str(kwargs.get("repr") or kwargs.get("key") or args[:1]))

    runtime = triton.knobs.runtime
    before, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, note
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = before


def mixed() -> list[list[Ask]]:
    """Rounds of requests: batches and prompts of many sizes, greedy, sampled, both."""
    sizes = [(1,), (2, 5), (7, 3, 1), (12, 16, 17, 4), (100, 9), (40, 41, 3, 5, 60), (33,) * 7]
    rounds = []
    for number, lens in enumerate(sizes):
        for kind in ("greedy", "sampled", "both"):
            params = [greedy(7, ignore_eos=True) if kind == "greedy" or (kind == "both" and i % 2) else sampled(i, 7)
                      for i in range(len(lens))]
            rounds.append([Ask(prompt_of(100 * number + i, n), params[i]) for i, n in enumerate(lens)])
    return rounds


def test_a_planted_compilation_is_noticed() -> None:
    from outrider.kernels.gpu import relu2

    x = torch.zeros(2, 3, device=torch.device("cuda", 0), dtype=torch.float16)  # no engine here has this type
    with compiled_kernels() as names:
        relu2(x)
    assert names


WARM = {
    "llama": lambda: ("llama", None),
    "llama, ngram": lambda: ("llama", spec("ngram")),
    "eagle3": lambda: (ASSETS / "target", spec("eagle3", ASSETS / "eagle3", 4)),
    "gemma4, assistant": lambda: ("gemma4_shared", spec("mtp", assistant_of("gemma4_shared"))),
    "qwen3_moe": lambda: ("qwen3_moe", None),
    "nemotron_h": lambda: ("nemotron_h", None),
    "qwen3_5": lambda: ("qwen3_5", None),
}


WARM_CASES = [
    pytest.param(name, marks=[pytest.mark.together(f"warm {name}"), *([pytest.mark.long] if name == "llama" else [])])
    for name in WARM
]


@pytest.mark.parametrize("name", WARM_CASES)
def test_nothing_is_compiled_while_requests_wait(name: str) -> None:
    family, speculative = WARM[name]()
    folder = folder_of(family) if isinstance(family, str) else family
    vocab = loaded(folder, torch.bfloat16).vocab_size
    rig = GpuRig(loaded(folder, torch.bfloat16), poison=False, source=folder, speculative_config=speculative,
                 **SETTINGS | {"max_num_batched_tokens": 64})
    with rig, compiled_kernels() as later:
        for asked in mixed():
            within = [Ask([token % vocab for token in ask.prompt], ask.params) for ask in asked]
            assert not any(output.outputs[0].error for output in rig.run(within))
    assert not later, f"{len(later)} compiled while requests waited: {sorted(set(later))[:20]}"
