"""Read the header of a GGUF file: its metadata, and the place of each tensor in the file.

The gguf library decodes tensors of the kinds that need it. Its reader of headers is not used, because it makes an array
for every metadata string, which takes seconds for a vocabulary, and gives no clear error for a truncated file. This
file does not depend on the model."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

from outrider.core.fields import shown
from outrider.models.sources.model_source import SourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_NESTING = 4  # depth of nested arrays; a deeper one means a damaged file
MAX_DIMENSIONS = 8
MAX_SHOWN = 64  # characters of a key that is shown without quotes
UNMAPPED_BYTES = 4 << 20  # of a file that is not mapped: most headers fit into them
MAX_NAME = 1 << 10  # bytes of a key or of a tensor's name; llama.cpp reads tensors' names of 64
MAX_ITEMS = 1 << 22  # of a list; vocabularies and their merges have less than a million
# Kinds of tensors: the number in the file, how many values are stored together, and their bytes.
KINDS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q8_1": (9, 32, 40), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8), "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18),
}
TensorKind = IntEnum("TensorKind", {name: number for name, (number, _, _) in KINDS.items()})  # type: ignore[misc]


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]  # row-major: the reverse of the order in the file
    kind: TensorKind
    offset: int  # in the file
    num_bytes: int


@dataclass(frozen=True)
class Header:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    maps_file: bool  # tensors are mapped into memory; the file must not change


class _NeedsMoreBytes(SourceError):
    """Raised if the header goes on after the part of the file that was read."""


class _Cursor:
    """A position in the file that moves only forward and never past the end."""

    def __init__(self, data: mmap.mmap | bytes, path: Path, file_bytes: int) -> None:
        """data: the file, or its beginning."""
        self.data, self.path, self.file_bytes, self.at = data, path, file_bytes, 0
        self.part = "its header"  # what is being read, for errors

    def take(self, num_bytes: int) -> bytes:
        if self.at + num_bytes > len(self.data):
            raise self._cut_off(self.at + num_bytes)
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def _cut_off(self, end: int) -> SourceError:
        """Return the error for a header that needs more bytes than there are, up to `end`."""
        if end <= self.file_bytes:
            return _NeedsMoreBytes(f"{self.path} became shorter while it was read. Fetch it again.")
        return SourceError(f"{self.path} is cut off or damaged: {self.part} goes on after byte "
                           f"{self.file_bytes}, where the file ends. Fetch it again.")

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def name(self, what: str) -> str:
        """Read a short text. Its length is bounded, so that a damaged length does not read the rest of the file."""
        begin, length = self.at, self.scalar("Q")
        if length > MAX_NAME:
            raise SourceError(f"{self.path} is damaged: the {what} at byte {begin} would have {length} bytes. Fetch it "
                              "again.")
        return self.take(length).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Read many strings in one loop without function calls, because a vocabulary with its merges has a hundred
        thousand strings."""
        data, at, end, length = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            begin = at + 8
            at = begin + length(data, at)[0] if begin <= end else begin
            if at > end:
                raise self._cut_off(at)
            found.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY and depth < MAX_NESTING:
            return self.array(depth + 1)
        raise SourceError(f"{self.path} is damaged: before byte {self.at}, {self.part} has a value of type {kind}, "
                          "which GGUF does not have or which is nested too deep. Fetch it again.")

    def array(self, depth: int) -> list[Any]:
        item, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ITEMS:
            raise SourceError(f"{self.path} is damaged: {self.part} is a list of {count} values. Fetch it again.")
        if item in SCALARS:
            size = struct.calcsize(f"<{SCALARS[item]}")
            packed = self.take(count * size)
            return list(struct.unpack(f"<{count}{SCALARS[item]}", packed))
        if item == STRING:
            return self.strings(count)
        return [self.value(item, depth) for _ in range(count)]


def named(key: str) -> str:
    """Return a key for a message, shortened and escaped if a damaged file made it long or unprintable."""
    return key if key.isprintable() and len(key) <= MAX_SHOWN else shown(key)


def read_header(path: Path, *, maps_file: bool = True) -> Header:
    """Read a GGUF file's header. maps_file: the header, and later each tensor, is mapped into memory. Do not map a file
    that may change: a process that touches a mapped page behind the file's new end is killed."""
    with open(path, "rb") as file:
        start = file.read(len(MAGIC))
        if start != MAGIC:
            what = "is empty" if not start else f"begins with {start!r} instead of {MAGIC!r}"
            raise SourceError(f"{path} is not a GGUF file: it {what}")
        if not maps_file:
            return _parse_unmapped(path, file)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path, len(data)), maps_file=True)


def _parse_unmapped(path: Path, file: BinaryIO) -> Header:
    """Parse the beginning of the file, and a longer part of it if the header does not fit."""
    num_bytes, file_bytes = UNMAPPED_BYTES, path.stat().st_size
    while True:
        file.seek(0)
        data = file.read(num_bytes)
        try:
            return _parse(_Cursor(data, path, file_bytes), maps_file=False)
        except _NeedsMoreBytes:
            if len(data) < num_bytes:
                raise
        num_bytes *= 4


def _parse(cursor: _Cursor, *, maps_file: bool) -> Header:
    path = cursor.path
    cursor.take(len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise SourceError(f"{path}: GGUF version {version} is not supported; supported are {VERSIONS} (little-endian). "
                          "Convert the model again")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.name("key")
        cursor.part = f"metadata {shown(key)}"
        metadata[key] = cursor.value(cursor.scalar("I"))
    cursor.part = "the list of its tensors"
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise SourceError(f"{path} is damaged: general.alignment is {shown(alignment)}. Fetch it again.")
    start = -(-cursor.at // alignment) * alignment
    tensors = {entry[0]: _place(path, entry, start, cursor.file_bytes) for entry in entries}
    return Header(path, metadata, tensors, maps_file)


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.name("tensor's name"), cursor.scalar("I")
    if num_dims > MAX_DIMENSIONS:
        raise SourceError(f"{cursor.path} is damaged: tensor {shown(name)} has {num_dims} dimensions. Fetch it again.")
    dims = [cursor.scalar("Q") for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")


def _place(path: Path, entry: tuple[str, tuple[int, ...], int, int], start: int, file_size: int) -> TensorEntry:
    name, shape, raw_kind, offset = entry
    try:
        kind = TensorKind(raw_kind)
    except ValueError:
        raise SourceError(f"{path}: tensor {shown(name)} has the unknown type {raw_kind}; the file is damaged, or "
                          "newer than this version of Outrider. Use the model's safetensors folder instead") from None
    num_elements = 1
    for extent in shape:
        num_elements *= extent
    _, per_group, group_bytes = KINDS[kind.name]
    if 0 in shape:
        raise SourceError(f"{path} is damaged: tensor {shown(name)} has the shape {shape}. Fetch it again.")
    if shape and shape[-1] % per_group:
        raise SourceError(f"{path}: tensor {shown(name)} of shape {shape} cannot be {kind.name}, whose rows must have "
                          f"a multiple of {per_group} values. Fetch the file again")
    num_bytes = num_elements // per_group * group_bytes
    if start + offset + num_bytes > file_size:
        raise SourceError(f"{path} is cut off: tensor {shown(name)} ends at byte {start + offset + num_bytes}, "
                          f"the file at byte {file_size}. Fetch it again.")
    return TensorEntry(name, shape, kind, start + offset, num_bytes)
