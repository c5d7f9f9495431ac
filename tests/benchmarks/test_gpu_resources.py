"""Figures of GPU kernels: how a listing of machine instructions is read, and the tables made of the figures."""

import json

import pytest

from benchmarks import gpu_resources
from benchmarks.gpu_kernels import CHECKED, REPORTED

# A loop over items around two loops over blocks, without and with a mask, and a loop that waits at a barrier.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   S2R R0, SR_TID.X ;
.L_x_2:
        /*0020*/              @!P0 SYNCS.PHASECHK R2 ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/                   HGMMA.64x8x16.F32.BF16 R4, gdesc[UR4] ;
        /*0050*/                   FADD R4, R4, R5 ;
        /*0060*/               @P1 BRA `(.L_x_3) ;
.L_x_4:
        /*0070*/                   HGMMA.64x8x16.F32.BF16 R4, gdesc[UR4] ;
        /*0080*/                   FSEL R4, R4, R5, P2 ;
        /*0090*/                   FADD R4, R4, R5 ;
        /*00a0*/               @P1 BRA `(.L_x_4) ;
        /*00b0*/                   BRA `(.L_x_1) ;
"""


def test_the_innermost_loop_without_a_mask_is_counted():
    assert gpu_resources.loop_opcodes(LISTING) == {"HGMMA": 1, "FADD": 1, "BRA": 1}


def test_all_instructions_of_a_kernel_without_products_are_counted():
    listing = LISTING.replace("HGMMA", "FMUL")
    assert gpu_resources.loop_opcodes(listing).total() == 12


def test_arrivals_of_barriers():
    ptx = """
        mov.b32 	%r5, 256;
        @%p2 mbarrier.init.shared::cta.b64 [%r4], %r5;
        @%p2 mbarrier.init.shared::cta.b64 [__dynamic_shmem__0+64], %r5;
        mbarrier.init.shared.b64 [%r6], 128;
    """
    assert gpu_resources.barrier_arrivals(ptx) == {256: 2, 128: 1}


def test_the_tables_hold_the_figures():
    report = json.loads(gpu_resources.RESULTS.read_text())
    text = gpu_resources.table()
    assert [one["kernel"] for one in report["kernels"]] == list(REPORTED)
    assert [one["call"] for one in report["descriptors"]] == list(CHECKED)
    assert sum(line.startswith("| ") for line in text.splitlines()) == 2 + len(REPORTED)
    assert " 0 broken rules" in text.replace("\n", " ")


def test_a_broken_rule_fails_the_report(tmp_path, monkeypatch):
    report = json.loads(gpu_resources.RESULTS.read_text())
    report["descriptors"][0]["broken"] = ["rank"]
    monkeypatch.setattr(gpu_resources, "missing_tools", list)
    monkeypatch.setattr(gpu_resources, "kernels", lambda names: report["kernels"])
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert gpu_resources.main(["--only", "kernels", "--json", str(path)]) == 1


def test_missing_tools_are_told(monkeypatch, capsys):
    monkeypatch.setattr(gpu_resources, "missing_tools", lambda: ["ptxas is not installed"])
    assert gpu_resources.main([]) == 2
    assert "ptxas is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("name", CHECKED)
def test_names_tell_kernels_apart(name):
    assert name.split()[0] in ("decode", "prefill", "tree", "flash", "norm") or name.startswith("int")
