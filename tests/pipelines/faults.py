"""A catalogue of planted faults: small kernels that are wrong in one place each.

    for fault in FAULTS: check_pipeline(fault.kernel(), fault.works()); fault.arguments("cuda")

`said`: what the model must say, as regular expressions. `hardware`: what becomes of it on a GPU;
"corrupts" needs `slow()`, the same kernel with a delay where the race is, to be seen with
certainty, where the fault has a place for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import warpgroup
from products import COLS, DEPTH, GROUPS, ROWS, Products

from cutedsl_fa3.kernels.sm90.forward import ForwardSm90
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.layouts import Tile, wgmma
from cutedsl_fa3.model.works import Work, of_gemm, of_plan
from cutedsl_fa3.pipelines import Barriers, Ring, Role, Schedule, Turns, WordRing
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant import Variant

DELAY = 20_000  # nanoseconds: a hundred times what a tile takes
WORKS, K_TILES, STAGES = 3, 4, 2


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


class NoTurns:
    """Warpgroups that go as they like."""

    def wait(self) -> None:
        pass

    def pass_on(self) -> None:
        pass


class NoBarrierBeforeCNorTurns(NoBarrierBeforeC):
    def turns(self, group):
        return NoTurns()


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


class ValuesAheadOfKeys(ForwardSm90):
    """V is loaded a tile ahead of K."""

    @cute.jit
    def produce_runs(self, ports, w, loads):
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


class VisitsInThreads(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["visits"] = WordsInThreads()


class VisitsOneTooFew(ForwardSm90):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.rings["visits"] = WordsOneTooFew(stages=1)


Hardware = Literal["hangs", "corrupts", "benign"]


@dataclass(frozen=True)
class Fault:
    """One planted fault: the kernel, what the model says of it, what hardware makes of it.

    `made`: the kernel, with delays of so many nanoseconds where it has a place for them. `works`:
    what the model looks at. `arguments`: of a launch on a device, without the stream.
    """

    name: str
    made: Callable[[int], Any]
    hardware: Hardware
    said: tuple[str, ...]
    works: Callable[[], list[Work]]
    arguments: Callable[[str], tuple]

    def kernel(self) -> Any:
        """The kernel as it is."""
        return self.made(0)

    def slow(self) -> Any:
        """The kernel with delays where its race is."""
        return self.made(DELAY)


def arguments(device: str, works: int = WORKS, k_tiles: int = K_TILES) -> tuple:
    """a, b, c and the number of work tiles of `Products`."""
    rows, depth = GROUPS * ROWS * works, DEPTH * k_tiles
    return (*_matrices(device, (rows, depth), (COLS, depth), (rows, COLS)), works)


def _matrices(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    made = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    if device != "meta":
        generator = torch.Generator(device).manual_seed(0)
        for matrix in made:
            matrix.normal_(generator=generator)
    return made


def products_works(stages: int = STAGES) -> list[Work]:
    """One to three work tiles of stages + 2 k tiles, and three of one."""
    works = [Work(f"{WORKS} work tiles of 1 k tile", arguments("meta", WORKS, 1))]
    for number in range(1, WORKS + 1):
        given = arguments("meta", number, stages + 2)
        works.append(Work(f"{number} work tiles of {stages + 2} k tiles", given))
    return works


def in_products(name: str, made: type[Products], hardware: Hardware, *said: str) -> Fault:
    """A fault in the small kernel."""
    return Fault(name, lambda delay: made(STAGES, delay), hardware, said, products_works, arguments)


CLUSTER = Schedule(128, 128, stages=2, consumers=2, overlap="none", cluster=(2, 1))


def in_gemm(name: str, made: type[GemmSm90], hardware: Hardware, *said: str) -> Fault:
    """A fault in the GEMM of a cluster."""

    def given(device: str) -> tuple:
        return tuple(_matrices(device, (256, 512), (128, 512), (256, 128)))

    return Fault(
        name,
        lambda delay: made(CLUSTER),
        hardware,
        said,
        lambda: list(of_gemm(GemmSm90(CLUSTER))),
        given,
    )


def plan(by_tile: bool = False) -> Plan:
    """A forward of two warpgroups, by runs or by tiles."""
    documents = torch.arange(64) // 8

    def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (k <= q)

    mask = packed if by_tile else None
    return Plan.default(Variant(mask=mask), Problem("bf16", 128, 128))


def in_forward(
    name: str, made: type[ForwardSm90], hardware: Hardware, *said: str, by_tile: bool = False
) -> Fault:
    """A fault in the forward."""

    def given(device: str) -> tuple:
        rows = 1024
        q, k, v, o = _matrices(device, *[(1, rows, 2, 128)] * 4)
        lse = torch.empty(1, 2, rows, device=device)
        if not by_tile:
            return q, k, v, o, lse, None, None, None, 0.1
        documents = torch.arange(rows, device=device) // 256
        shape = plan(by_tile).table_shape(1, 1, rows, rows)
        table = torch.zeros(shape, dtype=torch.int32, device=device)
        return q, k, v, o, lse, (documents,), table, None, 0.1

    return Fault(
        name,
        lambda delay: made(plan(by_tile)),
        hardware,
        said,
        lambda: list(of_plan(plan(by_tile))),
        given,
    )


FAULTS: tuple[Fault, ...] = (
    in_products(
        "no release",
        ReleasesNothing,
        "hangs",
        r"producer warp 0: waits on ring 'b' empty, stage 0, phase 0 \(0 of 8 arrivals",
        "the cycle: consumer -> producer -> consumer",
    ),
    in_products(
        "a warp releases nothing",
        OneWarpReleasesNothing,
        "hangs",
        r"waits on ring 'b' empty, stage 0, phase 0 \(7 of 8 arrivals from consumer\)",
    ),
    in_products(
        "two releases", ReleasesTwice, "hangs", "phase may end early: ring 'b' empty, stage 0"
    ),
    in_products(
        "a count in threads",
        counted_in(InThreads),
        "hangs",
        "ring 'a' empty, stage 0 is initialised for 256 arrivals, its 8 consumer warps bring 8",
    ),
    in_products(
        "a count of one too few",
        counted_in(OneTooFew),
        "corrupts",
        "phase may end early: ring 'a' empty, stage 0: an arrival by consumer warp 7",
        "overwritten before read: tile 'a' stage 0",
    ),
    in_products(
        "too many bytes",
        counted_in(TooManyBytes),
        "hangs",
        "bytes differ: ring 'b' full, stage 0: 9216 B are announced, and 8192 B are copied",
        r"waits on ring 'a' full, stage 0, phase 0 \(17408 B announced, 16384 B copied\)",
    ),
    in_products(
        "too few bytes",
        counted_in(TooFewBytes),
        "hangs",
        "bytes differ: ring 'a' full, stage 0: 8192 B are announced, and 16384 B are copied",
    ),
    in_products(
        "two announcements",
        AnnouncesTwice,
        "hangs",
        "too many arrivals: ring 'b' full, stage 0, phase 0: producer warp 0 brings 1 arrivals "
        "where 0 of 1",
    ),
    in_products(
        "two copies",
        CopiesTwice,
        "hangs",
        "bytes differ: ring 'b' full, stage 0: 8192 B are announced, and 16384 B are copied",
    ),
    in_products(
        "copies that signal each other's ring",
        SignalsTheOtherRing,
        "hangs",
        "bytes differ: ring 'a' full, stage 0: 16384 B are announced, and 8192 B are copied",
    ),
    in_products(
        "all warps copy",
        AllWarpsCopy,
        "hangs",
        "two writers: tile 'a' stage 0: .* by producer warp 0 and .* by producer warp 1",
    ),
    # Order, phases and stages.
    in_products(
        "release before the read",
        ReleasesBeforeItHasRead,
        "corrupts",
        "overwritten before read: tile 'a' stage 0: a TMA copy into it by producer warp 0 may "
        "come before a WGMMA that reads it by consumer warp 0",
    ),
    in_products(
        "release before wait_group",
        ReleasesWhileWgmmaReads,
        "corrupts",
        "overwritten before read: tile 'b' stage 0: a TMA copy .* before a WGMMA that reads it",
    ),
    in_products(
        "no wait_group",
        WaitsForNoGroup,
        "corrupts",
        r"registers in use: consumer warp \d reads the accumulator of a WGMMA that still runs",
        "overwritten before read: tile 'a' stage 0",
    ),
    in_products(
        "no fence", NoFence, "benign", "fence missing: consumer warp 0 multiplies tile 'a' stage 0"
    ),
    in_products(
        "the last tile without a wait",
        LastTileWithoutAWait,
        "corrupts",
        "read before full: tile 'b' stage 0: a WGMMA that reads it by consumer warp 0",
    ),
    in_products(
        "a consumer that keeps its stage",
        ConsumerKeepsItsStage,
        "hangs",
        "wrong phase: ring 'b' full, stage 0: phase 1 may end before consumer warp 0",
        "deadlock",
    ),
    in_products(
        "a producer that keeps its stage",
        ProducerKeepsItsStage,
        "hangs",
        "two writers: tile 'b' stage 0",
        "deadlock",
    ),
    in_products(
        "a producer of the wrong first phase",
        starting_late("producer"),
        "hangs",
        r"producer warp 0: waits on ring 'a' empty, stage 0, phase 0 \(0 of 8 arrivals",
    ),
    in_products(
        "a consumer of the wrong first phase",
        starting_late("consumer"),
        "hangs",
        "wrong phase: ring 'a' full, stage 0: phase 0 may end before consumer warp 7 looks",
    ),
    in_products(
        "all of A before any B",
        AllOfABeforeB,
        "hangs",
        r"consumer warps 0 to 7: waits on ring 'b' full, stage 0, phase 0 \(0 of 1 arrivals",
        "the cycle: consumer -> producer -> consumer",
    ),
    in_products("B before A", BBeforeA, "benign"),
    in_products(
        "a tile too few",
        OneTileTooFew,
        "hangs",
        "consumer warps 0 to 7: waits on ring 'b' full",
        "producer warps 0 to 3: ended",
    ),
    in_products(
        "a tile too many",
        OneTileTooMany,
        "benign",
        "ends too soon: tile 'a' stage 1: the CTA may end before a copy of producer warp 0",
        "never read: tile 'a' stage 1",
    ),
    in_products(
        "a warp leaves early",
        WarpLeavesEarly,
        "hangs",
        r"waits at named barrier 1 'written' \(224 of 256 threads\)",
    ),
    # Turns and named barriers.
    in_products(
        "a turn is kept",
        KeepsItsTurn,
        "hangs",
        r"consumer warps 0 to 3: waits at named barrier 2 'turn'\[0\] \(128 of 256 threads\)",
    ),
    in_products(
        "nobody waits for a turn",
        WaitsForNoTurn,
        "benign",
        r"out of turn: named barrier 2 'turn'\[0\]: consumer warp 4 comes twice in round 0",
    ),
    in_products(
        "nobody has the first turn",
        NobodyHasTheFirstTurn,
        "hangs",
        r"consumer warps 4 to 7: waits at named barrier 3 'turn'\[1\] \(128 of 256 threads\)",
    ),
    in_products(
        "turns passed on to oneself",
        PassesTurnsToItself,
        "hangs",
        r"waits at named barrier 3 'turn'\[1\]",
    ),
    in_products(
        "a barrier of two uses",
        BarrierOfTwoUses,
        "corrupts",
        "out of turn: named barrier 1 .*: consumer warp 4 comes twice",
    ),
    in_products(
        "a producer at the consumers' barrier",
        ProducerAtTheConsumersBarrier,
        "hangs",
        "out of turn: named barrier 1 'written': producer warp 0 comes twice in round 0",
    ),
    in_products("no barrier before C, but turns", NoBarrierBeforeC, "benign"),
    in_products(
        "no barrier before C, and no turns",
        NoBarrierBeforeCNorTurns,
        "corrupts",
        "overwritten before read: tile 'c': a write of threads .* before a TMA store that reads it",
    ),
    in_products(
        "no barrier after C",
        NoBarrierAfterC,
        "corrupts",
        "read before full: tile 'c': a TMA store that reads it by consumer warp 0",
    ),
    in_products(
        "no fence before the store", NoProxyFence, "benign", "proxy fence missing: tile 'c'"
    ),
    in_products(
        "a store that nobody waits for",
        StoreIsNotAwaited,
        "corrupts",
        "overwritten before read: tile 'c'",
        "ends too soon: consumer warp 0 ends while a TMA store may still read",
    ),
    in_products(
        "nobody waits for the mbarriers",
        NobodyWaitsForTheRings,
        "hangs",
        "not initialised: consumer warp 0 may use ring 'a' full, stage 0 before it is initialised",
    ),
    # Shipped kernels.
    in_gemm(
        "no tail",
        NoTail,
        "benign",
        "ends too soon: CTA 0 ring 'ab' empty, stage 0: its CTA may end before CTA 1 consumer",
    ),
    in_gemm(
        "partners forgotten",
        ForgetsPartners,
        "hangs",
        "phase may end early: CTA [01] ring 'ab' empty, stage 0: an arrival by CTA",
    ),
    in_forward(
        "keys counted in threads",
        KeysInThreads,
        "hangs",
        "ring 'k' empty, stage 0 is initialised for 256 arrivals, its 8 consumer warps bring 8",
    ),
    in_forward(
        "O over V",
        OutputOverValues,
        "corrupts",
        "overwritten before read: tile 'v' stage 0 and tile 'o'",
    ),
    in_forward(
        "V ahead of K",
        ValuesAheadOfKeys,
        "hangs",
        r"producer warp 0: waits on ring 'v' empty, stage 0, phase 0 \(0 of 8 arrivals",
    ),
    in_forward(
        "words counted in threads",
        VisitsInThreads,
        "hangs",
        "waits on ring 'visits' empty, stage 0",
        by_tile=True,
    ),
    in_forward(
        "a word overwritten",
        VisitsOneTooFew,
        "corrupts",
        "phase may end early: ring 'visits' empty, stage 0: an arrival by consumer warp 7",
        by_tile=True,
    ),
)
