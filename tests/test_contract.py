"""A change of machine code is said in words, loop by loop, and accepted by one command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_kernel import Scale, TileGemm
from test_sass import parsed
from typer.testing import CliRunner

from cutedsl_fa3 import Variant, cli_contract, contract, masks, scores
from cutedsl_fa3.cli import app
from cutedsl_fa3.compile import Compiled, Resources, compile_kernel
from cutedsl_fa3.contract import Contract, Contracts, broken, contract_of, differences, parts_of
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem

RESOURCES = {"registers": 168, "stack": 0, "advisories": []}
LOOPS = {
    "outside loops": {"instructions": 900, "BAR.SYNC": 2},
    "full tiles": {"instructions": 469, "HGMMA.64x128x16.F32.BF16": 12, "MUFU.EX2": 64},
}

KERNEL = (  # a producer and a consumer with the two loops of a forward, its waits behind the end
    "@P0 BRA `(.L_consumer)",
    "USETMAXREG.DEALLOC.CTAPOOL 0x18",
    ".L_loads:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
    "@!P0 BRA `(.L_empty)",
    ".L_is_empty:",
    "UTMALDG.4D [UR24], [UR8], desc[URZ]",
    "@P1 BRA `(.L_loads)",
    "EXIT",
    ".L_consumer:",
    "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
    "@!P0 BRA `(.L_consumer)",
    ".L_full:",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24",
    "MUFU.EX2 R0, R0",
    "@P1 BRA `(.L_full)",
    ".L_masked:",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24",
    "ISETP.GE.AND P2, PT, R0, R1, PT",
    "FSEL R0, R0, -INF, P2",
    "MUFU.EX2 R0, R0",
    "@P1 BRA `(.L_masked)",
    "STG.E desc[UR16][R4.64], R21",
    "EXIT",
    ".L_empty:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
    "@!P0 NANOSLEEP.SYNCS 0x989680",
    "@!P0 BRA `(.L_empty)",
    "BRA `(.L_is_empty)",
    ".L_end:",
    "BRA `(.L_end)",
)


def test_parts_are_named_by_what_they_do_and_waits_are_counted_where_they_wait():
    parts = parts_of([parsed(*KERNEL)])
    assert list(parts) == [
        "outside loops", "loads", "register request", "masked tiles", "full tiles",
    ]  # fmt: skip
    assert parts["loads"] == {
        "instructions": 5, "SYNCS.PHASECHK.TRANS64.TRYWAIT": 1, "UTMALDG.4D": 1, "waits": 1,
    }  # fmt: skip
    assert parts["masked tiles"] == {
        "instructions": 5, "FSEL": 1, "HGMMA.64x128x16.F32.BF16": 1, "ISETP": 1, "MUFU.EX2": 1,
    }  # fmt: skip
    assert parts["full tiles"]["instructions"] == 3
    assert parts["outside loops"]["STG.E"] == 1 and "waits" not in parts["outside loops"]


def test_a_kernel_without_products_is_told_apart_from_the_one_it_goes_with():
    parts = parts_of([parsed("LDG.E R0, desc[UR4][R2.64]", "EXIT"), parsed(*KERNEL)])
    assert parts["kernel without products 1: outside loops"] == {"instructions": 2, "LDG.E": 1}
    assert parts["full tiles"]["MUFU.EX2"] == 1


def test_a_difference_is_said_as_loop_instruction_before_and_after():
    after = Contract(
        {**RESOURCES, "registers": 240, "advisories": ["C7510 wgmma serialised"]},
        {
            "outside loops": LOOPS["outside loops"],
            "full tiles": {**LOOPS["full tiles"], "MUFU.EX2": 128, "STL": 3},
            "loop": {"instructions": 7},
        },
    )
    assert differences(Contract(RESOURCES, LOOPS), after) == [
        "registers 168 -> 240; advisories none -> C7510 wgmma serialised",
        "full tiles: MUFU.EX2 64 -> 128; STL 0 -> 3",
        "loop: new, 7 instructions",
    ]
    assert differences(after, Contract(RESOURCES, LOOPS))[-1] == "loop: gone, 7 instructions"


COUNTS = st.dictionaries(
    st.sampled_from(["HGMMA.64x128x16.F32.BF16", "MUFU.EX2", "LDG.E.128", "waits"]),
    st.integers(1, 999),
).map(lambda counts: {"instructions": 1, **counts})
CONTRACTS = st.builds(
    Contract,
    st.fixed_dictionaries(
        {
            "registers": st.integers(1, 255),
            "advisories": st.lists(st.sampled_from(["C7510 a, b", "C7519 c: d"]), max_size=2),
        }
    ),
    st.dictionaries(st.sampled_from(["outside loops", "loads > loop 2", "full tiles"]), COUNTS),
)


@given(CONTRACTS, CONTRACTS)
def test_contracts_differ_exactly_where_a_difference_is_said(one, other):
    assert differences(one, one) == []
    assert (differences(one, other) == []) == (one == other)


@given(st.dictionaries(st.sampled_from(["forward a", "gemm b"]), CONTRACTS))
def test_contracts_are_read_as_they_were_written(tmp_path_factory, kernels):
    stored = Contracts("compiler 1", kernels)
    path = stored.write(tmp_path_factory.mktemp("contracts") / "sass.json")
    assert Contracts.read(path) == stored


def test_a_file_that_is_not_there_holds_contracts_of_no_compiler(tmp_path):
    assert Contracts.read(tmp_path / "none.json") == Contracts("", {})


@pytest.fixture(scope="module")
def gemm() -> Compiled:
    return compile_kernel(TileGemm())


@pytest.mark.compile
def test_the_contract_of_a_small_kernel_counts_its_two_copies_and_four_products(gemm):
    parts = contract_of(gemm).parts
    assert parts["outside loops"]["UTMALDG.2D"] == 2
    assert parts["outside loops"]["HGMMA.64x64x16.F32.BF16"] == 4
    assert parts["outside loops"]["waits"] == 1


@pytest.mark.compile
def test_a_kernel_that_begins_to_spill_says_so(gemm):
    here = contract.tools()
    before = contract_of(compile_kernel(Scale(2.0)))
    said = broken("scale", compile_kernel(Scale(2.0, live=63)), Contracts(here, {"scale": before}))
    assert said.startswith("scale (to keep it so: python -m cutedsl_fa3 contract --accept)\n")
    assert "spill_stores 0 -> " in said and "STL 0 -> " in said


@pytest.mark.compile
def test_an_injected_wait_breaks_a_contract_though_the_code_is_the_same(gemm):
    stored = Contracts(contract.tools(), {"gemm": contract_of(gemm)})
    assert broken("gemm", gemm, stored) == ""
    said = broken("gemm", compile_kernel(TileGemm(wait=False)), stored)
    assert "advisories none -> C7517" in said


@pytest.mark.compile
def test_a_score_changes_the_loops_over_tiles_and_says_by_what():
    problem = Problem("bf16", 64, 64)
    plain = Plan.default(Variant(mask=masks.causal), problem)
    capped = Plan(Variant(scores.softcap(20.0), masks.causal), problem, plain.schedule)
    made = [contract_of(compile_kernel(plan.kernel)) for plan in (plain, capped)]
    lines = {line.partition(":")[0]: line for line in differences(*made)}
    for loop in ("masked tiles", "full tiles"):
        line = lines[contract.part_named(lines, loop)]
        assert "MUFU.EX2" in line or "MUFU.TANH" in line or "MUFU.RCP" in line
    assert "HGMMA" not in "".join(lines.values()), "the products are the same"
    assert "loads" not in lines


def test_contracts_of_another_compiler_are_not_compared_and_that_is_said(gemm):
    stored = Contracts("cutlass 1.0 cu11 ptxas 11.0", {"gemm": Contract(RESOURCES, LOOPS)})
    with pytest.warns(contract.OtherCompiler, match=r"of cutlass 1\.0 cu11 .* not compared"):
        assert broken("gemm", gemm, stored) == ""


def test_a_kernel_without_a_contract_is_named_with_the_nearest_that_has_one(gemm):
    stored = Contracts(contract.tools(), {"forward d64-bf16-light": Contract({}, {})})
    said = broken("forward d64-bf16-lihgt", gemm, stored)
    assert "no contract is stored, the nearest name is forward d64-bf16-light" in said


def test_every_shipped_kernel_has_a_contract_and_nothing_else_has():
    assert set(Contracts.read().kernels) == set(contract.shipped())


def test_contracts_are_small_and_hold_no_spill_no_local_memory_and_no_advisory():
    assert contract.STORED.stat().st_size < 3000 * len(Contracts.read().kernels)
    for name, kept in Contracts.read().kernels.items():
        resources = Resources(**{**kept.resources, "advisories": ()})
        assert (resources.spills, resources.stack, kept.resources["advisories"]) == (0, 0, []), name
        opcodes = {opcode.partition(".")[0] for part in kept.parts.values() for opcode in part}
        assert not opcodes & {"LDL", "STL"}, name


def test_every_forward_multiplies_in_loops_over_tiles_and_loads_in_one():
    for name, kept in Contracts.read().kernels.items():
        if name.startswith("forward"):
            loops = {part for part in kept.parts if part.endswith("tiles")}
            products = {"tiles > masked tiles", "tiles > full tiles"}
            assert loops == {"tiles", *products}, name  # that over work tiles around them
            assert any(part.startswith("loads") for part in kept.parts), name
            for loop in products:
                assert any(opcode.startswith("HGMMA.64x") for opcode in kept.parts[loop]), name


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command on two kernels whose code is made up; returns its result and output."""
    here, path = contract.tools(), tmp_path / "sass.json"
    now = {"a": Contract(RESOURCES, LOOPS), "b": Contract(RESOURCES, LOOPS)}
    monkeypatch.setattr(contract, "shipped", lambda: dict.fromkeys(now))
    monkeypatch.setattr(contract, "STORED", path)
    monkeypatch.setattr(cli_contract, "_compiled", lambda names, jobs: ((n, now[n]) for n in names))

    def run(*options, compiler=here, **stored):
        if stored:
            Contracts(compiler, stored).write(path)
        result = CliRunner().invoke(app, ["contract", *options])
        return result.exit_code, result.output, Contracts.read()

    return run


