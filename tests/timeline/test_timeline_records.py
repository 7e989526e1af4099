"""Predicted timelines beside recorded times: one clock makes one of the other, nearly."""

from __future__ import annotations

import math
from functools import cache
from statistics import fmean, pstdev

import pytest
import torch

from cutedsl_fa3 import Schedule, record
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.ledger.rates import SMS
from cutedsl_fa3.record import ScheduleRow
from cutedsl_fa3.timeline import predict, predict_gemm
from cutedsl_fa3.timeline.latencies import GHZ

FAR, APART = 0.15, 0.10  # of a row from GHZ, and between all rows
# Plain attention with tiles of their usual sizes: stages and overlaps of a head size.
SCHEDULES = {
    64: [
        (192, 128, 3, stages, overlap)
        for stages, overlap in ((1, "both"), (2, "both"), (2, "none"))
    ],
    128: [(128, 128, 2, stages, overlap) for stages, overlap in ((1, "intra"), (2, "intra"))],
}


@cache
def predicted(head_dim: int, m: int, n: int, consumers: int, stages: int, overlap: str) -> float:
    """Clocks a key tile of one CTA that has no other work tile."""
    q, k = (
        torch.empty(1, rows, 1, head_dim, dtype=torch.bfloat16, device="meta")
        for rows in (m, 8 * n)
    )
    schedule = Schedule(m, n, stages=stages, consumers=consumers, overlap=overlap)
    return predict(q, k, k, schedule=schedule).clocks_a_tile()


def recorded(head_dim: int, m: int, n: int, stages: int, overlap: str) -> float | None:
    """TFLOP/s of persistent CTAs with these tiles on full attention."""
    for row in record.newest(kind="ladder").rows:
        same = (row.variant, row.head_dim, row.number) == ("full", head_dim, 10)
        if same and overlap != "none" and row.stages == stages:
            return row.tflops
    for row in record.newest(kind="leads").rows:
        assert isinstance(row, ScheduleRow)
        s = row.schedule
        same = (row.variant, row.head_dim, s["tile_m"], s["tile_n"]) == ("full", head_dim, m, n)
        if same and (s["stages"], s["overlap"], s["early"]) == (stages, overlap, 0):
            return row.tflops
    return None


@pytest.mark.slow
def test_a_predicted_tile_is_a_recorded_one_at_one_clock():
    found = {}
    for head_dim, kinds in SCHEDULES.items():
        for m, n, consumers, stages, overlap in kinds:
            speed = recorded(head_dim, m, n, stages, overlap)
            assert speed is not None, (head_dim, stages, overlap)
            seconds = 4 * m * n * head_dim * SMS / speed * 1e-12
            clocks = predicted(head_dim, m, n, consumers, stages, overlap)
            found[head_dim, stages, overlap] = clocks / seconds * 1e-9
    for row in record.newest(kind="gemm").rows:
        if row.cluster == (1, 1) and row.stages in (1, 2, 3):
            schedule = Schedule(128, 256, stages=row.stages, consumers=2, overlap="none")
            seconds = 2 * 128 * 256 * 64 * SMS / row.tflops * 1e-12
            clocks = predict_gemm(GemmSm90(schedule), 24).clocks_a_tile()
            found["gemm", row.stages] = clocks / seconds * 1e-9
    logs = [math.log(each / GHZ) for each in found.values()]
    assert max(map(abs, logs)) < FAR, found
    assert pstdev(logs) < APART and abs(fmean(logs)) < APART, found
