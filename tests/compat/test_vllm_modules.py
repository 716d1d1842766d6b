"""Every public module of vLLM 0.33 can be imported from here, or its import says in a sentence what to use instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from outrider.compat.alias import OTHER_PACKAGES, OWN
from outrider.compat.missing_modules import MISSING_MODULES

LIST = Path(__file__).parents[1] / "assets" / "vllm_modules.txt"  # one name a line, indented by its depth
EARLIER = ["inputs.data", "worker.worker", "entrypoints.chat_utils", "utils.network_utils", "engine.metrics",
           "transformers_utils.tokenizer", "core.scheduler", "spec_decode", "model_executor.parallel_utils", "_C",
           "_custom_ops"]
# Names that scripts import, at their places in vLLM 0.33.
NAMES = {
    "logprobs": ["Logprob", "PromptLogprobs", "SampleLogprobs"],
    "sequence": ["Logprob", "RequestMetrics"],
    "usage.usage_lib": ["UsageContext"],
    "tokenizers": ["TokenizerLike", "get_tokenizer"],
    "version": ["__version__", "__version_tuple__"],
    "utils.network_utils": ["get_ip", "get_open_port", "get_distributed_init_method"],
    "inputs.data": ["TokensPrompt", "TextPrompt", "PromptType"],
    "inputs.llm": ["TokensPrompt"],
    "engine.arg_utils": ["EngineArgs", "AsyncEngineArgs"],
    "v1.engine.async_llm": ["AsyncLLM"],
    "lora.request": ["LoRARequest"],
    "distributed.weight_transfer.nccl_common": ["trainer_init"],
    "distributed.weight_transfer.nccl_engine": ["NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"],
    "distributed.weight_transfer.packed_tensor": ["packed_nccl_broadcast_producer"],
}


def public_modules() -> list[str]:
    path: list[str] = []
    found = []
    for line in LIST.read_text().splitlines():
        name = line.lstrip()
        path[len(line) - len(name) :] = [name]
        found.append(".".join(path))
    return found


def missing_modules(package: str) -> dict[str, str]:
    """Import every module of vLLM below a package. Returns the errors of those that are not here."""
    errors = {}
    for name in public_modules() + EARLIER:
        if package == OWN and name.partition(".")[0] in OTHER_PACKAGES:
            continue
        try:
            import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            errors[name] = str(error)
    return errors


def check_advice(errors: dict[str, str]) -> None:
    assert len(public_modules()) > 2900 and "v1.executor.abstract" in errors
    assert len(public_modules()) - len(errors) > 20
    for name, message in errors.items():
        module = re.fullmatch(r"(?:outrider|vllm)\.(\S+) is not supported: \S.*", message)
        assert module is not None and (name + ".").startswith(module[1] + "."), f"{name}: {message}"


def test_a_module_of_vllm_is_here_or_says_what_to_use_instead() -> None:
    check_advice(missing_modules(OWN))


def test_so_it_is_under_the_name_of_vllm() -> None:
    program = ("import json, sys, outrider.compat; outrider.compat.install_as_vllm(); sys.path.append(sys.argv[1]); "
               "from tests.compat.test_vllm_modules import missing_modules; print(json.dumps(missing_modules('vllm')))")
    done = subprocess.run([sys.executable, "-c", program, str(LIST.parents[2])], capture_output=True, text=True,
                          check=True)
    errors = json.loads(done.stdout)
    check_advice(errors)
    assert errors["models.hy_v4.amd"].startswith("vllm.models is not supported: ")


@pytest.mark.parametrize("module", NAMES)
def test_a_name_is_at_its_place_in_vllm(module: str) -> None:
    found = import_module(f"outrider.{module}")
    assert all(getattr(found, name) is not None for name in NAMES[module])


@pytest.mark.parametrize(("line", "words"), [
    ("import outrider.model_executor.model_loader", "save_pretrained saves a model"),
    ("from outrider import platforms", "outrider.platforms is not supported: choose a device with device="),
    ("from outrider.config.kv_transfer import KVTransferConfig", "outrider.config.kv_transfer is not supported: one "),
    ("import outrider.distributed.device_communicators.pynccl", "LLM.update_weights"),
    ("from outrider.v1.worker.gpu_worker import Worker", "an engine makes its own workers"),
])
def test_a_missing_module_says_what_to_use(line: str, words: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=words):
        exec(line, {})


def test_what_would_send_weights_to_a_server_says_how_they_come() -> None:
    transfer = "outrider.distributed.weight_transfer"
    consumer = import_module(f"{transfer}.packed_tensor").packed_nccl_broadcast_consumer
    with pytest.raises(NotImplementedError, match="^packed_nccl_broadcast_consumer is not supported: weights come to"):
        consumer(iterator=())
    with pytest.raises(ImportError, match="nccl_engine.NCCLInitInfo is not supported: weights come"):
        exec(f"from {transfer}.nccl_engine import NCCLInitInfo", {})
    with pytest.raises(ModuleNotFoundError, match="weight_transfer.ipc_engine is not supported: LLM.update_weights"):
        import_module(f"{transfer}.ipc_engine")


def test_other_names_are_missing_in_pythons_own_words() -> None:
    with pytest.raises(ModuleNotFoundError, match="^No module named 'outrider.sampling_param'$"):
        import_module("outrider.sampling_param")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'vllm_of_another_name'$"):
        import_module("vllm_of_another_name")


def test_advice_is_one_line_without_an_end() -> None:
    assert all("\n" not in text and not text.endswith(".") for text in MISSING_MODULES.values())


def test_the_alias_tells_the_version_of_vllm_that_it_stands_for() -> None:
    program = ("import outrider.compat; outrider.compat.install_as_vllm(); import outrider, vllm, vllm.version; "
               "assert vllm.__version__ == vllm.version.__version__ == '0.31.0' != outrider.__version__; "
               "assert vllm.__version_tuple__ == vllm.version.__version_tuple__ == (0, 31, 0); "
               "assert vllm.SamplingParams is outrider.SamplingParams; from vllm import *; assert LLM is outrider.LLM")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
