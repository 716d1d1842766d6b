"""One line makes `import vllm` find Outrider: explicit, and refused once vLLM itself is imported."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.compat import environment

SCRIPT = """
from vllm import LLM, EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter
import outrider, sys, vllm, vllm.outputs

assert vllm.LLM is outrider.LLM and vllm.__spec__.name == "vllm" and vllm.outputs is outrider.outputs
assert outrider.outputs.__spec__.name == "outrider.outputs" and vllm.outputs.RequestOutput is outrider.RequestOutput
assert __name__ == "__main__" and sys.argv == [__file__, "--flag"]
from vllm.lora.request import LoRARequest

assert LoRARequest("sql", 1, "folder").lora_name == "sql"
try:
    from vllm.multimodal import MULTIMODAL_REGISTRY
except ImportError as error:
    print(error)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_a_script_for_vllm_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("-m", "outrider.compat", str(tmp_path / "script.py"), "--flag")
    assert (done.returncode, done.stderr) == (0, "")
    assert "outrider.multimodal is not supported: " in done.stdout


def test_the_alias_is_explicit_and_comes_first() -> None:
    line = "import outrider.compat; outrider.compat.install_as_vllm()"
    assert run("-c", f"{line}; {line}; import vllm; from vllm import LLM; assert LLM.__module__ == 'outrider.llm'"
               ).returncode == 0
    late = run("-c", f"import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); {line}")
    assert late.returncode == 1 and "vllm is imported already: call outrider.compat.install_as_vllm() be" in late.stderr


def test_a_variable_of_vllm_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(environment, "_named", set())
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    with caplog.at_level(logging.INFO, logger="outrider"):
        environment.explain_variables()
        environment.explain_variables()
    assert caplog.messages == ["the environment variable VLLM_BATCH_INVARIANT has no effect: use exact=True"]
