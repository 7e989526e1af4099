"""Measures a timeline and holds the debug build's result against the shipped kernel's, bit by bit.

Run by test_timeline_gpu.py, each case in a process of its own: a kernel that hangs or faults costs
its process the GPU. Prints the timeline as JSON.
"""

from __future__ import annotations

import sys

import torch

from cutedsl_fa3 import Schedule, Variant, attention_with_lse, masks
from cutedsl_fa3.timeline.measured import noted, slowdown

document = torch.arange(1500, device="cuda") // 200


def documents(b, h, q, k):
    return (document[q] == document[k]) & (k <= q)


# variant, heads, head_dim, schedule (None: the table's), CTA
CASES = {
    "both": (Variant(), 16, 64, Schedule(192, 128, stages=2, consumers=3, overlap="both"), 0),
    "none": (Variant(), 16, 64, Schedule(128, 128, stages=2, consumers=2, overlap="none"), 3),
    "pingpong": (Variant(), 8, 128, Schedule(128, 128, stages=1, overlap="pingpong"), 0),
    "early": (Variant(), 8, 128, Schedule(128, 128, overlap="intra", early=2), 1),
    "persistent": (Variant(mask=masks.causal), 16, 128, None, 5),
    "by tile": (Variant(mask=documents), 8, 64, None, 0),
}


def main(name: str) -> None:
    """One case."""
    torch.manual_seed(0)
    variant, heads, head_dim, schedule, cta = CASES[name]
    shape = (4, 1500, heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    (out, lse), timeline = noted(q, k, v, variant, schedule=schedule, cta=cta)
    expected, expected_lse = attention_with_lse(q, k, v, variant, schedule=schedule)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse), "results differ"
    print("SLOWER", slowdown(q, k, v, variant, schedule=schedule), file=sys.stderr)
    print(timeline, file=sys.stderr)
    print(timeline.to_json())


if __name__ == "__main__":
    main(sys.argv[1])
