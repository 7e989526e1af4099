"""What a warp does that another warp or the copy engine can notice, one record each."""

from __future__ import annotations

from typing import NamedTuple

# kind            at               count        value          region / regions
INIT = "init"  # mbarrier          arrivals
WAIT = "wait"  # mbarrier                       parity
ARRIVE = "arrive"  # mbarrier      arrivals
EXPECT = "expect"  # mbarrier      arrivals     bytes announced
COPY = "copy"  #                                bytes a CTA    targets: (mbarrier, region) a CTA
PRODUCT = "product"  # accumulator              A's registers  region that WGMMA reads
FENCE = "fence"  # wgmma.fence
COMMIT = "commit"  # wgmma.commit_group
RETIRE = "retire"  # wgmma.wait_group            groups left
TOUCH = "touch"  # registers                     1: written
READ = "read"  #                                               region, by threads
WRITE = "write"  #                                             region, by threads
STORE = "store"  #                                             region that a TMA store reads
STORE_COMMIT = "store commit"
STORE_WAIT = "store wait"  #                     groups left
PROXY = "proxy fence"
SYNC = "sync"  # named barrier     threads
SIGNAL = "signal"  # named barrier threads
CLUSTER_ARRIVE = "cluster arrive"
CLUSTER_WAIT = "cluster wait"
END = "end"

Interval = tuple[int, int]
Region = tuple[Interval, ...]  # bytes [from, to) of shared memory; CTA n's begins at (n + 1) of
CTA_BYTES = 1 << 20


class Event(NamedTuple):
    """One step of one warp.

    `exact`: the region is what is accessed, not a tensor in which it lies.
    """

    kind: str
    at: int = -1
    count: int = 0
    value: int = 0
    region: Region = ()
    targets: tuple[tuple[int, Region], ...] = ()
    exact: bool = True


class Warp(NamedTuple):
    """A warp of one CTA of the cluster, and what it does."""

    cta: int
    warp: int
    role: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        where = f"CTA {self.cta} " if self.cta else ""
        return f"{where}{self.role} warp {self.warp}"


def overlap(a: Region, b: Region) -> bool:
    """Whether two regions share a byte."""
    return any(lo < other_hi and other_lo < hi for lo, hi in a for other_lo, other_hi in b)


def merged(intervals: list[Interval]) -> Region:
    """The same bytes in as few intervals as they need."""
    made: list[Interval] = []
    for lo, hi in sorted(intervals):
        if made and lo <= made[-1][1]:
            made[-1] = (made[-1][0], max(hi, made[-1][1]))
        else:
            made.append((lo, hi))
    return tuple(made)


def without(a: Region, b: Region) -> Region:
    """The bytes of `a` that are not in `b`."""
    left = list(a)
    for lo, hi in b:
        cut = []
        for start, end in left:
            if end <= lo or hi <= start:
                cut.append((start, end))
                continue
            if start < lo:
                cut.append((start, lo))
            if hi < end:
                cut.append((hi, end))
        left = cut
    return merged(left)
