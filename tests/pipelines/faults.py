"""A catalogue of planted faults: small kernels that are wrong in one place each.

    for fault in FAULTS: check_pipeline(fault.kernel(), fault.works()); fault.arguments("cuda")

`said`: what the model must say, as regular expressions. `hardware`: what becomes of it on a GPU;
"corrupts" needs `slow()`, the same kernel with a delay where the race is, to be seen for certain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import warpgroup
from products import COLS, DEPTH, GROUPS, ROWS, Products

from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.model.works import Work
from cutedsl_fa3.pipelines import Barrier, Barriers, Ring, Role, Turns

DELAY = 20_000  # nanoseconds: a hundred times what a tile takes
WORKS, K_TILES = 3, 4


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
    def step(self, io, mma, acc, tiles, turns, ring_a, ring_b, at):
        work, k, thread = at
        last = work == io.works - 1 and k == io.k_tiles - 1
        if cute.arch.make_warp_uniform(thread // 128) == 0 or not last:
            ring_a.wait()
            ring_b.wait()
            turns.wait()
            self.multiply(mma, acc, tiles, ring_a.current_handle().index, self.index(io, at))
            turns.pass_on()
            warpgroup.wait_group(0)
            ring_a.release()
            ring_b.release()
        ring_a.advance()
        ring_b.advance()
        return ring_a, ring_b

    def index(self, io, at):
        """The stage of a k tile."""
        return (at[0] * io.k_tiles + at[1]) % self.depth


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
        if at[0] == 0 or at[1] > 0:
            turns.pass_on()
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
        cute.copy(atom, from_smem, to_gmem[(None, *block)])
        cute.arch.cp_async_bulk_commit_group()


class NobodyWaitsForTheRings(Products):
    """All threads use the mbarriers as soon as one has begun to initialise them."""

    def open_rings(self, mbarriers: cute.Pointer) -> dict[str, tuple]:
        ends, place = {}, 0
        for name, ring in self.rings.items():
            address = cute.recast_ptr(mbarriers + place, dtype=cutlass.Int64)
            pipeline = ring.open(address, self.tiles, self.roles, self.cluster)
            ends[name] = self.participants(name, pipeline)
            place += ring.bytes
        return ends


@dataclass(frozen=True)
class Fault:
    """One planted fault: the kernel, what the model says of it, what hardware makes of it."""

    name: str
    made: Callable[..., Products]
    hardware: Literal["hangs", "corrupts", "benign"]
    said: tuple[str, ...]
    stages: int = 2

    def kernel(self) -> Products:
        """The kernel as it is."""
        return self.made(self.stages)

    def slow(self) -> Products:
        """The kernel with delays where its race is."""
        return self.made(self.stages, DELAY)

    def works(self) -> list[Work]:
        """What the model looks at: one to three work tiles of up to stages + 2 k tiles."""
        works = [Work(f"{WORKS} work tiles of 1 k tile", arguments("meta", WORKS, 1))]
        return works + [
            Work(f"{number} work tiles of {self.stages + 2} k tiles", given)
            for number in range(1, WORKS + 1)
            if (given := arguments("meta", number, self.stages + 2))
        ]

    @staticmethod
    def arguments(device: str) -> tuple:
        """a, b, c and the number of work tiles, for a launch."""
        return arguments(device, WORKS, K_TILES)


def arguments(device: str, works: int, k_tiles: int) -> tuple:
    """a, b, c and the number of work tiles."""
    rows, depth = GROUPS * ROWS * works, DEPTH * k_tiles
    shapes = ((rows, depth), (COLS, depth), (rows, COLS))
    a, b, c = (torch.empty(s, dtype=torch.bfloat16, device=device) for s in shapes)
    if device != "meta":
        generator = torch.Generator(device).manual_seed(0)
        a.normal_(generator=generator), b.normal_(generator=generator), c.zero_()
    return a, b, c, works


FAULTS: tuple[Fault, ...] = (
    Fault(
        "no release",
        ReleasesNothing,
        "hangs",
        ("deadlock", r"producer warp 0: waits on ring 'b' empty, stage 0"),
    ),
)
NAMES = {fault.name: fault for fault in FAULTS}
