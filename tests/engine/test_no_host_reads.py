"""A step never waits for the device: no operation in it hands a device value to the host, so it can be captured.

Only the torch backend's `plan` may read lengths. Every kind of read is planted once inside a step, to see it caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cache.groups import Group
from outrider.core.params import SamplingParams
from outrider.layers.base import find_modules
from outrider.layers.moe import Experts
from outrider.mixers.batch import BatchView
from outrider.mixers.paged.torch_backend import Plan, TorchBackend
from outrider.runner.step import DeviceStep
from tests.drafters.hybrid_rig import mtp_of
from tests.drafters.latent_rig import latent_of
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CONFIGS, Ask, Rig, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.test_exact_mode import FAMILIES as EXACT_FAMILIES

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "_unique",
         "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
PATCHED = ("tolist", "numpy", "cpu", "__array__")


class HostRead(AssertionError):
    """The host asked the device for a value."""


class NoHostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.is_planning = False
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.num_operations += 1
        if not self.is_planning and is_read(func, args, kwargs):
            raise HostRead(f"host read: {func}")
        return func(*args, **kwargs)


def is_read(func: Any, args: Any, kwargs: Any) -> bool:
    name, overload = func.overloadpacket.__name__, func._overloadname
    if name in INDEXED:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return overload != "self_int" and kwargs.get("output_size") is None
    return name in READS or (name == "where" and len(args) == 1)


class PlansMayRead(TorchBackend):
    def __init__(self) -> None:
        super().__init__()
        self.guard = NoHostReads()  # that of no step, until one is guarded

    def plan(self, view: BatchView, group: Group) -> Plan:
        self.guard.is_planning = True
        try:
            return super().plan(view, group)
        finally:
            self.guard.is_planning = False


@contextmanager
def no_host_reads(guard: NoHostReads) -> Iterator[None]:
    def watched(read: Callable[..., Any], name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if guard.is_planning:
                return read(self, *args, **kwargs)
            raise HostRead(f"host read: {name}")

        return method

    with pytest.MonkeyPatch.context() as patch, guard:
        for name in PATCHED:
            patch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name), name))
        yield


@contextmanager
def plain_no_grad() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "inference_mode": torch.inference_mode, "no_grad": plain_no_grad,
}


def guard_steps(rig: Rig, mode: Callable[[], AbstractContextManager[None]]) -> NoHostReads:
    """From now on a step that reads dies. The host's writes before it and the reading of its result are not in it."""
    guard, run = NoHostReads(), rig.step.run
    backend = rig.step.backend
    assert isinstance(backend, PlansMayRead)
    backend.guard = guard

    def guarded(*args: Any) -> Any:
        with mode(), no_host_reads(guard):
            return run(*args)

    rig.step.run = guarded  # type: ignore[method-assign]
    return guard


def quiet_rig(monkeypatch: pytest.MonkeyPatch, family: str, **options: Any) -> Rig:
    monkeypatch.setattr("outrider.mixers.paged.torch_backend.TorchBackend", PlansMayRead)
    return Rig(tiny_model(family), overlap=False, **options)


