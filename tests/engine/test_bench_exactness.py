"""bench/exact.py: goes on where it ended, compares with the reference of its mode, and counts what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import exact as bench
from outrider.kernels import cpu as native
from outrider.kernels.cpu.products import CpuProduct
from tests.engine.harness import save_folder
from tests.engine.test_exact_mode import FAMILIES

pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")
FEW = [bench.Cell(bench.Setup("scripted")),
       bench.Cell(bench.Setup(chunk=40, is_preempted=True, has_hits=True))]


def test_it_resumes_and_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(tmp_path / "model", FAMILIES["llama"])
    asked = [str(folder), "--device", "cpu", "--requests", "6", "--max-tokens", "9", "--prompt-len", "90",
             "--num-pages", "80", "--modes", "exact", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(bench, "cells", lambda has_head: FEW[:1])
    assert bench.main([*asked, "--seconds", "0"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells_left"] == 2
    assert bench.main(asked) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["exact"] == {"cells": 1, "not_tried": 0, "tokens": 54, "differing_tokens": 0, "differing_bits": 0}
    monkeypatch.setattr(bench, "cells", lambda has_head: FEW)
    product = CpuProduct._native

    def biased(self: CpuProduct, x: torch.Tensor) -> torch.Tensor:
        return product(self, x) * (1 + 1e-6 * (len(x) > 1))

    monkeypatch.setattr(CpuProduct, "_native", biased)
    assert bench.main(asked) == 1, "differences of exact mode are faults"
    shown = capsys.readouterr().out.splitlines()
    assert "prefix hits, preempted" in shown[0] and "NOT TRIED" not in shown[0] and len(shown) == 2
    assert json.loads(shown[-1])["exact"]["differing_bits"] > 0


def test_random_weights_make_varied_texts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", FAMILIES["llama"])
    asked = [str(folder), "--device", "cpu", "--requests", "3", "--max-tokens", "6", "--prompt-len", "20",
             "--num-pages", "40", "--load-format", "dummy", "--dtype", "float32", "--modes", "exact",
             "--cells", "^plain, 1 at once$", "--out", str(tmp_path / "out")]
    assert bench.main(asked) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cells_left"] == 0 and (found["exact"]["cells"], found["exact"]["tokens"]) == (1, 12)
    answers = json.loads((tmp_path / "out" / "model-exact.json").read_text())
    assert len({tuple(tokens) for tokens, _ in answers}) == 3


def test_a_hash_is_one_of_all_bits_of_its_row_alone() -> None:
    logits = torch.randn(5, 4001, generator=torch.Generator().manual_seed(0))
    hashes = bench.hash_rows(logits)
    assert torch.equal(torch.cat([bench.hash_rows(row[None]) for row in logits]), hashes)
    changed = logits.clone()
    changed.view(torch.int32)[0, 1234] ^= 1
    changed.view(torch.int32)[1, [7, 8]] ^= torch.iinfo(torch.int32).min  # two signs
    changed[2, [3, 4]] = changed[2, [4, 3]]
    changed[3, 0] = logits[3, 0].double().nextafter(torch.tensor(9.0, dtype=torch.float64)).float()  # the same
    assert (bench.hash_rows(changed) != hashes).tolist() == [True, True, True, False, False]
