"""A GEMM that hangs: its slots wait for one arrival more than it has consumer warps.

python forgetful.py      on an H100 or H200; the debug build says who waits for whom
"""

from __future__ import annotations

import torch

from cutedsl_fa3 import hang
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Ring, Schedule


class OneMore(Ring):
    """A ring whose slots count one arrival too many."""

    def arrivals(self, roles, cluster):
        return super().arrivals(roles, cluster) + 1


class Forgetful(GemmSm90):
    """The project's GEMM with that ring."""

    name = "forgetful_gemm"

    def __init__(self, stages: int = 2) -> None:
        super().__init__(Schedule(128, 128, stages, consumers=2, overlap="none"))
        self.rings = {"ab": OneMore(("a", "b"), stages)}


def main() -> None:
    """Run it, and say how it ends."""
    a, b = (torch.randn(256, 512, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)
    try:
        hang.watch(Forgetful(), a, b, c, seconds=0.5)
    except hang.Hang as error:
        print(f"Hang: {error}")


if __name__ == "__main__":
    main()