LOUD = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5, seed=1,
    repetition_penalty=1.3, min_tokens=2, max_tokens=6, stop_token_ids=[9], logit_bias={1: 2.0}, ignore_eos=True,
    allowed_token_ids=list(range(200)), bad_words_token_ids=((1, 2), (3,)), logprobs=3, prompt_logprobs=2,
)
REQUESTS = {
    "greedy": greedy(6),
    "sampled": SamplingParams(seed=1, max_tokens=6),
    "all parameters": LOUD,
    "all logprobs": greedy(4, logprobs=-1, prompt_logprobs=-1),
    "top-p alone": SamplingParams(seed=2, top_p=0.7, max_tokens=6),
}
PROMPT = prompt_of(1, 37)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_reads_nothing(monkeypatch: pytest.MonkeyPatch, family: str, mode: str) -> None:
    asks = [Ask(PROMPT[: 20 + i], params) for i, params in enumerate(REQUESTS.values())]
    with quiet_rig(monkeypatch, family, eos_ids=(2,), pad_requests=(8,), pad_tokens=(80,)) as rig:
        guard = guard_steps(rig, MODES[mode])
        assert all(sample for (sample,) in tokens_of(rig.run(asks)))
        assert guard.num_operations > 100 * len(rig.batches), "the steps did pass through the guard"


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_drafts_reads_nothing(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    asks = [Ask(PROMPT[: 20 + i], params) for i, params in enumerate(REQUESTS.values())]
    with Rig(tiny_model("gemma3")) as plain:
        expected = tokens_of(plain.run(asks))
    right = {tuple(ask.prompt): sample for ask, (sample,) in zip(asks, expected, strict=True)}
    drafter = ScriptedDrafter(3, lambda prompt, index: right[prompt], lambda position: position % 4)
    config = {"method": "ngram", "num_speculative_tokens": 3, "auto": False}
    with quiet_rig(monkeypatch, "gemma3", drafter=drafter, speculative_config=config) as rig:
        guard_steps(rig, MODES[mode])
        assert tokens_of(rig.run(asks)) == expected
        assert sum(part.num_accepted for result in rig.results for part in result.requests) > 0


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "deepseek_v32_fp8", "deepseek_v32_modules",
                                    "qwen4_exp", "hy_v4", "glm5_next"])
def test_a_step_with_an_indexer_reads_nothing(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Choosing positions has shapes of its own, which must not come from the device, nor do several prediction modules
    read anything. Experts on the CPU may read."""
    budgets = {"qwen4_exp": {"indexer_budget": 16}, "glm5_next": {"index_topk": 16}}
    model = latent_of(family) if family not in budgets else random_model(
        EXACT_FAMILIES[family] | {"vocab_size": 24} | budgets[family], torch.float64, seed=4)
    drafter = mtp_of(model, 3) if family in ("deepseek_v32_modules", "hy_v4", "glm5_next") else None
    for experts in find_modules([model, *([] if drafter is None else drafter.modules())], Experts):
        monkeypatch.setattr(experts.format, "mix", lambda x, *_: x)
    monkeypatch.setattr("outrider.mixers.paged.torch_backend.TorchBackend", PlansMayRead)
    asks = [Ask(prompt_of(i, 20 + 9 * i, 24), greedy(6)) for i in range(3)]
    with Rig(model, drafter=drafter, overlap=False, pad_requests=(8,), pad_tokens=(80,)) as rig:
        guard = guard_steps(rig, torch.inference_mode)
        assert all(sample for (sample,) in tokens_of(rig.run(asks)))
        assert guard.num_operations > 100 * len(rig.batches), "the steps did pass through the guard"


PLANTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "range": lambda x: range(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "one-argument where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(),
    "equal": lambda x: torch.equal(x, x),
    "bool index": lambda x: x[x > 0],
    "bool index_put": lambda x: x.clone().__setitem__(x > 0, torch.zeros((), dtype=torch.int64)),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "array": lambda x: np.asarray(x),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("read", PLANTED)
def test_every_planted_read_is_caught(monkeypatch: pytest.MonkeyPatch, read: str, mode: str) -> None:
    """In the middle of a step: between acceptance and the next draft."""
    commit = DeviceStep.commit

    def leaky(self: DeviceStep, *args: Any) -> torch.Tensor:
        computed = commit(self, *args)
        PLANTED[read](self.state.known.clone())
        return computed

    monkeypatch.setattr(DeviceStep, "commit", leaky)
    with quiet_rig(monkeypatch, "llama") as rig:
        guard_steps(rig, MODES[mode])
        (output,) = rig.run([Ask(PROMPT, greedy(4))])
        assert output.outputs[0].finish_reason == "error"
        assert "HostRead" in (output.outputs[0].error or "")


@pytest.mark.parametrize("mode", MODES)
def test_operations_without_a_read_pass(mode: str) -> None:
    x = torch.tensor([0, 1, 2])
    guard = NoHostReads()
    with MODES[mode](), no_host_reads(guard):
        torch.where(x > 0, x, 0)
        x[x]
        x.repeat_interleave(2)
        x.repeat_interleave(torch.ones(3, dtype=torch.int64), output_size=3)
        x.clone().index_put_((x,), x)
        x.masked_fill(x > 1, 0)
    assert guard.num_operations > 5
