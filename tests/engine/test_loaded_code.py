"""A request loads the code that it needs: families, mixers, formats, drafters and features that it does not use stay
on disk.

The lines of all loaded modules of the package are counted. Lower a limit when less is loaded; before you raise one, see
`outrider.core.lazy_exports`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.models.sources.smollm2 import smollm2_path

pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not smollm2_path().is_file(), reason="the small model has not been fetched")
PACKAGE = Path(__file__).parents[2] / "outrider"
# A greedy request to the small model -> the lines that it loads.
LOADED_LINES = {"plain": 29_510, "drafts": 33_250}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
# By no request without a setting, to a dense model on a CPU.
UNUSED = (
    "beam_search", "compat.vllm_config", "engine.kv_events", "features.", "formats.experts",
    "formats.scaled", "formats.summed", "kernels.gpu", "kernels.moe", "kernels.ops.attention",
    "kernels.ops.exact", "layers.latent_attention", "layers.moe", "mixers.indexed.", "mixers.latent.", "models.head",
    "models.mtp", "runner.graphs.cuda_runner", "runner.residence", "runner.weight_update", "server", "training",
)
SLACK = 1.02  # of a limit: code grows between two measurements
SERVE = """
import json, sys
from outrider import LLM, SamplingParams
with LLM("smollm2", max_model_len=256, **json.loads(sys.argv[1])) as llm:
    llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
found = {name: module.__file__ for name, module in list(sys.modules.items()) if name.split(".")[0] == "outrider"}
print(json.dumps(found))
"""


def loaded(settings: dict[str, Any]) -> dict[str, Path]:
    """The modules of the package that are loaded when a greedy request has ended."""
    done = subprocess.run([sys.executable, "-c", SERVE, json.dumps(settings)], capture_output=True, text=True,
                          cwd=PACKAGE.parent, check=True)
    return {name: Path(path) for name, path in json.loads(done.stdout.splitlines()[-1]).items() if path}


@pytest.mark.parametrize("kind", LOADED_LINES)
def test_a_greedy_request_loads_little(kind: str) -> None:
    found = loaded(SETTINGS[kind])
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in set(found.values()))
    assert {"outrider", "outrider.sched.scheduler", "outrider.runner.step"} <= found.keys()
    assert lines <= SLACK * LOADED_LINES[kind], f"{lines} lines of {len(found)} modules: {sorted(found)}"
    parts = tuple(f"outrider.{part}" for part in UNUSED)
    assert not [name for name in found if name.startswith(parts)]
    assert any(name.startswith("outrider.speculation.") for name in found) == (kind == "drafts")
