"""What a predicted timeline takes for granted, in clocks of an SM; rates are the ledger's.

Rates (tensor cores, special functions, ...) are those of ledger/rates.py. What is no rate stands
here, each number with its origin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cutedsl_fa3.arguments import is_number
from cutedsl_fa3.errors import Unsupported


@dataclass(frozen=True)
class Latencies:
    """Clocks that pass besides those of the ledger's rates.

    `tma_load`: from a TMA load's issue until its first bytes are written, beside loads of all other
    SMs. `l2_bytes`: bytes that an SM receives a clock meanwhile. `tma_issue`: of the thread that
    issues a load. `product`: of a group of WGMMAs besides its rate: issue, fence, drain. `mbarrier`:
    a wait that finds its phase complete, and a completion until the wait sees it. `barrier`: the
    same of a named barrier. `store`: from a TMA store's issue until its shared memory is read.

    | field | default | origin |
    |---|---|---|
    | tma_load | 1130 | derived: in the record gemm-h200-20261129-195241 a ring of two slots of 48 KiB is filled anew every 2,393 clocks of 1.98 GHz, less 48 KiB at `l2_bytes` |
    | l2_bytes | 38.8 | documented: 5,120 B a clock of L2 (A100 whitepaper; not restated for H100), by 132 SMs; three slots of that record need as much |
    | tma_issue | 30 | assumed: as an access of shared memory |
    | product | 60 | assumed: two accesses of shared memory |
    | mbarrier | 30 | documented: latency of shared memory, Luo et al. 2024, arXiv:2402.13499 |
    | barrier | 30 | assumed: as `mbarrier` |
    | store | 500 | assumed: half of a load |

    Raises: Unsupported for what is no number from 0; `l2_bytes` must be more.
    """  # noqa: E501

    tma_load: float = 1130.0
    l2_bytes: float = 38.8
    tma_issue: float = 30.0
    product: float = 60.0
    mbarrier: float = 30.0
    barrier: float = 30.0
    store: float = 500.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, rate = getattr(self, each.name), each.name == "l2_bytes"
            if not is_number(value) or not 0 <= value < math.inf or (rate and value == 0):
                least = "more than 0" if rate else "0 or more"
                raise Unsupported(f"Latencies.{each.name} = {value!r}: a number, {least}, is needed")
