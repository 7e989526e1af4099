"""The consumers' loop over key tiles, for each overlap and both ways to learn the tiles.

One consumer's view of step j (MMAs are issued, then run while the warpgroup goes on):

    none      QK(j) | softmax(j) | PV(j)
    intra     QK(j+1), PV(j) running under softmax(j+1)
    pingpong  warpgroups take turns to issue, so that one multiplies while another exponentiates

Tiles that need the element mask come first, in a loop of their own, and with them all tiles of a
work tile for which a score function reads beside its tensors or leaves its units. Where the visible
tiles follow from a few integers every role computes them (`along_runs`), and a warpgroup passes
over the first ones as long as its own rows see none of their keys; with `narrow` it multiplies only
the first half of the first that it sees, and the second half of a later one that needs the mask,
where it sees nothing of the other. Where the producer decides tile by tile the consumers are told
(`along_words`), a word being 2 * n_block + masked, and END after the last.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import Turns, take
from cutedsl_fa3.variant.lower import select

from .operands import read_queries

END = -1


def pass_turn(turns: Turns) -> None:
    """Take a turn and issue nothing, so that all warpgroups take the same number."""
    turns.wait()
    turns.pass_on()


class MainLoop:
    """What `ForwardSm90.consumer` does between its first and its last key tile.

    Mixed into a WarpSpecialized kernel that has `schedule`, `plan`, `ever_full`, `narrow` and
    `second_halves`. `waits_early`, of a debug build: it waits for the overlapped P V where the
    compiler puts that wait without `early`, before the softmax.
    """

    waits_early = False

    @cute.jit
    def along_runs(self, io, w, f, softmax, turns, ports, group):
        """Attend to the tiles of `w.runs`, but for the last product with V if it overlaps.

        Returns the rings' ends, and whether there was any tile.
        """
        s = self.schedule
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        partial, total = w.runs.n_partial, w.runs.n_total
        n_block, first = cutlass.Int32(0), cutlass.Int32(0)
        narrow = cutlass.Boolean(False)
        if total > 0:
            read_queries(f, ring_q.wait_and_advance())
            ring_k, ring_v, first = self.unseen(io, w, turns, ring_k, ring_v, group)
            step = self.overlapped if s.intra else self.serial
            if cutlass.const_expr(s.intra):
                if first < total:
                    n_block = w.runs.n_block(first)
                    self.record(io, w, first, n_block, first < partial)
                    if cutlass.const_expr(turns is not None):
                        if first > 0:
                            pass_turn(turns)
                    if cutlass.const_expr(self.narrow):
                        if self.sees(w, group, n_block, 1):
                            ring_k = self.first_scores(
                                w, f, softmax, ring_k, n_block, first < partial
                            )
                        else:
                            narrow = cutlass.Boolean(True)
                            ring_k = self.first_scores(w, f, softmax, ring_k, n_block, True, half=0)
                    else:
                        ring_k = self.first_scores(w, f, softmax, ring_k, n_block, first < partial)
            start = first + 1 if s.intra else first
            careful = partial if w.inside is True else select(w.inside, partial, total)
            if cutlass.const_expr(self.narrow):
                if narrow & (start < total):
                    n_block = w.runs.n_block(start)
                    self.record(io, w, start, n_block, start < partial)
                    ring_k, ring_v = self.after_half(
                        w, f, softmax, turns, ring_k, ring_v, n_block, start < careful
                    )
                    start += 1
            for j in cutlass.range(start, careful, unroll=1):
                n_block = w.runs.n_block(j)
                self.record(io, w, j, n_block, j < partial)
                if cutlass.const_expr(self.second_halves):
                    ring_k, ring_v = self.seen_halves(
                        w, f, softmax, turns, ring_k, ring_v, n_block, group
                    )
                else:
                    ring_k, ring_v = step(w, f, softmax, turns, ring_k, ring_v, n_block, True)
            if cutlass.const_expr(self.ever_full):
                for j in cutlass.range(cutlass.max(careful, start), total, unroll=1):
                    n_block = w.runs.n_block(j)
                    self.record(io, w, j, n_block, False)
                    ring_k, ring_v = step(w, f, softmax, turns, ring_k, ring_v, n_block, False)
        return ring_q, ring_k, ring_v, first < total

    @cute.jit
    def unseen(self, io, w, turns, ring_k, ring_v, group):
        """Pass over the first tiles as long as this warpgroup's rows see none of their keys.

        Under causality that spares the upper rows of a work tile the keys of the lower ones, and
        rows past the sequence everything, but in clusters, where a CTA may have no other rows.
        Later tiles that only other rows see are computed.
        Returns the rings' ends and how many tiles these were.
        """
        s = self.schedule
        first_row = (w.m_block * s.consumers + group) * (wgmma.ROWS // s.pack)
        inside = first_row < w.elements.seqlen_q if self.beside == 1 else cutlass.Boolean(True)
        partial, total = w.runs.n_partial, w.runs.n_total
        j, n_block = cutlass.Int32(0), cutlass.Int32(w.runs.n_block(0))
        while (j < total) & ((inside & self.sees(w, group, n_block)) ^ True):
            self.record(io, w, j, n_block, j < partial)
            slot_k = ring_k.wait_and_advance()
            slot_k.release()
            if cutlass.const_expr(turns is not None):
                if j > 0 or not s.intra:
                    pass_turn(turns)
            slot_v = ring_v.wait_and_advance()
            slot_v.release()
            j += 1
            n_block = cutlass.Int32(w.runs.n_block(j))
        return ring_k, ring_v, j

    def sees(self, w, group, n_block, half=None):
        """Whether this warpgroup's rows may see a key of a tile, or of one half of it."""
        s = self.schedule
        keys = w.elements.keys(w.m_block * s.consumers + group, wgmma.ROWS // s.pack)
        first, count = n_block * s.tile_n, s.tile_n
        if half is not None:
            count = s.tile_n // 2
            first += half * count
        return w.elements.meets(keys, first, first + count)

    @cute.jit
    def after_half(self, w, f, softmax, turns, ring_k, ring_v, n_block, masked):
        """The step that multiplies the first half of V, the first tile's, while S is computed."""
        if cutlass.const_expr(not self.ever_full):
            ring_k, ring_v = self.overlapped(
                w, f, softmax, turns, ring_k, ring_v, n_block, True, before=0
            )
        else:
            if masked:
                ring_k, ring_v = self.overlapped(
                    w, f, softmax, turns, ring_k, ring_v, n_block, True, before=0
                )
            else:
                ring_k, ring_v = self.overlapped(
                    w, f, softmax, turns, ring_k, ring_v, n_block, False, before=0
                )
        return ring_k, ring_v

    @cute.jit
    def seen_halves(self, w, f, softmax, turns, ring_k, ring_v, n_block, group):
        """The step of a tile with a mask, or of its second half where no row sees the first."""
        if self.sees(w, group, n_block, 0):
            ring_k, ring_v = self.overlapped(w, f, softmax, turns, ring_k, ring_v, n_block, True)
        else:
            ring_k, ring_v = self.overlapped(
                w, f, softmax, turns, ring_k, ring_v, n_block, True, half=1
            )
        return ring_k, ring_v

    @cute.jit
    def along_words(self, io, w, f, softmax, turns, ports, words):
        """Attend to the tiles that the producer names; as `along_runs`.

        Returns the rings' ends, and whether there was any tile.
        """
        s = self.schedule
        ring_q, ring_k, ring_v, ring_visits = ports.q, ports.k, ports.v, ports.visits
        ring_visits, word = take(ring_visits, words)
        some = word != END
        if some:
            read_queries(f, ring_q.wait_and_advance())
            j = cutlass.Int32(0)
            step = self.overlapped if s.intra else self.serial
            if cutlass.const_expr(s.intra):
                self.record(io, w, j, word // 2, word % 2 == 1)
                ring_k = self.first_scores(w, f, softmax, ring_k, word // 2, word % 2 == 1)
                ring_visits, word = take(ring_visits, words)
                j += 1
            anywhere = False if w.inside is True else w.inside ^ True
            while word != END and (word % 2 == 1) | anywhere:
                self.record(io, w, j, word // 2, word % 2 == 1)
                ring_k, ring_v = step(w, f, softmax, turns, ring_k, ring_v, word // 2, True)
                ring_visits, word = take(ring_visits, words)
                j += 1
            while word != END:
                self.record(io, w, j, word // 2, False)
                ring_k, ring_v = step(w, f, softmax, turns, ring_k, ring_v, word // 2, False)
                ring_visits, word = take(ring_visits, words)
                j += 1
        return ring_q, ring_k, ring_v, ring_visits, some

    @cute.jit
    def first_scores(self, w, f, softmax, ring_k, n_block, masked, half: cutlass.Constexpr = None):
        """S and P of the first tile, which nothing overlaps; with `half` of that of its keys."""
        slot = ring_k.wait_and_advance()
        acc_s = f.multiply_qk(slot, half)
        memos = self.ahead(w, f, n_block, True, half)  # for both
        self.complete("QK")
        slot.release()
        if masked:
            self.modify(w, f, acc_s, n_block, True, memos, half)
        else:
            self.modify(w, f, acc_s, n_block, False, memos, half)
        softmax.step(wgmma.as_rows_cols(acc_s))
        f.round_p(acc_s, half)
        return ring_k

    @cute.jit
    def overlapped(
        self,
        w,
        f,
        softmax,
        turns,
        ring_k,
        ring_v,
        n_block,
        masked: cutlass.Constexpr,
        half: cutlass.Constexpr = None,
        before: cutlass.Constexpr = None,
    ):
        """S of a tile is computed while O += P V of the one before runs.

        With `half` of that of its keys, with `before` of that of the tile before.
        """
        slot_k = ring_k.wait_and_advance()
        if cutlass.const_expr(turns is not None):
            turns.wait()
        acc_s = f.multiply_qk(slot_k, half)
        slot_v = ring_v.wait_and_advance()
        f.multiply_pv(slot_v, before)
        if cutlass.const_expr(turns is not None):
            turns.pass_on()
        memos = self.ahead(w, f, n_block, masked, half)
        self.complete("QK", running=1)
        slot_k.release()
        first = self.waits_early and not self.schedule.early
        if cutlass.const_expr(first):
            self.complete("PV")
            slot_v.release()
        bases = self.score(w, f, acc_s, n_block, masked, memos, half)
        softmax.step(wgmma.as_rows_cols(acc_s), self.schedule.early, bases)
        if cutlass.const_expr(not first):
            self.complete("PV")
            slot_v.release()
        f.round_p(acc_s, half)
        softmax.rescale(f.output)
        return ring_k, ring_v

    @cute.jit
    def last_values(self, f, ring_v):
        """O += P V of the last tile."""
        slot = ring_v.wait_and_advance()
        f.multiply_pv(slot)
        self.complete("PV")
        slot.release()
        return ring_v

    @cute.jit
    def serial(self, w, f, softmax, turns, ring_k, ring_v, n_block, masked: cutlass.Constexpr):
        """S, softmax and O of a tile, one after the other."""
        slot_k = ring_k.wait_and_advance()
        if cutlass.const_expr(turns is not None):
            turns.wait()
        acc_s = f.multiply_qk(slot_k)
        if cutlass.const_expr(turns is not None):
            turns.pass_on()
        memos = self.ahead(w, f, n_block, masked)
        self.complete("QK")
        slot_k.release()
        bases = self.score(w, f, acc_s, n_block, masked, memos)
        softmax.step(wgmma.as_rows_cols(acc_s), 0, bases)
        f.round_p(acc_s)
        softmax.rescale(f.output)
        slot_v = ring_v.wait_and_advance()
        f.multiply_pv(slot_v)
        self.complete("PV")
        slot_v.release()
        return ring_k, ring_v

    def ahead(self, w, f, n_block, masked, half=None):
        """What the score function reads for one tile: it waits for memory while products run."""
        return w.elements.ahead(f.queries_of(half), self.corner(w, n_block), masked)

    def score(self, w, f, acc_s, n_block, masked, memos, half=None):
        """As `modify`, but that scores may lack a base of each row: these, None for none."""
        if not masked and w.elements.growth is not None:
            return w.elements.grown(wgmma.as_rows_cols(acc_s), f.queries, self.corner(w, n_block))
        self.modify(w, f, acc_s, n_block, masked, memos, half)
        return None

    def modify(self, w, f, acc_s, n_block, masked, memos, half=None):
        """Score and mask of one tile, or of half of its keys, in place."""
        corner, places = self.corner(w, n_block), f.queries_of(half)
        w.elements.apply(wgmma.as_rows_cols(acc_s), places, corner, masked, memos)

    def corner(self, w, n_block):
        """The first query and key of a tile."""
        return w.m_block * self.schedule.queries, n_block * self.schedule.tile_n

    @cute.jit
    def record(self, io, w, j, n_block, masked):
        """In a build that traces visits: note the j-th visited tile, by one thread of the CTA."""
        if cutlass.const_expr(self.plan.trace):
            thread, _, _ = cute.arch.thread_idx()
            if thread == self.first_consumer_thread:
                io.visits[w.batch, w.head, w.m_block, j] = 2 * n_block + cutlass.Int32(masked)
