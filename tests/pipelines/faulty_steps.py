"""`Products` with a fault in its rings or in what its consumers do with a k tile."""

from __future__ import annotations

from collections.abc import Mapping

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from products import Products

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.pipelines import Ring, Role


class InThreads(Ring):
    """Counts the consumer's threads where its warps arrive."""

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        return roles[self.consumer].threads


class OneTooFew(Ring):
    """Takes a slot for empty when all warps of the consumer but one have said so."""

    def arrivals(self, roles: Mapping[str, Role], cluster: tuple[int, int]) -> int:
        return super().arrivals(roles, cluster) - 1


class TooManyBytes(Ring):
    """Announces a kibibyte more than is copied."""

    def transaction_bytes(self, tiles: Mapping[str, Tile]) -> int:
        return super().transaction_bytes(tiles) + 1024


class TooFewBytes(Ring):
    """Announces half of what is copied."""

    def transaction_bytes(self, tiles: Mapping[str, Tile]) -> int:
        return super().transaction_bytes(tiles) // 2


def counted_in(ring: type[Ring]) -> type[Products]:
    """The kernel with another ring."""
    return type(ring.__name__, (Products,), {"ring_type": ring, "__module__": __name__})


class ReleasesNothing(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        return ring_a, ring_b


class OneWarpReleasesNothing(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        if cute.arch.make_warp_uniform(at[2] // 32) != 3:
            slot_b.release()
        return ring_a, ring_b


class ReleasesTwice(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        slot_b.release()
        slot_b.release()
        return ring_a, ring_b


class ReleasesBeforeItHasRead(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        slot_a.release()
        slot_b.release()
        self.pause()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        return ring_a, ring_b


class ReleasesWhileWgmmaReads(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        slot_a.release()
        slot_b.release()
        warpgroup.wait_group(0)
        return ring_a, ring_b


class WaitsForNoGroup(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait_and_advance()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        slot_a.release()
        slot_b.release()
        return ring_a, ring_b


class NoFence(Products):
    def multiply(self, mma, acc, tiles, index_a, index_b):
        a, b = tiles[0][None, None, None, index_a], tiles[1][None, None, None, index_b]
        wgmma.issue(mma, acc, a, b, accumulate=True)


class LastTileWithoutAWait(Products):
    @cute.jit
    def fill(self, io, smem, ring_a, ring_b, work):
        load_a = self.load("a", io.a, smem.a, row=work)
        load_b = self.load("b", io.b, smem.b, row=0)
        for k in cutlass.range(io.k_tiles, unroll=1):
            slot_a = ring_a.acquire_and_advance()
            load_a(k, slot_a)
            slot_b = ring_b.acquire_and_advance()
            self.pause()
            load_b(k, slot_b)
        return ring_a, ring_b

    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        work, k, _ = at
        slot_a = ring_a.wait_and_advance()
        index_b = (work * io.k_tiles + k) % self.depth
        if k < io.k_tiles - 1:
            ring_b.wait()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, index_b)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        ring_b.release()
        ring_b.advance()
        return ring_a, ring_b


class ConsumerKeepsItsStage(Products):
    @cute.jit
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        slot_a = ring_a.wait_and_advance()
        slot_b = ring_b.wait()
        turns.wait()
        self.multiply(mma, acc, tiles, slot_a.index, slot_b.index)
        turns.pass_on()
        warpgroup.wait_group(0)
        slot_a.release()
        slot_b.release()
        return ring_a, ring_b


class WarpLeavesEarly(Products):
    @cute.jit
    def finish(self, io, smem, mma, acc, work, thread):
        warp = cute.arch.make_warp_uniform(thread // 32)
        if warp != 7:
            self.barriers["written"].arrive_and_wait()
        wgmma.to_smem(acc, smem.c, mma, thread)
        cute.arch.fence_view_async_shared()
        if warp != 7:
            self.barriers["written"].arrive_and_wait()
        if thread < 32:
            self.store(self.tiles["c"], io.c, smem.c, (work, 0))


def starting_late(which: str) -> type[Products]:
    """The kernel whose consumer, or producer, takes its rings for one round further."""

    class StartsLate(Products):
        def ports(self, role, ends):
            made = super().ports(role, ends)
            if role == which:
                for _ in range(self.depth):
                    made.a.advance()
            return made

    return StartsLate
