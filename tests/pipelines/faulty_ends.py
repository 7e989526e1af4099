"""`Products` with a fault in its producer, its turns, its barriers or its stores."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from products import Products

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import Barriers, Turns

STORE_NS = 100  # of a TMA store of C; a guess that makes delays long enough


class ProducerKeepsItsStage(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            slot_b = ring_b.acquire()
            load_b(k, slot_b)
        return ring_a, ring_b


class AnnouncesTwice(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            slot_b = ring_b.acquire_and_advance()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(slot_b.barrier, self.tiles["b"].bytes)
            load_b(k, slot_b)
        return ring_a, ring_b


class CopiesTwice(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            slot_b = ring_b.acquire_and_advance()
            load_b(k, slot_b)
            load_b(k, slot_b)
        return ring_a, ring_b


class SignalsTheOtherRing(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            slot_b = ring_b.acquire_and_advance()
            load_a(k, slot_b)
            load_b(k, slot_a)
        return ring_a, ring_b


class AllOfABeforeB(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_b = ring_b.acquire_and_advance()
            load_b(k, slot_b)
        return ring_a, ring_b


class BBeforeA(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_b = ring_b.acquire_and_advance()
            load_b(k, slot_b)
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
        return ring_a, ring_b


class OneTileTooFew(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            if work < io.works - 1 or k < io.k_tiles - 1:
                slot_b = ring_b.acquire_and_advance()
                load_b(k, slot_b)
        return ring_a, ring_b


class OneTileTooMany(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            slot_b = ring_b.acquire_and_advance()
            load_b(k, slot_b)
        if work == io.works - 1:
            slot_a = ring_a.acquire_and_advance()
            load_a(0, slot_a)
        return ring_a, ring_b


class AllWarpsCopy(Products):
    def issues(self, thread):
        return thread >= 0


class KeepsItsTurn(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        group = cute.arch.make_warp_uniform(at[2] // wgmma.WARPGROUP)
        if group == 0 or at[1] != 1:
            self.barriers["turn", 1 - group].arrive_unaligned()
        warpgroup.wait_group(0)
        slot_a.release()
        slot_b.release()
        return ring_a, ring_b


class WaitsForNoTurn(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        slot_b.release()
        return ring_a, ring_b


class WithoutToken(Turns):
    """Turns of which nobody has the first."""

    def _start(self) -> None:
        pass


class ToItself(Turns):
    """Turns that a warpgroup passes on to itself."""

    def pass_on(self) -> None:
        self.barriers[self.name, self.warpgroup].arrive_unaligned()


class NobodyHasTheFirstTurn(Products):
    def turns(self, group):
        return WithoutToken(self.barriers, "turn", group)


class PassesTurnsToItself(Products):
    def turns(self, group):
        return ToItself(self.barriers, "turn", group)


class BarrierOfTwoUses(Products):
    """The turn's barriers are the one that guards C."""

    class Clashing(Barriers):
        def number(self, name: str) -> int:
            return 1

    def __init__(self, stages: int = 2, delay: int = 0) -> None:
        super().__init__(stages, delay)
        self.barriers = self.Clashing(self.barriers.table)


class ProducerAtTheConsumersBarrier(Products):
    @cute.jit
    def producer(self, io, smem, ports, thread):
        ring_a, ring_b = ports.a, ports.b
        if self.issues(thread):
            for work in cutlass.range(io.works, unroll=1):
                ring_a, ring_b = self.fill(io, smem, ring_a, ring_b, work)
                self.barriers["written"].arrive_unaligned()


class NoBarrierBeforeC(Products):
    @cute.jit
    def finish(self, io, smem, mma, acc, work, thread):
        wgmma.to_smem(acc, smem.c, mma, thread)
        cute.arch.fence_view_async_shared()
        self.barriers["written"].arrive_and_wait()
        if thread < 32:
            self.pause()
            self.store(self.tiles["c"], io.c, smem.c, (work, 0))


class NoBarrierAfterC(Products):
    @cute.jit
    def finish(self, io, smem, mma, acc, work, thread):
        self.barriers["written"].arrive_and_wait()
        if thread >= 128:
            self.pause()
        wgmma.to_smem(acc, smem.c, mma, thread)
        cute.arch.fence_view_async_shared()
        if thread < 32:
            self.store(self.tiles["c"], io.c, smem.c, (work, 0))


class NoProxyFence(Products):
    @cute.jit
    def finish(self, io, smem, mma, acc, work, thread):
        self.barriers["written"].arrive_and_wait()
        wgmma.to_smem(acc, smem.c, mma, thread)
        self.barriers["written"].arrive_and_wait()
        if thread < 32:
            self.store(self.tiles["c"], io.c, smem.c, (work, 0))


class StoreIsNotAwaited(Products):
    def store(self, tile, target, smem, block):
        atom, gmem = target
        to_gmem, from_smem = tile.blocks(atom, gmem, smem)
        for _ in range(1 + self.delay // STORE_NS):
            cute.copy(atom, from_smem, to_gmem[(None, *block)])
        cute.arch.cp_async_bulk_commit_group()


class NobodyWaitsForTheRings(Products):
    """All threads use the mbarriers as soon as one has begun to initialise them."""

    @cute.jit
    def late(self):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            self.pause()

    def open_rings(self, mbarriers: cute.Pointer) -> dict[str, tuple]:
        ends, place = {}, 0
        self.late()
        for name, ring in self.rings.items():
            address = cute.recast_ptr(mbarriers + place, dtype=cutlass.Int64)
            pipeline = ring.open(address, self.tiles, self.roles, self.cluster)
            ends[name] = self.participants(name, pipeline)
            place += ring.bytes
        return ends


class NoTurns:
    """Warpgroups that go as they like."""

    def wait(self) -> None:
        pass

    def pass_on(self) -> None:
        pass


class NoBarrierBeforeCNorTurns(NoBarrierBeforeC):
    def turns(self, group):
        return NoTurns()
