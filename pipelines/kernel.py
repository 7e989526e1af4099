"""A warp-specialised kernel: three tables and one method per role.

    class Gemm(WarpSpecialized):
        tiles  what lies in shared memory
        rings  who hands which tiles to whom
        roles  how many warps run which method, with how many registers

From the tables follow the storage plan, the mbarriers with their counts, the register moves and
which warps run what. A role's name is the name of its method,

    @cute.jit
    def consumer(self, io, smem, ports, thread): ...

where `io` is the kernel's one argument (a frozen dataclass of TMA atoms, tensors and numbers),
`smem` has a tensor per tile and the words of each `WordRing`, `ports` has this role's end of each
of its rings, and `thread` counts from 0 within the role.

On SM100 a fourth table, `accumulators`, says what lies in tensor memory; the columns are allocated
before the roles begin, and the role that reads them frees them (`free_tmem`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import PipelineAsync, pipeline_init_arrive, pipeline_init_wait
from cutlass.pipeline.sm90 import ImmutableResourceHandle

from cutedsl_fa3.layouts import (
    Accumulator,
    Buffer,
    Columns,
    Row,
    SmemPlan,
    Tile,
    TmemPlan,
    capacity_of_each,
    tcgen05,
)

from .barriers import Barriers
from .expect import Expect, exactly
from .ring import BARRIER_BYTES, AccumulatorRing, Ring, WordRing
from .roles import (
    WARPS_PER_GROUP,
    Role,
    check_registers,
    first_warps,
    launch_registers,
    threads,
)
from .schedule import ScheduleError

TMEM_ADDRESS_BYTES = 4  # where the allocation of tensor memory writes the first column


class WarpSpecialized:
    """Base of kernels described by tables; subclasses set them, then write one method per role.

    `aliases` lets one tile reuse the storage of another that is dead by then; `places` gives a tile
    that travels in no ring as many slots.
    """

    tiles: Mapping[str, Tile | Row]
    rings: Mapping[str, Ring]
    roles: Mapping[str, Role]
    barriers: Barriers = Barriers({})
    accumulators: Mapping[str, Accumulator] = {}
    aliases: Mapping[str, str] = {}
    places: Mapping[str, int] = {}
    cluster: tuple[int, int] = (1, 1)
    residents: int = 1  # CTAs of a multiprocessor at a time

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return threads(self.roles)

    @property
    def smem(self) -> SmemPlan:
        """Where each tile and the mbarriers lie in shared memory."""
        buffers = [
            Buffer(name, tile.bytes, tile.align, self.stages(name), self.aliases.get(name))
            for name, tile in self.tiles.items()
        ]
        mbarriers = sum(ring.bytes for ring in self.rings.values())
        buffers.append(Buffer("mbarriers", mbarriers, align=BARRIER_BYTES))
        if self.accumulators:
            buffers.append(Buffer("tmem address", TMEM_ADDRESS_BYTES, align=TMEM_ADDRESS_BYTES))
        return SmemPlan(tuple(buffers), capacity_of_each(self.residents))

    @property
    def tmem(self) -> TmemPlan:
        """Where each accumulator lies in tensor memory."""
        return TmemPlan(
            tuple(
                Columns(name, accumulator.columns, self.stages(name))
                for name, accumulator in self.accumulators.items()
            )
        )

    def stages(self, name: str) -> int:
        """Slots of a tile or accumulator: those of its ring or of `places`, or 1."""
        own = self.places.get(name, 1)
        return next((ring.stages for ring in self.rings.values() if name in ring.tiles), own)

    def check(self) -> None:
        """Refuse tables that cannot run, before anything is compiled.

        Raises:
            ScheduleError: registers, barriers, unknown names, a tile in two rings.
            LayoutError: shared or tensor memory.
        """
        carried: dict[str, str] = {}
        for name, ring in self.rings.items():
            in_tmem = isinstance(ring, AccumulatorRing)
            for tile in ring.tiles:
                if tile not in (self.accumulators if in_tmem else self.tiles):
                    kind = "accumulator" if in_tmem else "tile"
                    raise ScheduleError(f"ring {name!r} carries {tile!r}, which is no {kind}")
                if tile in carried:
                    raise ScheduleError(
                        f"rings {carried[tile]!r} and {name!r} both carry {tile!r}: each would "
                        "fill the other's slots; give every ring its own tiles"
                    )
                carried[tile] = name
            for tile, axis in ring.multicast.items():
                if tile not in ring.tiles or axis not in ("m", "n"):
                    raise ScheduleError(
                        f"ring {name!r} multicasts {tile!r} along {axis!r}: one of its tiles "
                        f"({', '.join(ring.tiles)}) along 'm' or 'n' is needed"
                    )
                parts, rows = self.parts(tile), self.tiles[tile].rows
                if rows % (8 * parts):
                    raise ScheduleError(
                        f"ring {name!r}: {parts} CTAs share the {rows} rows of {tile!r}, and each "
                        f"copies whole swizzle atoms of 8 rows; a multiple of {8 * parts} is needed"
                    )
            for role in (ring.producer, ring.consumer):
                if role not in self.roles:
                    raise ScheduleError(f"ring {name!r} names {role!r}, which is no role")
        for role in self.roles:
            if not callable(getattr(self, role, None)):
                raise ScheduleError(f"role {role!r} has no method {role}()")
        check_registers(self.roles, residents=self.residents)
        for name, barrier in self.barriers.table.items():
            if barrier.threads > self.threads:
                raise ScheduleError(
                    f"named barrier {name!r} threads = {barrier.threads}: the CTA has "
                    f"{self.threads}, so it would wait for ever"
                )
        self.smem.check()
        if self.accumulators:
            self._reader_warp()
            self.tmem.check()

    def _reader_warp(self) -> int:
        """The first warp of the role that reads the accumulators: it allocates and frees them."""
        readers = {r.consumer for r in self.rings.values() if isinstance(r, AccumulatorRing)}
        if len(readers) != 1:
            raise ScheduleError(f"accumulators are read by {sorted(readers)}; one role is needed")
        (reader,) = readers
        first, warps = first_warps(self.roles)[reader], self.roles[reader].warps
        if first % WARPS_PER_GROUP or warps != WARPS_PER_GROUP:
            raise ScheduleError(
                f"role {reader!r} is warps {first} to {first + warps - 1}: a warp reads the 32 "
                "lanes of tensor memory of its place in its warpgroup, so one whole warpgroup is "
                f"needed; put it first, with {WARPS_PER_GROUP} warps"
            )
        return first

    def common_expectations(
        self,
        loads: Mapping[str, int],
        stores: Mapping[str, Tile],
        rank: int = 2,
        adds: Mapping[str, Tile] | None = None,
    ) -> tuple[Expect, ...]:
        """What tiles, rings and roles promise about the machine code, whatever is multiplied.

        `loads`: in how many places of the code each tile is loaded; the body of a loop is one, so
        a loop with loads or products says `unroll=1`. `stores`: the tile of each TMA store, by a
        name to report; `adds`: likewise of those that add to one tensor, whose descriptor is
        prefetched too.
        `rank`: dimensions of the tensors in global memory. A kernel adds its products:

            def expected(self):
                common = self.common_expectations({"a": 1, "b": 1}, {"c": self.tiles["c"]})
                opcode, count = wgmma.instructions(...)
                return (*common, Expect(opcode, "exactly", count, "one product a slot"))
        """
        copies = {name: sites * self.share(name).copies for name, sites in loads.items()}
        shared = {name: count for name, count in copies.items() if self.parts(name) > 1}
        inits = {name: 2 * ring.stages for name, ring in self.rings.items()}
        written = {name: tile.copies for name, tile in stores.items()}
        added = {name: tile.copies for name, tile in (adds or {}).items()}
        prefetched = dict.fromkeys((*loads, *(("what is added to",) if added else ())), 1)
        granted = launch_registers(self.threads, self.residents)
        budgets = {n: r.registers for n, r in self.roles.items() if r.registers is not None}
        fewer = {name: 1 for name, registers in budgets.items() if registers < granted}
        more = {name: 1 for name in budgets if name not in fewer}
        promises = (
            exactly("UTMALDG", copies, "TMA boxes of"),
            exactly(f"UTMALDG.{rank}D.MULTICAST", shared, "boxes shared in the cluster, of"),
            exactly("UTMASTG", written, "TMA boxes of"),
            *((exactly("UTMAREDG", added, "TMA boxes added, of"),) if added else ()),
            exactly("UTMACCTL.PF", prefetched, "descriptors prefetched, of"),
            Expect("ELECT", "at least", int(bool(loads)), "one thread issues a TMA copy"),
            exactly("SYNCS.EXCH.64", inits, "full and empty mbarriers of ring"),
            exactly("USETMAXREG.DEALLOC", fewer, f"fewer than the launch's {granted}:"),
            exactly("USETMAXREG.TRY_ALLOC", more, f"the launch's {granted} or more:"),
        )
        if self.accumulators:
            columns = f"{self.tmem.allocated} columns of tensor memory"
            promises += (
                Expect("UTCATOMSWS.FIND_AND_SET", "at least", 1, f"{columns} are allocated"),
                Expect("UTCATOMSWS.AND", "exactly", 1, f"{columns} are freed"),
            )
        return promises

    def parts(self, tile: str) -> int:
        """CTAs that share the loads of `tile`: each copies that fraction of its rows."""
        axis = next((r.multicast.get(tile) for r in self.rings.values() if tile in r.tiles), None)
        return 1 if axis is None else self.cluster["mn".index(axis)]

    def share(self, tile: str) -> Tile:
        """The rows of `tile` that one CTA loads."""
        whole = self.tiles[tile]
        return replace(whole, rows=whole.rows // self.parts(tile))

    # Traced from here on.

    def launch(self, io: object, grid: tuple, stream: object) -> None:
        """Launch the kernel, from the host function: `residents` CTAs a multiprocessor.

        Without that promise the compiler does not know the launch's registers and drops every
        setmaxnreg.
        """
        cluster = {"cluster": (*self.cluster, 1)} if self.cluster != (1, 1) else {}
        self.staged(io).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.residents,
            preferred_smem_carveout=100 if self.residents > 1 else None,
            stream=stream,
            **cluster,
        )

    def staged(self, io: object) -> object:
        """What is launched: the kernel with its argument."""
        return self.kernel(io)

    def open_storage(self) -> tuple[SimpleNamespace, cute.Pointer]:
        """A tensor per tile at its planned offset, and the address of the mbarriers."""
        plan = self.smem
        base = SmemAllocator().allocate(plan.total, byte_alignment=1024)
        tensors = {}
        for name, tile in self.tiles.items():
            in_ring = any(name in ring.tiles for ring in self.rings.values())
            stages = self.stages(name) if in_ring or name in self.places else None
            tensors[name] = tile.tensor(base + plan.offset(name), stages)
        if self.accumulators:
            address = base + plan.offset("tmem address")
            tensors["tmem_address"] = cute.recast_ptr(address, dtype=cutlass.Int32)
        mbarriers = offset = base + plan.offset("mbarriers")
        for name, ring in self.rings.items():
            if isinstance(ring, WordRing):
                tensors[name] = ring.tensor(offset)
            offset = offset + ring.bytes
        return SimpleNamespace(**tensors), mbarriers

    @cute.jit
    def allocate_tmem(self, smem):
        """Allocate this CTA's columns, by one warp, and show all threads where they begin."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self._reader_warp():
            cute.arch.alloc_tmem(self.tmem.allocated, smem.tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()  # what opens the rings orders mbarriers only

    def accumulator(self, name: str, mma: cute.TiledMma, smem: SimpleNamespace) -> cute.Tensor:
        """The tensor (instruction, rows, cols, stage) of an accumulator that `mma` writes."""
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, smem.tmem_address)
        address = base + self.tmem.offset(name)
        return tcgen05.accumulator(mma, self.accumulators[name], address, self.stages(name))

    @cute.jit
    def free_tmem(self, smem):
        """Free this CTA's columns; the role that reads them calls it when all its warps have."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self._reader_warp():
            base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, smem.tmem_address)
            cute.arch.dealloc_tmem(base, self.tmem.allocated)

    def open_rings(self, mbarriers: cute.Pointer) -> dict[str, tuple]:
        """The (producer, consumer) ends of every ring, ready for use by all threads."""
        ends, offset = {}, 0
        for name, ring in self.rings.items():
            address = cute.recast_ptr(mbarriers + offset, dtype=cutlass.Int64)
            pipeline = ring.open(address, self.tiles, self.roles, self.cluster)
            ends[name] = self.participants(name, pipeline)
            offset += ring.bytes
        layout = cute.make_layout(self.cluster)
        pipeline_init_arrive(cluster_shape_mn=layout, is_relaxed=True)
        pipeline_init_wait(cluster_shape_mn=layout)
        return ends

    def participants(self, name: str, pipeline: PipelineAsync) -> tuple:
        """The (producer, consumer) ends of the ring `name`, whose mbarriers are initialised."""
        return pipeline.make_participants()

    def ports(self, role: str, ends: dict[str, tuple]) -> SimpleNamespace:
        """The ends of the rings that `role` produces into or consumes from."""
        mine = {}
        for name, ring in self.rings.items():
            if ring.producer == role:
                mine[name] = ends[name][0]
            elif ring.consumer == role:
                mine[name] = ends[name][1]
        return SimpleNamespace(**mine)

    def load(
        self,
        name: str,
        source: tuple[cute.CopyAtom, cute.Tensor],
        smem: cute.Tensor,
        *,
        row: int | cutlass.Int32 | None = None,
        col: int | cutlass.Int32 | None = None,
        prefetch: bool = True,
    ) -> Callable:
        """A function copy(block, slot) that loads one tile by TMA into a ring's slot.

        Give the index that stays: `row` to walk along columns, `col` to walk along rows. Where the
        ring multicasts the tile, each CTA of the cluster copies its part into all of them.
        """
        atom, gmem = source
        if prefetch:
            cpasync.prefetch_descriptor(atom)
        axis = next(r.multicast.get(name) for r in self.rings.values() if name in r.tiles)
        parts, part, mask = self.parts(name), 0, None
        if parts > 1:
            here = cute.arch.block_in_cluster_idx()
            part = here["mn".index(axis)]
            mask = cpasync.create_tma_multicast_mask(
                cute.make_layout((1, *self.cluster, 1)),
                (0, here[0], here[1], 0),
                mcast_mode=1 + "mn".index(axis),
            )
        from_gmem, to_smem = self.tiles[name].blocks(atom, gmem, smem, part, parts)

        def copy(block: int | cutlass.Int32, slot: ImmutableResourceHandle) -> None:
            at = (None, row, block) if row is not None else (None, block, col)
            cute.copy(
                atom,
                from_gmem[at],
                to_smem[None, slot.index],
                tma_bar_ptr=slot.barrier,
                mcast_mask=mask,
            )

        return copy

    def store(
        self,
        tile: Tile,
        target: tuple[cute.CopyAtom, cute.Tensor],
        smem: cute.Tensor,
        block: tuple[int | cutlass.Int32, int | cutlass.Int32],
        wait: bool = True,
    ) -> None:
        """Store one tile by TMA, from one warp; returns when its shared memory may be reused.

        Without `wait` it returns at once, and `stored` waits.
        """
        atom, gmem = target
        to_gmem, from_smem = tile.blocks(atom, gmem, smem)
        cute.copy(atom, from_smem, to_gmem[(None, *block)])
        cute.arch.cp_async_bulk_commit_group()
        if wait:
            self.stored()

    def stored(self) -> None:
        """Wait, in the warp that stores, until all its stores have read shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def complete(self, product: str, running: int = 0) -> None:
        """Wait, in a warpgroup, until its WGMMAs are complete but for the last `running` groups.

        `product` says which one is waited for, in a word.
        """
        warpgroup.wait_group(running)

    @cute.jit
    def run_roles(self, io, smem, ends):
        """Send every warp to the method of its role, with the role's registers."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        granted = launch_registers(self.threads, self.residents)
        for name, first in first_warps(self.roles).items():
            role = self.roles[name]
            if warp >= first and warp < first + role.warps:
                if cutlass.const_expr(role.registers is not None):
                    if cutlass.const_expr(role.registers < granted):
                        cute.arch.setmaxregister_decrease(role.registers)
                    else:
                        cute.arch.setmaxregister_increase(role.registers)
                self.run_role(name, io, smem, self.ports(name, ends), thread - 32 * first)

    def run_role(
        self,
        name: str,
        io: object,
        smem: SimpleNamespace,
        ports: SimpleNamespace,
        thread: cutlass.Int32,
    ) -> None:
        """What the warps of a role do once they have its registers."""
        getattr(self, name)(io, smem, ports, thread)

    @cute.kernel
    def kernel(self, io):
        """Open the storage and the rings, then run the roles."""
        smem, mbarriers = self.open_storage()
        if cutlass.const_expr(bool(self.accumulators)):
            self.allocate_tmem(smem)
        ends = self.open_rings(mbarriers)
        self.run_roles(io, smem, ends)
