"""The GEMM benchmark's check, rows and table; clocks and kernels are replaced, no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cutedsl_fa3.bench import Timing
from cutedsl_fa3.bench_gemm import CUBLAS, Matrices, Size, measure, require_fit, schedules
from cutedsl_fa3.checks import WrongResult
from cutedsl_fa3.errors import LayoutError
from cutedsl_fa3.peers import OURS
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.record import META, Record, newest, place
from cutedsl_fa3.tables import gemm_table

SMALL = Size(48, 40, 64)
ONE_MS = Timing("test", 0, 8, 7, lambda call, repeats: 1.0)


def torch_call(schedule: Schedule, matrices: Matrices):
    return lambda: torch.mm(matrices.a, matrices.b.T, out=matrices.c)


def rows_of(prepare=torch_call, chosen=None, report=lambda line: None):
    return measure(SMALL, chosen or schedules(), ONE_MS, report, device="cpu", prepare=prepare)


def test_the_sweep_is_every_depth_in_every_cluster_and_fits() -> None:
    chosen = schedules()
    assert len(set(chosen)) == len(chosen) == 12
    assert {s.stages for s in chosen} == {1, 2, 3, 4}
    assert {s.cluster for s in chosen} == {(1, 1), (2, 1), (1, 2)}
    require_fit(chosen, "bf16")


def test_a_depth_that_does_not_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(LayoutError, match="bytes are needed"):
        require_fit(schedules(stages=(5,)), "bf16")


def test_every_schedule_and_cublas_give_a_row_with_their_samples() -> None:
    said: list[str] = []
    rows = rows_of(report=said.append)
    assert [row.provider for row in rows] == [CUBLAS, *[OURS] * 12]
    assert len(said) == len(rows)
    assert rows[0].stages is rows[0].cluster is None
    assert (rows[4].stages, rows[5].stages, rows[5].cluster) == (4, 1, (2, 1))
    for row in rows:
        assert len(row.samples) == 7
        assert row.tflops == pytest.approx(SMALL.flops / 1e9, abs=0.01)
        assert 0 < row.max_error < 0.2


def test_each_round_times_cublas_and_every_schedule_once() -> None:
    order: list[object] = []

    def clock(call, repeats: int) -> float:
        order.append(call)
        return 1.0

    chosen = schedules(clusters=((1, 1),))
    timing = Timing("test", 0, 8, 7, clock)
    measure(SMALL, chosen, timing, print, device="cpu", prepare=torch_call)
    rounds = [order[first : first + 5] for first in range(10, len(order), 5)]
    assert len(rounds) == 7 and all(len(set(each)) == 5 for each in rounds)
    assert len({tuple(map(id, each)) for each in rounds}) > 1


@pytest.mark.parametrize("spoil", ["unwritten row", "scale", "transposed"])
def test_a_wrong_product_is_an_error_that_names_its_schedule(spoil: str) -> None:
    def prepare(schedule: Schedule, matrices: Matrices):
        def call() -> torch.Tensor:
            exact = matrices.a @ matrices.b.T
            if spoil == "unwritten row":
                matrices.c[:-1] = exact[:-1]
            elif spoil == "scale":
                matrices.c.copy_(1.02 * exact)
            else:
                matrices.c.copy_(exact.flip(1))
            return matrices.c

        return call

    with pytest.raises(WrongResult, match="128 x 256, 1 stages, cluster 1 x 1"):
        rows_of(prepare)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="fp8"):
        Size(8, 8, 8, "fp8")


@pytest.fixture
def record() -> Record:
    meta = {name: name.upper() for name in META} | {"date": "2026-11-29T12:00:00+00:00"}
    rows = rows_of()
    speeds = [700.0, *map(float, range(500, 620, 10))]
    changed = [
        type(row)(**{**row.__dict__, "tflops": speed})
        for row, speed in zip(rows, speeds, strict=True)
    ]
    return Record(meta, tuple(changed))


def test_a_record_survives_writing_and_reading(record: Record, tmp_path: Path) -> None:
    path = record.write(place(record.meta, tmp_path, "gemm"))
    assert path.name == "gemm-device-20261129-120000.json"
    assert Record.read(path) == record
    assert newest(tmp_path, "gemm") == record and newest(tmp_path) is None


def test_the_table_shows_the_best_depth_as_a_share_of_cublas(record: Record) -> None:
    text = gemm_table(record)
    assert "reaches 700. The best, 4 stages in clusters of 1 x 2, is 0.87 of it." in text
    assert "| cluster | 1 stage | 2 stages | 3 stages | 4 stages | best / cuBLAS |" in text
    assert "| 2 x 1 | 540 | 550 | 560 | 570 | 0.81 |" in text
