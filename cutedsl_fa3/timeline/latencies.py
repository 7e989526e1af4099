"""What a predicted timeline takes for granted, in clocks of an SM; rates are the ledger's.

Rates (tensor cores, special functions, ...) are those of ledger/rates.py. What is no rate stands
here, each number with its origin. Two are fitted, on thirteen schedules of attention and three
depths of the GEMM: with the defaults their clocks a tile are what the records say in time, at one
clock of 1.70 GHz, within 7% and 4% rms (tests/timeline/test_timeline_records.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cutedsl_fa3.arguments import is_number
from cutedsl_fa3.errors import Unsupported

GHZ = 1.70  # at which predicted clocks are the recorded times, all in all


@dataclass(frozen=True)
class Latencies:
    """Clocks that pass besides those of the ledger's rates.

    `tma_load`: from a TMA load's issue until its first bytes are written. `l2_bytes`: bytes that an
    SM receives a clock, beside loads of all others. `tma_issue`: of the thread that issues a load.
    `product`: of a group of WGMMAs besides its rate: issue, fence, drain. `mbarrier`: a wait that
    finds its phase complete, and a completion until the wait sees it. `barrier`: the same of a
    named barrier. `store`: from a TMA store's issue until its shared memory is read. `alone`: how
    many times longer than by its pipe's rate a warp takes for its part of a step; the pipe is free
    for others meanwhile.

    | field | default | origin |
    |---|---|---|
    | tma_load | 700 | fitted on records of ladder, leads and gemm of an H200 |
    | l2_bytes | 38.8 | documented: 5,120 B a clock of L2 (A100 whitepaper), by 132 SMs |
    | tma_issue | 30 | assumed: as an access of shared memory |
    | product | 60 | assumed: two accesses of shared memory |
    | mbarrier | 30 | documented: latency of shared memory, Luo et al. 2024, arXiv:2402.13499 |
    | barrier | 30 | assumed: as `mbarrier` |
    | store | 500 | assumed |
    | alone | 2.0 | fitted on the same records |

    Raises: Unsupported for what is no number from 0; `l2_bytes` must be more, `alone` 1 or more.
    """

    tma_load: float = 700.0
    l2_bytes: float = 38.8
    tma_issue: float = 30.0
    product: float = 60.0
    mbarrier: float = 30.0
    barrier: float = 30.0
    store: float = 500.0
    alone: float = 2.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = {"l2_bytes": math.ulp(0.0), "alone": 1.0}.get(each.name, 0.0)
            if not is_number(value) or not least <= value < math.inf:
                told = {"l2_bytes": "more than 0", "alone": "1 or more"}
                needed = told.get(each.name, "0 or more")
                raise Unsupported(
                    f"Latencies.{each.name} = {value!r}: a number, {needed}, is needed"
                )
