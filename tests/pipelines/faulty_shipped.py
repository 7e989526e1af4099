"""The GEMM and the forward with a fault each."""

from __future__ import annotations

from collections.abc import Mapping

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from faulty_steps import InThreads
from products import Products

from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Ring, Role, Schedule, WordRing
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
