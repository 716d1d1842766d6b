"""Sampling and acceptance never read a device tensor on the host, so that a graph can hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core.params import SamplingParams
from outrider.sample import Accepted, Sampled, accept
from tests.unit.test_sample_reference import VOCAB, Batch, Case, make_batch

READS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "_unique",
         "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
PATCHED = ("tolist", "numpy", "cpu", "__array__")


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_read = name in READS
        is_read |= name == "where" and len(args) == 1
        is_read |= name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        is_read |= name in INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        assert not is_read, f"host read: {name}"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(self: torch.Tensor, *args: object, **kwargs: object) -> None:
        raise AssertionError("host read")

    with monkeypatch.context() as patch, NoHostReads():
        for name in PATCHED:
            patch.setattr(torch.Tensor, name, refuse)
        yield


LOUD = SamplingParams(
    temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=2,
    repetition_penalty=1.3, logit_bias={1: 2.0}, allowed_token_ids=list(range(9)), stop_token_ids=[2], max_tokens=None,
    bad_words_token_ids=((1, 2), (3,)), logprobs=2,
)


def loud_batch(device: str = "cpu") -> Batch:
    random = np.random.default_rng(1)
    every = [LOUD, SamplingParams(temperature=0), SamplingParams(logprobs=-1), SamplingParams(top_p=0.3)]
    return make_batch([
        Case(params, (1, 2, 3), 2, drafts, random.normal(0, 2, (len(drafts) + 1, VOCAB)).astype(np.float32), seed=i)
        for i, (params, drafts) in enumerate(zip(every, [(1, 2), (), (4,), (5, 6)], strict=True))
    ], device=device)


def step(
    batch: Batch, row: torch.Tensor, samples: torch.Tensor, first_logit: torch.Tensor, **options: Any
) -> tuple[Sampled, Accepted]:
    found = batch.sample(**options)
    drafts, known = batch.history.drafts[row][:, :2], batch.history.known[row]
    num_drafts = samples.to(torch.int64)
    return found, accept(
        found.tokens, found.bad, first_logit, drafts, num_drafts, samples, known, batch.rows, row
    )


def inputs(batch: Batch, device: str = "cpu") -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    row, samples = torch.tensor(batch.row, device=device), torch.ones(len(batch.row), dtype=torch.bool, device=device)
    return batch, row, samples, (batch.logit_rows.draft_index == 0).nonzero().flatten()


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("chunk_elements", [2**24, 2 * VOCAB])
def test_a_step_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, mode: str, guard: Callable[[], Any], chunk_elements: int
) -> None:
    args = inputs(loud_batch())
    with guard(), no_host_reads(monkeypatch):
        found, accepted = step(*args, logprobs=mode, chunk_elements=chunk_elements)
    assert found.tokens.shape == (9,) and accepted.run.shape == (4, 3)


PLANTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: x.nonzero(),
    "one-argument where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(),
    "equal": lambda x: torch.equal(x, x),
    "bool index": lambda x: x[x > 0],
    "bool index_put": lambda x: x.clone().__setitem__(x > 0, torch.zeros(2, dtype=torch.int64)),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "array": lambda x: np.asarray(x),
}


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", PLANTED)
def test_every_planted_read_is_caught(monkeypatch: pytest.MonkeyPatch, read: str, guard: Callable[[], Any]) -> None:
    x = torch.tensor([0, 1, 2])
    with guard(), pytest.raises(AssertionError, match="host read"), no_host_reads(monkeypatch):
        PLANTED[read](x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_is_captured_and_replayed() -> None:
    args = inputs(loud_batch("cuda"), "cuda")
    expected = step(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(*args)
    found[0].tokens.zero_()
    graph.replay()
    cpu = step(*inputs(loud_batch()))
    for got, eager, host in zip(found, expected, cpu, strict=True):
        for name in ("tokens", "bad") if isinstance(got, Sampled) else ("run", "run_len", "num_accepted", "finish"):
            assert torch.equal(getattr(got, name), getattr(eager, name)), name
            assert torch.equal(getattr(got, name).cpu(), getattr(host, name)), name
