"""`outrider fit` and the setting `fit`: plans are compared with the tensors that an engine would make, over published
configs and sizes of memory; engines on this machine start with what was chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, cli
from outrider.config import EngineConfig
from outrider.core import Axis
from outrider.engine.load import find_model
from outrider.fitting.at_start import advice_for, fit_to_device
from outrider.fitting.choice import FitChoice, flags_of
from outrider.fitting.forms import MEASURED, SHORT_CONTEXT, Form, forms_for
from outrider.fitting.room import CONTEXT_BYTES, DeviceRoom, read_size, room_of_size
from outrider.fitting.search import FitPlan, Search, StepPace
from outrider.fitting.step_estimate import tensor_bytes
from outrider.kernels import ops
from outrider.kernels.ops import operation
from outrider.layers.rotary import Unrotated
from outrider.mixers.pool import DevicePool
from outrider.mixers.recurrent.recurrent_rows import RecurrentRows
from outrider.models.sources.model_source import ModelSource
from outrider.runner.interface import NoDeviceMemory
from outrider.runner.row_state import RowState
from outrider.runner.target import outline_target
from tests.engine.harness import CONFIGS, save_folder
from tests.models.published import CHECKPOINTS

META, CUDA = torch.device("meta"), torch.device("cuda")
GIB = 1 << 30
SIZES = (8, 12, 16, 24, 48, 80, 141)
SMALL_CACHE = {"num_pages": 40, "max_num_seqs": 4}
# Of every kind of layer and of many sizes: the first are tried in every run, all of them by `make test-long`.
QUICK = ("meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-1b-it", "openai/gpt-oss-20b",
         "tiiuae/Falcon-H1-0.5B-Instruct")
OTHERS = (
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-70b-hf", "codellama/CodeLlama-34b-hf",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mixtral-8x7B-v0.1",
    "microsoft/Phi-3.5-mini-instruct", "microsoft/Phi-4-mini-instruct", "Qwen/Qwen1.5-1.8B-Chat",
    "google/gemma-2-2b-it", "google/gemma-2-9b-it", "google/gemma-2-27b-it", "meta-llama/Llama-3.1-70B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2-7B-Instruct", "Qwen/Qwen3-0.6B",
    "HuggingFaceTB/SmolLM2-135M-Instruct", "CohereLabs/aya-23-8B", "allenai/OLMo-2-1124-7B-Instruct",
    "baidu/ERNIE-4.5-21B-A3B-PT", "google/gemma-4-E2B-it", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "HuggingFaceTB/SmolLM3-3B", "ibm-granite/granite-3.3-8b-instruct",
    "ibm-granite/granite-4.0-micro", "ibm-granite/granite-4.0-h-tiny", "LiquidAI/LFM2-1.2B",
    "ByteDance-Seed/Seed-OSS-36B-Instruct", "LGAI-EXAONE/EXAONE-4.0-32B", "CohereLabs/c4ai-command-r7b-12-2024",
    "Qwen/Qwen3.5-27B", "deepseek-ai/DeepSeek-V2-Lite-Chat", "Qwen/Qwen2.5-72B-Instruct",
    "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-3-27b-it",
)
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


@cache
def source_of(name: str, folder: Path) -> ModelSource:
    path = folder / name.replace("/", "-")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CHECKPOINTS[name].config))
    return find_model(EngineConfig(str(path), load_format="dummy"))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model") / "tiny", CONFIGS["llama"] | {"vocab_size": 260})


def search_of(name: str, configs: Path, gib: float = 24, num_full: int = 1, **settings: Any) -> Search:
    source = source_of(name, configs)
    config = EngineConfig(str(source.path), **settings)
    return Search(config, source, room_of_size(int(gib * GIB)), num_full)


def plans_of(name: str, configs: Path) -> Iterator[tuple[Search, FitPlan]]:
    """The best plan for every size of memory for which there is one."""
    first = search_of(name, configs)
    for gib in SIZES:
        search = first.elsewhere(room_of_size(gib * GIB))
        try:
            yield search, search.best
        except NoDeviceMemory as error:
            assert "does not fit" in str(error) and "GiB" in str(error)


def held_by_tensors(plan: FitPlan, source: ModelSource) -> tuple[int, int, int]:
    """Bytes of the model's tensors, of the pool, and of rows, of an engine with a plan's settings."""
    with ops.planning_for((9, 0)):
        model = outline_target(plan.config, source, CUDA)
        model.weights()
    pool = DevicePool(plan.layout, plan.memory.num_pages, model.dtype, META)
    rows = RowState(plan.limits, plan.layout.groups, META)
    recurrent = RecurrentRows(model.recurrent_layers, plan.limits, pool)
    counts = 4 * plan.limits.extent(Axis.ROWS) * plan.limits.vocab_size
    tables = sum((plan.context - 1) * rotary.table[0].nbytes for rotary in getattr(model, "rotaries", ())
                 if not isinstance(rotary, Unrotated))  # an outline's have one position
    return tensor_bytes([model]) + tables, pool.data.nbytes, tensor_bytes([rows]) + recurrent.num_bytes + counts


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_tensors_that_an_engine_makes(name: str, configs: Path) -> None:
    num_plans, before = 0, None
    for search, plan in plans_of(name, configs):
        num_plans += 1
        model, pool, rows = held_by_tensors(plan, source_of(name, configs))
        assert plan.held_bytes == pytest.approx(model, rel=0.01)
        assert plan.pool_bytes == pool
        step = plan.memory.step
        masks = 4 * plan.limits.extent(Axis.ROWS) * plan.limits.extent(Axis.MASK_WORDS)
        counted = plan.other_bytes - step.activation_bytes - step.graph_bytes
        assert counted == pytest.approx(rows + masks, rel=0.01)
        assert plan.total_bytes <= search.budget, "more is planned than there is"
        assert plan.full_requests >= 1
        if plan.context < plan.max_positions:  # the longest that fits with these settings is at most a tenth longer
            pace = StepPace(plan.limits.max_requests, plan.limits.max_batched_tokens, plan.config.enforce_eager)
            longer = replace(plan.config, max_model_len=min(plan.max_positions, plan.context * 11 // 10 + 1),
                             quantization=None, kv_cache_dtype="auto")
            other = Search(longer, source_of(name, configs), search.room)
            other._outlines, other._layouts = search._outlines, search._layouts
            assert other.plan(plan.form, pace) is None
        assert before is None or plan.merit >= before.merit, "more memory made a worse plan"
        before = plan
    assert num_plans >= 1


def test_the_test_set_is_as_large_as_it_says() -> None:
    assert len({*QUICK, *OTHERS}) >= 40


def test_little_is_rounded_as_long_as_the_context_is_usual(configs: Path) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    forms = {gib: search_of(name, configs, gib).best.form for gib in (8, 16, 24, 48)}
    assert forms[48] == forms[24] == Form() and forms[8].weights == "int4"
    assert forms[16].loss < Form("int4").loss, "int4 is for what fp8 leaves no room for"


def test_settings_that_are_given_are_kept(configs: Path) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    given: dict[str, Any] = {"max_num_seqs": 48, "max_num_batched_tokens": 3000, "kv_cache_dtype": "bfloat16",
                             "quantization": "fp8", "max_model_len": 9000, "enforce_eager": True}
    for some in ([key] for key in given):
        chosen = search_of(name, configs, 24, **{key: given[key] for key in some}).best.config
        assert all(getattr(chosen, key) == given[key] for key in some), some
    best = search_of(name, configs, 24, **given).best
    assert all(getattr(best.config, key) == value for key, value in given.items())
    with pytest.raises(NoDeviceMemory, match="does not fit a GPU of 12 GiB.* 100000 tokens"):
        _ = search_of(name, configs, 12, max_model_len=100_000, quantization="fp8", kv_cache_dtype="bfloat16").best
    with pytest.raises(NoDeviceMemory, match="kv_cache_memory_bytes or num_pages leave too little"):
        _ = search_of(name, configs, 24, max_model_len=4096, kv_cache_memory_bytes=1 << 20).best


def test_requests_at_once_get_their_pages(configs: Path) -> None:
    one, four = (search_of("meta-llama/Llama-3.1-8B-Instruct", configs, 24, num_full=num).best for num in (1, 4))
    assert four.full_requests >= 4 > one.full_requests


def test_an_older_gpu_gets_no_form_that_it_has_no_kernels_for(configs: Path) -> None:
    source = source_of("meta-llama/Llama-3.1-8B-Instruct", configs)
    search = Search(EngineConfig(str(source.path)), source, room_of_size(24 * GIB, (8, 6)))
    assert search.forms == [Form()] and search.best.form == Form()


def test_adapters_and_drafters_take_their_part(configs: Path, folder: Path) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    bare = search_of(name, configs, 24).best
    with_adapters = search_of(name, configs, 24, enable_lora=True, max_loras=16, max_lora_rank=64).best
    assert with_adapters.other_bytes > bare.other_bytes + GIB // 2
    config = EngineConfig(str(folder), device="cpu", speculative_config={
        "method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})
    room = DeviceRoom("a CPU", torch.device("cpu"), 8 * GIB, 8 * GIB)
    source = find_model(config)
    drafting = Search(config, source, room).best
    plain = Search(config.without_drafts(), source, room).best
    assert drafting.memory.weight_bytes == 2 * plain.memory.weight_bytes and drafting.limits.max_drafts == 3


def test_the_costs_of_forms_are_those_that_were_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    words = {("kv_cache_dtype", "fp8"): "fp8 cache", ("quantization", "fp8"): "fp8 rows",
             ("quantization", "int4"): "int4"}
    for key, values in MEASURED.items():
        rows = [line.split("|") for line in page.splitlines()
                if line.startswith((f"| SmolLM2, {words[key]} |", f"| Gemma, {words[key]} |"))]
        assert tuple(float(row[4]) for row in rows) == values
    assert "[benchmarks" in page or "## Quality of formats" in page
    forms = forms_for(EngineConfig("m"), on_gpu=True, converts_to_fp8=True)
    assert [form.loss for form in forms] == sorted(form.loss for form in forms) and forms[0] == Form()
    assert Form("int4").worth_context == SHORT_CONTEXT


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * GIB), ("24", 24 * GIB), ("1.5g", 3 * GIB // 2),
                                            ("512MiB", GIB // 2), ("24GB", 24 * 10**9)])
def test_sizes_of_memory(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-3GiB", "0", "0.0001MiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as 24GiB"):
        read_size(text)


def test_a_size_leaves_room_for_the_driver() -> None:
    room = room_of_size(10 * GIB)
    assert room.budget(0.9) == 9 * GIB - CONTEXT_BYTES and room.budget(1.0) == 10 * GIB - CONTEXT_BYTES


def test_plans_for_a_gpu_elsewhere_change_nothing_here() -> None:
    device = torch.device("cuda")
    before = ops.scaled_linear.serves_on(device, torch.bfloat16)
    with ops.planning_for((9, 0)):
        assert ops.scaled_linear.serves_on(device, torch.bfloat16)
        assert not ops.scaled_linear.serves_on(device, torch.float64)
    with ops.planning_for((8, 6)):
        assert not ops.scaled_linear.serves_on(device, torch.bfloat16)
    assert ops.scaled_linear.serves_on(device, torch.bfloat16) == before == operation.has_fp8_triton()


# The command


def test_the_command_prints_a_plan_and_a_command_line(configs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(source_of("meta-llama/Llama-3.1-8B-Instruct", configs).path)
    assert cli.main(["fit", path, "--gpu", "16GiB"]) == 0
    out = capsys.readouterr().out
    assert "GiB are planned" in out and "perplexity" in out and "was not measured" in out and "for more:" in out
    (command,) = (line for line in out.splitlines() if line.startswith("outrider serve"))
    args = cli.build_parser().parse(command.split()[1:])
    assert cli.main(["fit", path, "--gpu", "16GiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["command"] == command and told["max_model_len"] == args.max_model_len
    assert {name: getattr(args, name) for name in told["settings"]} == told["settings"]
    sizes = told["bytes"]
    assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total") <= told["budget_bytes"]
    assert cli.main(["fit", path, "--gpu", "4GiB"]) == 2 and "needs at least" in capsys.readouterr().err
    assert cli.main(["fit", path, "--gpu", "much"]) == 2 and "24GiB" in capsys.readouterr().err


def test_flags_of_settings() -> None:
    settings = {"enforce_eager": True, "packed_weights": False, "max_num_seqs": 4, "speculative_config": None}
    assert list(flags_of(settings)) == ["--enforce-eager", "--no-packed-weights", "--max-num-seqs 4",
                                        "--speculative-config none"]


# Engines that start


def test_an_engine_starts_with_what_was_chosen(folder: Path) -> None:
    config = EngineConfig(str(folder), fit=True, max_num_seqs=3)
    source = find_model(config)
    chosen, lines = fit_to_device(config, source)
    assert lines[0].startswith("fit: chosen") and chosen.max_num_seqs == 3 and chosen.fit
    room = DeviceRoom("a CPU", torch.device("cpu"), GIB, GIB)
    plan = FitChoice.from_search(config, Search(config, source, room)).plan
    with LLM(str(folder), fit=True, max_num_seqs=3, skip_tokenizer_init=True) as llm:
        assert llm._config is not None and llm._config.kv_cache_memory_bytes == chosen.kv_cache_memory_bytes
        assert llm.engine.limits.max_requests == 3 and llm.engine.limits.max_len == plan.context
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3), use_tqdm=False)
        step = llm.engine.runner.device_step
        assert plan.memory.weight_bytes == sum(slot.nbytes for slot in step.model.weights().values())
        assert plan.held_bytes >= tensor_bytes([step.model]) * 0.99
        assert chosen.kv_cache_memory_bytes >= step.pool.data.nbytes > 0.99 * chosen.kv_cache_memory_bytes


def test_another_process_chooses_for_a_worker_of_its_own(folder: Path) -> None:
    from outrider.engine.start import start_engine

    engine = start_engine(EngineConfig(str(folder), fit=True, skip_tokenizer_init=True, **{"max_num_seqs": 2}),
                          in_process=True)
    try:
        assert engine.model.config is not None and engine.model.config.kv_cache_memory_bytes is not None
        assert engine.limits.max_requests == 2
    finally:
        engine.close()


def test_without_room_an_engine_says_which_settings_help_most(folder: Path) -> None:
    with pytest.raises(NoDeviceMemory, match="lower max_model_len to 48") as caught:
        LLM(str(folder), num_pages=4, max_model_len=128, skip_tokenizer_init=True)
    assert "these settings need" in str(caught.value) and "which needs" in str(caught.value)


def test_advice_names_values(configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("meta-llama/Llama-3.1-8B-Instruct", configs)
    monkeypatch.setattr("outrider.fitting.at_start.room_of", lambda device: room_of_size(16 * GIB))
    advice = advice_for(EngineConfig(str(source.path), device="cpu"), source)
    assert "these settings need" in advice and "and may take 13.81" in advice
    assert "max_model_len=8192 saves" in advice and "--fit (fit=True) chooses --max-model-len" in advice
    assert "quantization='int4'" in advice
    assert advice.count(" saves ") == 3


def test_fit_is_not_loaded_unless_it_is_on(folder: Path) -> None:
    program = ("import sys; from outrider import LLM\n"
               f"with LLM({str(folder)!r}, num_pages=40, skip_tokenizer_init=True) as llm: pass\n"
               "print([name for name in sys.modules if name.startswith(('outrider.fitting', 'outrider.engine.fit'))])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_without_room_names_the_one_that_plans(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser()
    assert cli._report(NoDeviceMemory("the device has no memory for the cache"), parser) == 2
    assert "`outrider fit MODEL` shows what fits" in capsys.readouterr().err.replace("\n", " ")
    cli._report(NoDeviceMemory("no room; --fit (fit=True) chooses --quantization fp8"), parser)
    assert "shows what fits" not in capsys.readouterr().err
