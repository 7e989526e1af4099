"""The GEMM and the forward with a fault each."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from faulty_steps import InThreads
from products import Products

from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import Ring, Role, Schedule, WordRing, drawn_tile, put
from cutedsl_fa3.plans import Plan


class NoTail(GemmSm90):
    """The producer ends as soon as it has issued its copies, though partners still arrive."""

    @cute.jit
    def producer(self, io, smem, ports, thread):
        m_block, n_block, _ = cute.arch.block_idx()
        load_a = self.load("a", io.a, smem.a, row=m_block)
        load_b = self.load("b", io.b, smem.b, row=n_block)
        ring = ports.ab
        if thread < 32:
            for k in cutlass.range(self.k_tiles(io), unroll=1):
                slot = ring.acquire_and_advance()
                load_a(k, slot)
                load_b(k, slot)


class OfOneCta(Ring):
    """Counts the warps of one CTA for a slot that two CTAs fill."""

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        return roles[self.consumer].warps


class ForgetsPartners(GemmSm90):
    """A GEMM of a cluster whose slots are empty when one CTA says so."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.rings = {"ab": OfOneCta(("a", "b"), schedule.stages, multicast=self.multicast)}


class WordsInThreads(WordRing):
    """Counts the consumer's threads where its warps arrive."""

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        return roles[self.consumer].threads


class WordsOneTooFew(WordRing):
    """Takes a word for read when all warps of the consumer but one have said so."""

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        return super().arrivals(roles, cluster) - 1


class KeysInThreads(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["k"] = InThreads(("k",), plan.schedule.stages)


class OutputOverValues(ForwardSm90):
    """O takes the place of V, which the other warpgroup may still read."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.aliases = {"o": "v"}
        self.delay = 0

    @cute.jit
    def last_values(self, f, ring_v):
        slot = ring_v.wait_and_advance()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) >= 8:
            self.pause()
        f.multiply_pv(slot)
        warpgroup.wait_group(0)
        slot.release()
        return ring_v

    def pause(self) -> None:
        """Lose time, in the second warpgroup of consumers."""
        Products.pause(self)


class ValuesAheadOfKeys(ForwardSm90):
    """V is loaded a tile ahead of K."""

    @cute.jit
    def produce_runs(self, io, ports, w, loads):
        load_q, load_k, load_v = loads
        ring_q, ring_k, ring_v = ports.q, ports.k, ports.v
        total = w.runs.n_total
        if total > 0:
            slot_q = ring_q.acquire_and_advance()
            load_q(w.m_block, slot_q)
            for j in cutlass.range(total + self.schedule.stages, unroll=1):
                if j < total:
                    slot_v = ring_v.acquire_and_advance()
                    load_v(w.runs.n_block(j), slot_v)
                if j >= self.schedule.stages:
                    slot_k = ring_k.acquire_and_advance()
                    load_k(w.runs.n_block(j - self.schedule.stages), slot_k)
        return ring_q, ring_k, ring_v, cutlass.Int32(0)


class VisitsInThreads(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["visits"] = WordsInThreads()


class VisitsOneTooFew(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["visits"] = WordsOneTooFew(stages=1)


# Persistent CTAs.


class QueriesReleasedAtOnce(ForwardSm90):
    """Q's slot is empty as soon as it is full, while S of later key tiles still reads it."""

    @cute.jit
    def attend(self, io, smem, w, f, turns, ports, thread):
        softmax = w.elements.softmax(len(f.places.row_offsets))
        f.acc_o.fill(0.0)
        group, q = thread // wgmma.WARPGROUP, ports.q.clone()
        if w.runs.n_total > 0:
            q.wait()
            q.release()
        ring_q, ring_k, ring_v, some = self.along_runs(io, w, f, softmax, turns, ports, group)
        if some:
            ring_v = self.last_values(f, ring_v)
        self.epilogue(io, smem, w, f, softmax, thread)
        return ring_q, ring_k, ring_v, None


class QueriesKept(ForwardSm90):
    """Q's slot is never released, so that the next work tile's Q has no place."""

    @cute.jit
    def attend(self, io, smem, w, f, turns, ports, thread):
        softmax = w.elements.softmax(len(f.places.row_offsets))
        f.acc_o.fill(0.0)
        group = thread // wgmma.WARPGROUP
        ring_q, ring_k, ring_v, some = self.along_runs(io, w, f, softmax, turns, ports, group)
        if some:
            ring_v = self.last_values(f, ring_v)
        self.epilogue(io, smem, w, f, softmax, thread)
        return ring_q, ring_k, ring_v, None


class QueriesOverOutput(ForwardSm90):
    """Q's slot, in which O lies, is released while the store of O may still read it."""

    def store(self, tile, target, smem, block, wait=True):
        super().store(tile, target, smem, block, wait=False)


class OutputOverOutput(ForwardSm90):
    """The next work tile's O is written while the store of this one's may still read it."""

    def stored(self) -> None:
        pass


class NoLastWord(ForwardSm90):
    """Nobody tells the consumers that there is no more work."""

    @cute.jit
    def produce_drawn(self, io, smem, ports):
        ring_q, ring_k, ring_v, work = ports.q, ports.k, ports.v, ports.work
        tiles = self.work_tiles(io)
        index, _, _ = cute.arch.block_idx()
        while index < tiles:
            m_block, head, batch = self.place(io, index)
            work = put(work, smem.work, m_block, head, batch)
            ends = SimpleNamespace(q=ring_q, k=ring_k, v=ring_v, visits=None)
            ring_q, ring_k, ring_v, _, drawn = self.produce(io, smem, ends, m_block, head, batch)
            index = drawn_tile(drawn, io.counter, tiles)


class WorkInThreads(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["work"] = WordsInThreads(stages=2, words=3)


class WorkOneTooFew(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["work"] = WordsOneTooFew(stages=1, words=3)


class PassesOverWithoutATurn(ForwardSm90):
    """A warpgroup takes no turn for a key tile that it passes over: fewer than the other."""

    def unseen(self, io, w, turns, ring_k, ring_v, group):
        return super().unseen(io, w, None, ring_k, ring_v, group)
