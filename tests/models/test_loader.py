"""What the loader refuses, by name; and that it neither misses a value nor holds the files in memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.config import EngineConfig
from outrider.models.loader import load_model, load_weights
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.models.sources.folder import read_config
from outrider.models.sources.model_source import SourceError, WeightError
from outrider.models.sources.safetensors_files import safetensors_tensors as read
from tests.models.oracle import FAMILIES, all_logits, hf_config, hf_model, load, tokens_of

Folders = Callable[[str], Path]
NORM = "model.norm.weight"


def fill(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], dtype: torch.dtype = torch.float32) -> None:
    """Load the folder's tensors after a change to them."""
    tensors = dict(read(folder))
    change(tensors)
    load_weights(build_model(read_config(folder), dtype=dtype, device="cpu"), tensors.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_a_checkpoint_is_loaded(folder_of: Folders, family: str) -> None:
    slots = load(folder_of(family)).weights()
    saved = {n: t for n, t in hf_model(folder_of(family)).state_dict().items() if n != "lm_head.weight" or n in slots}
    assert saved.keys() == slots.keys()
    for name, tensor in saved.items():
        assert torch.equal(slots[name].target, tensor), name


def test_all_missing_and_left_over_tensors_are_named(folder_of: Folders) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[NORM], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.surprise"] = tensors["model.shock"] = torch.zeros(1)

    with pytest.raises(WeightError) as error:
        fill(folder_of("llama"), change)
    assert f"missing: model.layers.1.mlp.up_proj.weight, {NORM};" in str(error.value)
    assert "left over: model.shock, model.surprise" in str(error.value)


def test_what_may_be_ignored_is_ignored(folder_of: Folders) -> None:
    fill(folder_of("llama"), lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    fill(folder_of("llama_tied"), lambda t: t.update({"lm_head.weight": torch.ones(256, 64)}))
    with pytest.raises(WeightError, match="missing: lm_head.weight"):
        fill(folder_of("llama"), lambda t: t.pop("lm_head.weight"))


def test_an_output_that_a_tied_head_does_not_use_is_told_where_it_differs(folder_of: Folders,
                                                                          caplog: pytest.LogCaptureFixture) -> None:
    folder, table = folder_of("llama_tied"), "model.embed_tokens.weight"
    fill(folder, lambda t: t.update({"lm_head.weight": t[table].clone()}))
    assert not caplog.messages
    fill(folder, lambda t: t.update({"lm_head.weight": 2 * t[table]}))
    (said,) = caplog.messages
    assert "another lm_head.weight than the embedding" in said and "'tie_word_embeddings': False" in said


def test_wrong_shape_is_refused(folder_of: Folders) -> None:
    with pytest.raises(WeightError, match=r"model.norm.weight has shape \[1\], and the model needs \[64\]"):
        fill(folder_of("llama"), lambda t: t.update({NORM: torch.ones(1)}))  # would broadcast if it were let in


def test_integer_weights_are_refused(folder_of: Folders) -> None:
    with pytest.raises(WeightError, match="model.norm.weight has dtype torch.int8"):
        fill(folder_of("llama"), lambda t: t.update({NORM: torch.ones(64, dtype=torch.int8)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(folder_of: Folders, value: float) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name][3, 5] = value

    with pytest.raises(WeightError, match=f"{name} holds NaN or Inf"):
        fill(folder_of("llama"), change)


def test_values_that_the_dtype_cannot_hold_are_refused(folder_of: Folders) -> None:
    with pytest.raises(WeightError, match=r"model.norm.weight holds NaN or Inf \(as torch.float16\)"):
        fill(folder_of("llama"), lambda t: t.update({NORM: torch.full((64,), 1e6)}), torch.float16)


def test_a_tensor_that_comes_twice_is_refused(folder_of: Folders) -> None:
    def twice() -> Iterator[tuple[str, torch.Tensor]]:
        yield NORM, torch.ones(64)
        yield NORM, torch.ones(64)

    with pytest.raises(WeightError, match="model.norm.weight is in the files twice"):
        load_weights(build_model(read_config(folder_of("llama")), dtype=torch.float32, device="cpu"), twice())


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_a_truncated_file_is_named(folder_of: Folders, tmp_path: Path, keep: int) -> None:
    folder = shutil.copytree(folder_of("llama"), tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match="model.safetensors is truncated or damaged .*; download it again"):
        load(folder)


def test_a_folder_without_weights_or_config_is_named(folder_of: Folders, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        read_config(tmp_path)
    with pytest.raises(SourceError, match="neither config.json nor a .gguf file"):
        load(tmp_path)
    shutil.copy(folder_of("llama") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)


@pytest.fixture
def sharded(folder_of: Folders, tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    hf_model(folder_of("qwen3")).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_shards_load_like_one_file(folder_of: Folders, sharded: Path) -> None:
    tokens = tokens_of(seed=1, count=10)
    assert torch.equal(all_logits(load(sharded), tokens), all_logits(load(folder_of("qwen3")), tokens))


def test_a_lost_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=f"{lost.name} does not exist, though .* names it"):
        load(sharded)


def test_a_shard_that_is_not_what_the_index_says_is_named(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(WeightError, match=f"{second.name} and model.safetensors.index.json disagree about"):
        load(sharded)


@pytest.mark.parametrize("file", [5, None, "", "../elsewhere/model.safetensors", "/etc/hostname"])
def test_an_index_names_files_of_its_folder_alone(sharded: Path, file: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(WeightError, match="index.json names .*, which is not a plain file name"):
        list(read(sharded))


def test_a_damaged_index_is_named(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    with pytest.raises(WeightError, match="index.json is damaged .*; download it again"):
        load(sharded)


def test_dummy_weights_need_only_the_config_and_follow_the_seed(tmp_path: Path) -> None:
    hf_config("gemma3", architectures=["Gemma3ForCausalLM"]).save_pretrained(tmp_path)
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed).weights() for seed in (1, 1, 2))
    for name, slot in first.items():
        assert torch.equal(slot.target, again[name].target) and not torch.equal(slot.target, other[name].target)
        assert slot.target.abs().max() <= 1e-3 and slot.target.std() > 4e-4
    model = load_model(resolve(tmp_path), dtype=torch.bfloat16, device="cpu", load_format="dummy")
    assert all_logits(model, tokens_of(seed=1, count=5)).isfinite().all()


def test_unknown_load_format_is_refused() -> None:
    with pytest.raises(ValueError, match="load_format must be one of auto, dummy, got 'pickle'"):
        EngineConfig("m", load_format="pickle")


def test_bfloat16_checkpoints_load_into_any_dtype(folder_of: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("llama"), tmp_path / "bf16")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in read(folder)}
    save_file(tensors, folder / "model.safetensors")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(load(folder, dtype).weights()[NORM].target, tensors[NORM].to(dtype))


MEASURE = """
import sys, torch
from outrider.models.loader import load_model
from outrider.models.sources import resolve
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = status("VmRSS")
model = load_model(resolve(sys.argv[1]), dtype=torch.bfloat16, device="cpu")
print(before, status("VmHWM"), status("VmRSS"), sum(s.target.nbytes for s in model.weights().values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("vocab_size", [256, 120_000])
def test_loading_needs_little_more_memory_than_the_model(tmp_path: Path, vocab_size: int) -> None:
    """About 200 MB in one file, in small tensors, and with more than half of it in one tensor."""
    changes = {"vocab_size": vocab_size, "hidden_size": 512, "intermediate_size": 4096, "tie_word_embeddings": True}
    changes |= {"num_hidden_layers": 14 if vocab_size == 256 else 6}
    hf_config("llama", architectures=["LlamaForCausalLM"], **changes).save_pretrained(tmp_path)
    slots = build_model(read_config(tmp_path), dtype=torch.bfloat16, device="cpu").weights()
    zeros = {name: torch.zeros(slot.shape, dtype=torch.bfloat16) for name, slot in slots.items()}
    save_file(zeros, tmp_path / "model.safetensors")
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    before, peak, after, size = map(int, run.stdout.split())
    assert size > 180e6 and after - before > 0.9 * size
    print(f"peak {(peak - before) / size:.2f} times the weights")
    assert peak - before < 1.3 * size




@pytest.mark.parametrize(("name", "change", "says"), [
    ("model.layers.0.feed_forward.w1.weight", lambda tensor: tensor[:-1], "has shape"),
    ("model.layers.1.self_attn.out_proj.weight", lambda tensor: tensor * torch.nan, "holds NaN"),
    ("model.layers.0.feed_forward.w2.weight", lambda tensor: tensor.int(), "has dtype"),
])
def test_errors_have_the_names_of_the_files(folder_of: Folders, name: str,
                                            change: Callable[[torch.Tensor], torch.Tensor], says: str) -> None:
    """LFM2's files have other names than the layers here."""
    with pytest.raises(WeightError, match=f"{says}.*; the files call it {name}"):
        fill(folder_of("lfm2"), lambda tensors: tensors.update({name: change(tensors[name])}))


def test_tensors_left_over_have_the_names_of_the_files(folder_of: Folders) -> None:
    """Also those that are split into one for each expert."""
    name = "model.layers.0.mlp.experts.gate_up_proj_2"
    with pytest.raises(WeightError, match=f"left over: {name}. Fetch"):
        fill(folder_of("gpt_oss"), lambda tensors: tensors.update({name: tensors[name.removesuffix("_2")]}))
