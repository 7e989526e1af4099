"""Which tiles of queries see a tile of keys, in which order, and whose dQ comes first.

A warp decides 32 tiles of queries at a time, one a lane, by the same evaluation of the mask that
gives a tile of queries its tiles of keys in the forward; so both directions agree.

    order           tiles of queries                       dQ of a tile of queries is added
    else            masked ones first, from first to last  as it comes
    deterministic   from last to first                     by one tile of keys after the other

From last to first, because under causality the last tiles are seen by all tiles of keys: these
start together and follow each other at the distance of one addition, while in the other order a
tile of keys would wait until the first of them comes to its own diagonal. CTAs start in the order
of their keys, so whoever is waited for is already running.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from cutedsl_fa3.pipelines.roles import WARP

from .weights import changes_products


class Seen(NamedTuple):
    """32 tiles of queries as bits: visited now, and in need of the element mask."""

    visited: Int32
    masked: Int32


class Visiting:
    """Mixed into a kernel that has `schedule`, `plan` and `elements`."""

    @property
    def phases(self) -> int:
        """How often the tiles of queries are gone through."""
        return 1 if self.plan.deterministic else 2

    def m_blocks(self, io: Any) -> Int32:
        """Tiles of queries."""
        return cute.ceil_div(io.q[1].shape[0], self.schedule.tile_m)

    def m_block(self, io: Any, place: Int32) -> Int32:
        """The tile of queries at a place in the order."""
        return self.m_blocks(io) - 1 - place if self.plan.deterministic else place

    def scan(self, io: Any, w: Any, head: Int32, m_block: Int32) -> Any:
        """The key tiles of one tile of queries."""
        s = self.schedule
        elements = self.elements(io, head, w.batch)
        return elements.scan(m_block, s.tile_m, s.tile_n, io.table)

    def decide(self, scan: Any, n_block: Int32) -> tuple[Any, Any]:
        """(visited, masked), as the forward decides."""
        if self.plan.by_tile:
            return scan.decide(n_block)
        masked = scan.within(n_block, scan.runs.partial)
        return scan.ints.or_(masked, scan.within(n_block, scan.runs.full)), masked

    @cute.jit
    def walk(self, io, w, ends, visit: cutlass.Constexpr, in_turn: cutlass.Constexpr):
        """Call `visit` for each tile of queries that sees these keys, of head after head.

        `ends` is what it changes: visit(ends, m_block, head, masked, turn) -> ends, where masked is
        1 or 0 and turn, None unless `in_turn`, how many tiles of keys add to dQ before this one.
        """
        for phase in cutlass.range(self.phases, unroll=1):
            for member in cutlass.range(self.group(io), unroll=1):
                head = w.kv_head * self.group(io) + member
                for base in cutlass.range(0, self.m_blocks(io), WARP, unroll=1):
                    found, masked = self.seen(io, w, head, base, phase)
                    before = self.turns(io, w, head, base) if cutlass.const_expr(in_turn) else None
                    while found != 0:
                        bit = first_of(found)
                        found = found & (found - 1)
                        turn = cute.arch.shuffle_sync(before, bit) if in_turn else None
                        m_block = self.m_block(io, base + bit)
                        ends = visit(ends, m_block, head, masked >> bit & 1, turn)
        return ends

    def seen(self, io: Any, w: Any, head: Int32, base: Int32, phase: Int32) -> Seen:
        """The 32 places from `base` on.

        Phase 0 of two: those that need the element mask; phase 1: the others.
        """
        place = base + cute.arch.lane_idx()
        m_block = self.m_block(io, place)
        visit, masked = self.decide(self.scan(io, w, head, m_block), w.n_block)
        masked = Boolean(masked)
        if changes_products(self.plan.variant):  # rows past the sequence could be NaN
            masked = masked | ((m_block + 1) * self.schedule.tile_m > io.q[1].shape[0])
        mine = (place < self.m_blocks(io)) & Boolean(visit)
        if self.phases == 2:
            mine = mine & (masked ^ (phase == 1))
            return Seen(cute.arch.vote_ballot_sync(mine), phase - 1)
        return Seen(cute.arch.vote_ballot_sync(mine), cute.arch.vote_ballot_sync(masked))

    @cute.jit
    def turns(self, io, w, head, base):
        """How many tiles of keys add to dQ before this one, for the place of each lane."""
        place = base + cute.arch.lane_idx()
        scan = self.scan(io, w, head, self.m_block(io, place))
        before = Int32(0)
        if cutlass.const_expr(self.plan.by_tile):
            for n_block in cutlass.range(w.n_block, unroll=1):
                visit, _ = self.decide(scan, n_block)
                before += Int32(Boolean(visit))
        else:
            before = before_in_runs(scan, w.n_block)
        return before


def before_in_runs(scan: Any, n_block: Int32) -> Int32:
    """How many tiles of a scan's runs lie before one."""
    found = Int32(0)
    for start, count in (*scan.runs.partial, *scan.runs.full):
        found = found + cutlass.max(cutlass.min(n_block - start, Int32(count)), 0)
    return found


def first_of(bits: Int32) -> Int32:
    """The number of the lowest bit that is set."""
    return cute.arch.popc((bits & -bits) - 1)


@cute.jit
def wait_for_turn(turn: cute.Tensor, mine: Int32):
    """Wait until a counter in global memory says `mine`; all lanes of a warp."""
    now = Int32(-1)
    while now != mine:
        now = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[turn.iterator.toint()],
        )


@cute.jit
def end_turn(turn: cute.Tensor):
    """Let the next one in, once this warp's additions can be seen."""
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.inline_ptx(
            "fence.acq_rel.gpu; red.release.gpu.global.add.s32 [{$r0}], 1;",
            read_only_args=[turn.iterator.toint()],
        )
