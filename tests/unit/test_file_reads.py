"""Files of weights that change or are damaged are refused by name, and never take the process with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.engine.weight_files import read_packed, read_safetensors
from outrider.models.sources import SourceError, file_reads, gguf_source
from outrider.models.sources.model_source import WeightError
from outrider.models.sources.safetensors_files import safetensors_tensors
from tests.unit.test_sources import VOCAB, write_gguf

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32,
          torch.uint16, torch.uint8, torch.bool]
Read = Callable[[Path], Iterable[Any]]


def unmapped(path: Path) -> Iterator[Any]:
    return safetensors_tensors(path, maps_files=False)


def packed(path: Path) -> Iterator[Any]:
    return read_packed(path, ["first", "last"], ["float32"] * 2, [[1 << 16]] * 2)


READS: list[Read] = [unmapped, read_safetensors]


def write(path: Path, *tensors: tuple[str, Any], data: bytes = bytes(32)) -> Path:
    header = json.dumps(dict(tensors)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_tensors_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    given = {str(dtype): torch.arange(-6, 6).remainder(2).to(dtype).view(3, 4) for dtype in DTYPES}
    save_file(given | {"none": torch.empty(0, 3), "one": torch.tensor(1.5)}, tmp_path / "file")
    expected = dict(safetensors_tensors(tmp_path / "file"))
    found = dict(unmapped(tmp_path / "file"))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert isinstance(tensor, torch.Tensor) and found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape and torch.equal(found[name].view(-1).view(torch.uint8),
                                                                 tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("field", "value"), [
    ("shape", [-2, -4]), ("shape", [2.0, 4]), ("shape", [True, 8]), ("shape", ["8"]), ("shape", 8), ("shape", None),
    ("data_offsets", [0.0, 32.0]), ("data_offsets", [-32, 0]), ("data_offsets", [0, 32, 64]), ("data_offsets", [32, 0]),
    ("data_offsets", [1, 33]), ("data_offsets", [0, 1e400]), ("data_offsets", [False, 32]), ("dtype", "F13"),
    ("dtype", ["F32"]), ("shape", [10**400]),
])
def test_what_no_header_can_say_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Read, field: str, value: Any
) -> None:
    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
    assert len(list(read(write(tmp_path / "good", ("tensor", entry))))) == 1
    path = write(tmp_path / "bad", ("tensor", entry | {field: value}))
    monkeypatch.setattr(file_reads.FileReader, "read_tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(WeightError, match="bad has a damaged header"):
        list(read(path))


@pytest.mark.parametrize("read", READS)
def test_tensors_that_share_bytes_or_lie_behind_the_end_are_refused(tmp_path: Path, read: Read) -> None:
    first, shared, late = ({"dtype": "F32", "shape": [4], "data_offsets": list(at)}
                           for at in [(0, 16), (8, 24), (16, 32)])
    for held in ([("a", first), ("b", shared)], [("b", late)]):
        with pytest.raises(WeightError, match="tensor 'b' begins at byte"):
            list(read(write(tmp_path / "file", *held)))
    with pytest.raises(WeightError, match="file ends before the end of tensor 'b'"):
        list(read(write(tmp_path / "file", ("a", first), ("b", late), data=bytes(31))))


@pytest.mark.parametrize("read", [*READS, packed])
def test_a_file_that_is_cut_off_while_it_is_read_is_refused_by_name(tmp_path: Path, read: Read) -> None:
    save_file({"first": torch.ones(1 << 16), "last": torch.ones(1 << 16)}, tmp_path / "file")
    tensors = iter(read(tmp_path / "file"))
    next(tensors)
    os.truncate(tmp_path / "file", 1000)
    with pytest.raises(WeightError, match="file ends before the end of tensor 'last': it was cut off"):
        list(tensors)


@pytest.mark.parametrize("read", READS)
def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path, read: Read) -> None:
    for name, data in [("empty", b""), ("short", b"1234"), ("long", b"\xff" * 64), *(
            (name, len(text).to_bytes(8, "little") + text)
            for name, text in [("text", b"no json!"), ("list", b"[]"), ("deep", b"[" * 20_000)])]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(WeightError, match=name):
            list(read(tmp_path / name))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((WeightError, FileNotFoundError), match="pipe"):
        list(read(tmp_path / "pipe"))


def test_a_gguf_file_that_may_change_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "Q8_0", extra=lambda writer: writer.add_token_list([f"{at:05}" for at in range(VOCAB)]))
    expected = gguf_source(path)
    tensors = {name: torch.as_tensor(tensor) for name, tensor in expected.tensors()}
    for name in ("mmap.mmap", "numpy.memmap"):
        monkeypatch.setattr(name, lambda *given, **fields: pytest.fail("the file was mapped"))
    for num_bytes in (4 << 20, 64):  # the header is longer than what is read at first
        monkeypatch.setattr("outrider.models.sources.gguf_header.UNMAPPED_BYTES", num_bytes)
        found = gguf_source(path, maps_file=False)
        assert found.config == expected.config
        assert all(torch.equal(torch.as_tensor(tensor), tensors[name]) for name, tensor in found.tensors())
    reading = gguf_source(path, maps_file=False).read()
    next(reading)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(WeightError, match=r"model.gguf ends before the end of tensor .*: it was cut off"):
        list(reading)
    for num_bytes in (4 << 20, 64):
        monkeypatch.setattr("outrider.models.sources.gguf_header.UNMAPPED_BYTES", num_bytes)
        with pytest.raises(SourceError, match="is cut off"):
            gguf_source(path, maps_file=False)
        os.truncate(path, 200)
