"""Descriptors that a kernel's matrix instructions get, computed from its machine code: a check of the assembler.

Instructions of whole warp groups read tiles of shared memory by descriptors, two uniform registers with the address
and the layout. The assembler of CUDA 12.8 sometimes adds to a register that nothing has written, and the card then
reads outside the program's memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

LOW = (1 << 32) - 1
SHARED_START = 0x400  # address of a program's shared memory
# Upper halves of Triton's descriptors: rows of 128, 64 or 32 bytes; with 8 rows there is no distance between eights.
LAYOUTS = {0x40000040, 0x80000020, 0xC0000010, 0x40000000, 0x80000000, 0xC0000000}
PER_WARP = "a number that differs from warp to warp"
Number = int | str | None  # None: nothing has written it, or no address comes from it


def stray_descriptors(kernel: Any) -> list[str]:
    """Matrix instructions of a compiled kernel whose descriptors do not lie in its shared memory."""
    import triton

    if "wgmma.mma_async" not in kernel.asm["ptx"]:
        return []
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return UniformRegisters().run(code, kernel.metadata.shared)


class UniformRegisters:
    """The registers while instructions run in the order of the code. Loops run once: descriptors do not change."""

    def __init__(self) -> None:
        self.numbers: dict[int, Number] = {}
        self.carries: dict[str, Number] = {}

    def run(self, code: str, shared_bytes: int) -> list[str]:
        strays = []
        for line in code.splitlines():
            line = re.sub(r"/\*.*?\*/", "", line).strip(" ;\t")
            found = re.fullmatch(r"(@\S+ )?([A-Z][\w.]*)\s+(.*)", line)
            if found is None:
                continue
            condition, name, rest = found.groups()
            if "GMMA" in name:
                strays += [line] if self._is_stray(rest, shared_bytes) else []
            elif re.match(r"UR\d", rest):
                self._write(name, rest.split(", "), condition is not None)
        return strays

    def _is_stray(self, rest: str, shared_bytes: int) -> bool:
        first = re.search(r"gdesc\[UR(\d+)\]", rest)
        assert first is not None, rest
        place = int(first[1])
        has_left = re.match(r"R\d+, gdesc", rest) is not None  # otherwise registers have the left matrix
        for low, high in [(place + 2, place + 3)] + ([(place, place + 1)] if has_left else []):
            address, layout = self.numbers.get(low), self.numbers.get(high)
            is_inside = address == PER_WARP
            if isinstance(address, int):
                is_inside = 0 <= ((address & 0x3FFF) << 4) - SHARED_START < shared_bytes
            if not is_inside or layout not in LAYOUTS | {PER_WARP}:
                return True
        return False

    def _write(self, name: str, places: list[str], is_conditional: bool) -> None:
        target, sources = int(places[0][2:]), places[1:]
        if name in ("UIADD3.64", "UIMAD.WIDE.U32"):
            total = (self._add([self._pair(source) for source in sources], bits=64)[0] if name == "UIADD3.64" else
                     self._multiply_wide(*sources))
            self.numbers[target] = total & LOW if isinstance(total, int) else total
            self.numbers[target + 1] = total >> 32 if isinstance(total, int) else total
            return
        before = self.numbers.get(target)
        number = self._result(name, sources)
        self.numbers[target] = number if not is_conditional or number == before else None

    def _result(self, name: str, sources: list[str]) -> Number:
        carries = [source for source in sources if re.fullmatch(r"!?UP\w+", source)]
        numbers = [self._read(source) for source in sources if source not in carries]
        if name == "UIADD3":
            number, carry = self._add(numbers)
            self.carries |= dict.fromkeys(carries[:1], carry)
            return number
        if name == "UIADD3.X":
            return self._add([*numbers, self.carries.get(carries[0])])[0]
        if name in ("R2UR", "ULDC"):
            return PER_WARP
        if name == "S2UR":
            return 0 if sources == ["SR_CgaCtaId"] else None
        if None in numbers or name.split(".")[0] not in _OPERATIONS:
            return None
        if PER_WARP in numbers:
            return PER_WARP
        return _OPERATIONS[name.split(".")[0]](name, *numbers)

    @staticmethod
    def _add(numbers: list[Number], bits: int = 32) -> tuple[Number, Number]:
        """(the sum, what is carried)."""
        if None in numbers:
            return None, None
        if PER_WARP in numbers:
            return PER_WARP, PER_WARP
        total = sum(number for number in numbers if isinstance(number, int))
        return total & ((1 << bits) - 1), total >> bits

    def _multiply_wide(self, left: str, right: str, added: str) -> Number:
        numbers = self._read(left), self._read(right), self._pair(added)
        if None in numbers:
            return None
        a, b, c = numbers
        return a * b + c if isinstance(a, int) and isinstance(b, int) and isinstance(c, int) else PER_WARP

    def _read(self, place: str) -> Number:
        found = re.fullmatch(r"(-|~)?UR(\d+|Z)", place)
        if found is None:
            return int(place, 0) & LOW if re.fullmatch(r"-?(0x)?[0-9a-f]+", place) else None
        number = 0 if found[2] == "Z" else self.numbers.get(int(found[2]))
        if not isinstance(number, int) or found[1] is None:
            return number
        return (-number if found[1] == "-" else ~number) & LOW

    def _pair(self, place: str) -> Number:
        """The number of 64 bits in two registers, or as written."""
        found = re.fullmatch(r"(-)?UR(\d+)", place)
        if found is None:
            return 0 if place == "URZ" else int(place, 0)
        low, high = self.numbers.get(int(found[2])), self.numbers.get(int(found[2]) + 1)
        if not isinstance(low, int) or not isinstance(high, int):
            return None if None in (low, high) else PER_WARP
        return -(low | high << 32) if found[1] else low | high << 32


def _logic(name: str, a: int, b: int, c: int, table: int, *_: int) -> int:
    bits = [(a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            for row in range(8) if table >> row & 1]
    return sum(bits[1:], bits[0]) & LOW if bits else 0  # rows have no bit in common


def _shift(name: str, low: int, bits: int, high: int) -> int | None:
    if name.startswith("USHF.L.U32"):
        return low << bits & LOW
    return high >> bits if name == "USHF.R.U32.HI" else None


def _shift_and_add(name: str, number: int, base: int, *rest: int) -> int | None:
    if name == "ULEA":
        return ((number << rest[0]) + base) & LOW
    return ((rest[0] << 32 | number) >> 32 - rest[1]) + base & LOW if name == "ULEA.HI" else None


_OPERATIONS: dict[str, Any] = {
    "UMOV": lambda name, number: number,
    "ULEA": _shift_and_add,
    "USEL": lambda name, a, b: a if a == b else None,
    "USHF": _shift, "UIMAD": lambda name, a, b, c: (a * b + c) & LOW,
    "USGXT": lambda name, number, bits: number & ((1 << bits) - 1), "ULOP3": _logic,
}
