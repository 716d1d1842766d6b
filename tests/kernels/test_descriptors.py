"""The check of descriptors, over lines of machine code as the disassembler writes them."""

from __future__ import annotations

from tests.kernels.descriptors import UniformRegisters

SHARED_BYTES = 4096
START = """
        /*0000*/                   UMOV UR4, 0x400 ;
        /*0010*/                   S2UR UR5, SR_CgaCtaId ;
        /*0020*/                   ULEA UR4, UR5, UR4, 0x18 ;
        /*0030*/                   USHF.R.U32.HI UR8, URZ, 0x4, UR4 ;
        /*0040*/                   USGXT.U32 UR8, UR8, 0xe ;
        /*0050*/                   UMOV UR9, 0x40000040 ;
"""
PRODUCT = "        /*0080*/                   HGMMA.64x16x16.F32 R64, R28, gdesc[UR12].tnspB, R64 ;\n"


def strays(*instructions: str) -> int:
    """Products, of one, with a descriptor outside of shared memory after these instructions."""
    code = START + "".join(f"        /*0060*/                   {each} ;\n" for each in instructions) + PRODUCT
    return len(UniformRegisters().run(code, SHARED_BYTES))


def test_a_descriptor_from_the_start_of_shared_memory_is_fine() -> None:
    assert strays("UIADD3.64 UR14, UR8, 0x20, URZ") == 0
    assert strays("UIADD3 UR14, UR8, 0x20, URZ", "UMOV UR15, UR9") == 0


def test_a_descriptor_from_a_register_that_nothing_has_written_is_found() -> None:
    assert strays("UIADD3.64 UR14, UR20, 0x20, URZ") == 1
    assert strays() == 1


def test_a_descriptor_after_the_end_of_shared_memory_is_found() -> None:
    assert strays("UIADD3.64 UR14, UR8, 0x100, URZ") == 1


def test_a_buffer_that_warps_choose_is_not_taken_for_a_fault() -> None:
    """Loops with several buffers select the next one; only the card knows which."""
    assert strays("R2UR UR20, R5", "USEL UR20, UR20, URZ, !UP0", "ULEA UR14, UR20, UR8, 0x6", "UMOV UR15, UR9") == 0
    assert strays("USEL UR20, UR21, URZ, !UP0", "ULEA UR14, UR20, UR8, 0x6", "UMOV UR15, UR9") == 1


def test_a_place_in_a_ring_is_computed() -> None:
    """The slot of turn 0 among 9 and among 7, as the assembler divides by them."""
    of_nine = ("UMOV UR16, 0x1", "UIADD3 UR20, UR16, -0x1, URZ", "UIMAD.WIDE.U32 UR18, UR20, 0x38e38e39, URZ",
               "USHF.R.U32.HI UR18, URZ, 0x1, UR19", "UIMAD UR20, UR18, -0x9, UR20")
    of_seven = ("UMOV UR20, 0x7", "UIMAD.WIDE.U32 UR18, UR20, 0x24924925, URZ", "UIADD3 UR18, UR20, -UR19, URZ",
                "ULEA.HI UR19, UR18, UR19, URZ, 0x1f", "USHF.R.U32.HI UR18, URZ, 0x2, UR19",
                "UIMAD UR20, UR18, -0x7, UR20")
    for slot in (of_nine, of_seven):
        assert strays(*slot, "ULEA UR14, UR20, UR8, 0x8", "UMOV UR15, UR9") == 0
        assert strays(*slot[1:], "ULEA UR14, UR20, UR8, 0x8", "UMOV UR15, UR9") == 1, "a register was not written"
