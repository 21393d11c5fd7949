"""What machine_code.py finds in a few lines of machine code; the kernels' own are looked at where they are compiled."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("machine code is looked at where Triton compiles", allow_module_level=True)

from machine_code import parsed, unset_reads

# A loop that may be skipped (the branch at 10), whose preheader sets what stands behind it: as ptxas 12.8 did.
SKIPPED = """
/*0000*/ UMOV UR4, 0x1 ;
/*0010*/ @!P0 BRA 0x60 ;
/*0020*/ UIADD3.64 UR8, UR4, URZ ;
/*0030*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR6], R24 ;
/*0040*/ UISETP.GE.AND UP0, UPT, UR4, 0x3, UPT ;
/*0050*/ @P1 BRA 0x30 ;
/*0060*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR6], R24 ;
/*0070*/ EXIT ;
"""


def test_what_only_one_path_sets_is_found():
    found = unset_reads(parsed(SKIPPED))
    assert [(line[:2], registers) for line, registers in found] == [("20", [5]), ("60", [8, 9])]


def test_what_all_paths_set_is_not():
    lines = SKIPPED.replace("UMOV UR4, 0x1 ", "UIMAD.WIDE UR4, UR2, UR3, URZ ").replace(
        "/*0010*/ @!P0 BRA 0x60 ;\n", ""
    )
    assert [registers for _, registers in unset_reads(parsed(lines))] == [[2, 3]]


@pytest.mark.parametrize(("line", "reads", "sets"), [
    ("@P1 R2UR P0, UR6, R3", set(), {6}),
    ("R2UR UR6, R3", set(), {6}),
    ("SYNCS.EXCH.64 URZ, [UR8+0x301e0], UR4", {8, 4, 5}, set()),
    ("UTMALDG.4D [UR8], [UR4]", {8, 4}, set()),
    ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT", {12, 13, 14, 15}, set()),
    ("UIMAD.WIDE.U32 UR12, UR4, 0x8, URZ", {4}, {12, 13}),
    ("FFMA R3, R4, UR7, R5", {7}, set()),
])  # fmt: skip
def test_registers_of_an_instruction(line, reads, sets):
    (one,) = parsed(f"/*0010*/ {line} ;")
    assert (one.reads, one.sets) == (reads, sets)
