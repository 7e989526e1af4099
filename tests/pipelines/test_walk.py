"""A walk through a kernel: it goes on as mbarriers allow, and ends where the rings' counts say."""

from __future__ import annotations

import re

import pytest
import torch
from faults import FAULTS
from products import Products

from cutedsl_fa3.inline_ptx import InlinePtx
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.model import NotCovered, walk
from cutedsl_fa3.model.walk import Line
from cutedsl_fa3.model.works import of_gemm
from cutedsl_fa3.pipelines import Schedule


def phases(state: tuple[str, ...]) -> list[int]:
    return [int(text.partition(":")[0]) for text in state]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_each_slot_ends_as_many_phases_as_tiles_pass_it(stages: int, cluster: tuple) -> None:
    kernel = GemmSm90(Schedule(64, 64, stages, 1, "none", cluster=cluster))
    *_, longest = of_gemm(kernel)
    found = walk(kernel)
    tiles = stages + 2
    passed = [len(range(stage, tiles, stages)) for stage in range(stages)]
    ctas = cluster[0] * cluster[1]
    assert phases(found.lines[-1].mbarriers) == 2 * ctas * passed
    assert len(found.columns) == 2 * ctas * stages
    assert str(found) == str(walk(kernel, longest))


def test_nobody_passes_a_phase_that_has_not_ended() -> None:
    found = walk(GemmSm90(Schedule(128, 64, 2, 2, "none")))
    start = Line("", "", ("0: 0/1",) * len(found.columns))
    passed = 0
    for before, line in zip((start, *found.lines), found.lines, strict=False):
        if at := re.fullmatch(r"pass (.*), parity (\d)", line.does):
            phase = phases(before.mbarriers)[found.columns.index(at[1])]
            assert phase % 2 != int(at[2])
            passed += 1
    assert passed == 4 + 4 + 2  # slots that are filled, slots that are read, the producer's tail


def test_bytes_are_announced_counted_down_and_gone() -> None:
    found = walk(GemmSm90(Schedule(64, 128, 1, 1, "none")))
    full = [
        line.mbarriers[0] for line in found.lines if "'ab' full" in line.does or "copy" in line.does
    ]
    assert full[:3] == ["0: 1/1 24576 B", "0: 1/1 16384 B", "1: 0/1"]


def test_warps_that_do_the_same_share_a_line_and_what_is_unchanged_is_blank() -> None:
    text = str(walk(GemmSm90(Schedule(64, 64, 1, 1, "none")))).splitlines()
    assert text[0].split() == ["who", "does", "'ab'", "full", "0", "'ab'", "empty", "0"]
    (first, *_) = (line for line in text if "arrive at 'ab' empty" in line)
    assert first.startswith("consumer warps 0 to 3") and first.endswith("1: 0/4")
    assert "0/1" not in first


def test_a_walk_ends_where_nobody_can_go_on() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "no release")
    *_, longest = fault.works()
    stuck, sound = walk(fault.kernel(), longest), walk(Products(2), longest)
    assert len(stuck.lines) < len(sound.lines)
    assert any("store" in line.does for line in sound.lines)
    assert not any("store" in line.does for line in stuck.lines)


def test_a_kernel_without_barriers_has_no_walk() -> None:
    kernel, words = InlinePtx("mov.b64 {$w0}, {$r0};"), torch.zeros(64, dtype=torch.int64)
    with pytest.raises(NotCovered, match="InlinePtx launches nothing that has barriers"):
        walk(kernel, (words,))
