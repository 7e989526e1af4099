"""Loops are found from the branches of the code, wherever ptxas has put it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutedsl_fa3.sass import Function, Loop, SassError, components, functions

HEAD = '\t.section\t.text.kernel,"ax",@progbits\n.text.kernel:\n'


def parsed(*lines: str) -> Function:
    """One kernel of these lines: labels end in a colon, the rest are instructions."""
    text, address = [HEAD], 0
    for line in lines:
        if line.endswith(":"):
            text.append(f"{line}\n")
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;\n")
            address += 16
    (function,) = functions("".join(text))
    return function


def nested(function: Function, loops: tuple[Loop, ...] | None = None) -> list:
    """The opcodes that each loop has of its own, and those of the loops within."""
    loops = function.loops if loops is None else loops
    return [
        ([i.opcode for i in function.instructions(l.own)], nested(function, l.inner)) for l in loops
    ]


def test_an_instruction_is_read_with_its_guard_modifiers_operands_and_target():
    function = parsed("@!UP0 SYNCS.EXCH.64 URZ, [UR8+0x4000], UR4", ".L_x_0:", "BRA `(.L_x_0)")
    first, second = function.code
    assert (first.guard, first.opcode, first.family) == ("@!UP0", "SYNCS.EXCH.64", "SYNCS")
    assert first.operands == "URZ, [UR8+0x4000], UR4" and first.target is None
    assert (second.address, second.target, second.conditional) == (16, ".L_x_0", False)


@pytest.mark.parametrize(
    ("branch", "conditional"),
    [
        ("BRA `(.L_x_0)", False),
        ("@P0 BRA `(.L_x_0)", True),
        ("BRA P1, `(.L_x_0)", True),
        ("BRA.U UP0, `(.L_x_0)", True),
        ("@!P3 BRA P0, `(.L_x_0)", True),
    ],
)
def test_a_branch_is_conditional_by_its_guard_or_by_a_predicate_among_its_operands(
    branch, conditional
):
    function = parsed(branch, "FADD R0, R1, R2", ".L_x_0:", "EXIT")
    assert function.code[0].conditional == conditional
    assert len(function.following[0]) == 1 + conditional


def test_a_wait_that_lies_behind_the_end_belongs_to_the_loop_that_waits():
    function = parsed(
        "S2R R0, SR_TID.X",
        ".L_top:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2",
        "@!P0 BRA `(.L_slow)",
        ".L_back:",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24",
        "@P1 BRA `(.L_top)",
        "EXIT",
        ".L_slow:",
        "SYNCS.PHASECHK.TRANS64 P0, [UR4], R2",
        "@!P0 BRA `(.L_slow)",
        "BRA `(.L_back)",
    )
    ((own, [(inner, [])]),) = nested(function)
    assert "HGMMA.64x128x16.F32.BF16" in own and inner == ["SYNCS.PHASECHK.TRANS64", "BRA"]
    assert own[-1] == "BRA", "the way back from the wait"
    assert function.blocks[function.loops[0].header][0].address == 16


def test_a_loop_with_two_entrances_is_one_loop():
    function = parsed(
        "@P0 BRA `(.L_b)", ".L_a:", "FADD R0, R0, R1", ".L_b:", "FMUL R0, R0, R1",
        "@P1 BRA `(.L_a)", "EXIT",
    )  # fmt: skip
    assert nested(function) == [(["FADD", "FMUL", "BRA"], [])]


def test_two_ways_back_to_one_header_are_one_loop():
    function = parsed(
        ".L_a:", "FADD R0, R0, R1", "@P0 BRA `(.L_a)", "FMUL R0, R0, R1", "@P1 BRA `(.L_a)", "EXIT",
    )  # fmt: skip
    assert nested(function) == [(["FADD", "BRA", "FMUL", "BRA"], [])]


def test_a_call_goes_on_behind_itself_and_a_guarded_exit_too():
    function = parsed(
        ".L_a:", "CALL.REL.NOINC `($sub)", "@P1 EXIT", "@P0 BRA `(.L_a)", "EXIT",
        "$sub:", "MUFU.RCP R0, R0", "RET.REL.NODEC R2 `(kernel)",
    )  # fmt: skip
    assert nested(function) == [(["CALL.REL.NOINC", "EXIT", "BRA"], [])]
    assert function.following[-1] == ()


def test_a_branch_that_can_go_anywhere_or_nowhere_is_an_error():
    with pytest.raises(SassError, match=r"BRX R2 -0x10 branches anywhere"):
        _ = parsed("BRX R2 -0x10", "EXIT").loops
    with pytest.raises(SassError, match="has no target"):
        _ = parsed("BRA `(.L_gone)").loops


def test_text_without_instructions_is_an_error_and_not_a_kernel_without_loops():
    with pytest.raises(SassError, match="no instruction"):
        functions("\t.target\tsm_90a\n")


def test_kernels_of_one_cubin_are_told_apart():
    text = "".join(
        f'\t.section\t.text.{name},"ax",@progbits\n        /*0000*/  EXIT ;\n' for name in "ab"
    )
    assert [f.name for f in functions(text)] == ["a", "b"]


# A program is a list of parts: a number (so many plain instructions), or a part with parts within.
@dataclass
class Written:
    """Lines written so far; what is moved behind the end comes last."""

    lines: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    labels: int = 0
    plain: int = 0

    def label(self) -> str:
        self.labels += 1
        return f".L_{self.labels}"

    def write(self, parts: list) -> tuple[list[str], list]:
        """What these parts have of their own, and the loops among them, as `nested` says it."""
        own, loops = [], []
        for kind, body in parts:
            if kind == "plain":
                self.plain += 1
                self.lines.append(f"OP{self.plain} R0, R1")
                own.append(f"OP{self.plain}")
                continue
            start, end = self.label(), self.label()
            if kind == "loop":
                self.lines.append(f"{start}:")
                loops.append(self.write(body))
                self.lines.append(f"@P0 BRA `({start})")
                loops[-1][0].append("BRA")
            elif kind == "if":
                self.lines.append(f"@P0 BRA `({end})")
                inside, inner = self.write(body)
                self.lines.append(f"{end}:")
                own += ["BRA", *inside]
                loops += inner
            else:  # the body is moved behind the end and comes back
                self.lines += [f"@P0 BRA `({start})", f"{end}:"]
                moved = Written([], self.behind, self.labels, self.plain)
                inside, inner = moved.write(body)
                self.labels, self.plain = moved.labels, moved.plain
                self.behind += [f"{start}:", *moved.lines, f"BRA `({end})"]
                own += ["BRA", *inside, "BRA"]
                loops += inner
        return own, loops


def start_plain(body: list) -> list:
    """A loop whose body begins with a loop has its header, and is one loop with it."""
    return [("plain", None), *body, ("plain", None)]


PROGRAMS = st.recursive(
    st.lists(st.just(("plain", None)), min_size=1, max_size=3),
    lambda body: st.lists(
        st.one_of(
            st.just(("plain", None)),
            st.tuples(st.sampled_from(["loop", "if", "moved"]), body.map(start_plain)),
        ),
        min_size=1,
        max_size=4,
    ),
    max_leaves=20,
)


def sorted_loops(loops: list) -> list:
    return sorted((sorted(own), sorted_loops(inner)) for own, inner in loops)


@given(PROGRAMS)
def test_the_loops_of_any_structured_program_are_found_with_what_is_theirs(program):
    written = Written()
    _, loops = written.write(start_plain(program))
    function = parsed(*written.lines, "EXIT", *written.behind)
    assert sorted_loops(nested(function)) == sorted_loops(loops)
    inside = [block for loop in function.loops for each in loop.walk() for block in each.own]
    assert len(inside) == len(set(inside)), "a block is some loop's own once"


GRAPHS = st.integers(1, 8).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n).map(
        lambda edges: dict(enumerate(edges))
    )
)


def reached(graph: dict[int, list[int]], start: int) -> Iterator[int]:
    seen, todo = set(), [start]
    while todo:
        for b in graph[todo.pop()]:
            if b not in seen:
                seen.add(b)
                todo.append(b)
                yield b


@given(GRAPHS)
def test_components_are_the_nodes_that_reach_each_other(graph):
    reach = {a: {a, *reached(graph, a)} for a in graph}
    wanted = {frozenset(b for b in graph if b in reach[a] and a in reach[b]) for a in graph}
    assert sorted(map(sorted, components(graph))) == sorted(map(sorted, wanted))