def test_the_command_says_what_differs_and_exits_with_1_until_it_is_accepted(command):
    old = Contract({**RESOURCES, "registers": 128}, LOOPS)
    kept = Contract(RESOURCES, LOOPS)
    code, output, _ = command(a=old, b=kept, gone=kept)
    assert code == 1
    assert "gone: not shipped any more" in output and "a\n  registers 128 -> 168\n" in output
    assert "2 of 2 kernels differ" in output
    code, _, stored = command("--accept")
    assert code == 0 and stored.kernels == {"a": kept, "b": kept}
    assert command()[0] == 0


def test_the_command_accepts_a_part_of_the_kernels_and_leaves_the_others(command):
    old = Contract({**RESOURCES, "registers": 128}, LOOPS)
    code, output, stored = command("--accept", "--only", "a", a=old, b=old)
    assert code == 0 and "1 of 1 kernels" in output
    assert stored.kernels["a"].resources["registers"] == 168 and stored.kernels["b"] == old


def test_the_command_takes_over_another_compiler_only_for_all_kernels(command):
    old, other = Contract(RESOURCES, LOOPS), "cutlass 1.0"
    for options in ((), ("--accept", "--only", "a")):
        code, output, stored = command(*options, compiler=other, a=old, b=old)
        assert code == 2 and "contracts are of cutlass 1.0" in output
        assert stored.compiler == other
    code, _, stored = command("--accept", compiler=other, a=old, b=old)
    assert code == 0 and stored.compiler == contract.tools()


def test_the_command_refuses_a_name_that_no_kernel_holds(command):
    code, output, _ = command("--only", "nothing of the kind")
    assert code == 2 and "no kernel's name holds 'nothing of the kind'" in output
