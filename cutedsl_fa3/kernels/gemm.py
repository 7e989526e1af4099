"""C = A @ B^T: what the architectures share, which is all but the product.

A is (m, k), B is (n, k), C is (m, n), all with contiguous rows; ragged edges are filled with zeros
by the loads and clipped by the store. A CTA computes one tile of C. Subclasses add the ring that
carries "a" and "b", the roles, and the methods that multiply and store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import Tile
from cutedsl_fa3.pipelines import Expect, Schedule, WarpSpecialized


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes: a TMA atom and a coordinate tensor per matrix."""

    a: tuple[cute.CopyAtom, cute.Tensor]
    b: tuple[cute.CopyAtom, cute.Tensor]
    c: tuple[cute.CopyAtom, cute.Tensor]


class Gemm(WarpSpecialized):
    """The tiles, arguments and producer of a GEMM; A and B travel in a ring called "ab"."""

    tile_k = 64
    multicast: ClassVar = {"a": "n", "b": "m"}  # CTAs of one row of tiles share A, of one column B

    def __init__(self, schedule: Schedule, dtype: type = cutlass.BFloat16) -> None:
        m, n = schedule.tile_m, schedule.tile_n
        self.schedule, self.dtype, self.cluster = schedule, dtype, schedule.cluster
        self.tiles = {
            "a": Tile(m, self.tile_k, dtype),
            "b": Tile(n, self.tile_k, dtype),
            "c": Tile(m, n, dtype),
        }
        if self.tiles["c"].bytes <= self.tiles["b"].bytes * schedule.stages:
            self.aliases = {"c": "b"}  # B is dead once everything is multiplied

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return f"{self.name} {self.dtype.__name__} {self.schedule!r}"

    def expected(self) -> tuple[Expect, ...]:
        """What the tables promise about the machine code: the loads are one loop."""
        return self.common_expectations({"a": 1, "b": 1}, {"c": self.tiles["c"]})

    def fake_args(self) -> tuple:
        """(a, b, c, stream) of any size with rows of 16-byte multiples."""

        def matrix(rows: cute.SymInt, cols: cute.SymInt) -> cute.Tensor:
            stride = cute.sym_int64(divisibility=16 // (self.dtype.width // 8))
            return make_fake_tensor(self.dtype, (rows, cols), (stride, 1), assumed_align=16)

        m, n, k = (cute.sym_int() for _ in range(3))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return matrix(m, k), matrix(n, k), matrix(m, n), stream

    @cute.jit
    def host(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        m, n = self.cluster
        io = Io(
            tuple(self.tiles["a"].load_atom(a, multicast=n)),
            tuple(self.tiles["b"].load_atom(b, multicast=m)),
            tuple(self.tiles["c"].store_atom(c)),
        )
        tiles = cute.ceil_div(c.shape, (self.schedule.tile_m, self.schedule.tile_n))
        grid = cute.round_up(tiles, self.cluster)
        self.launch(io, (*grid, 1), stream)

    def k_tiles(self, io: Io) -> cutlass.Int32:
        """Tiles along k."""
        return cute.ceil_div(io.a[1].shape[1], self.tile_k)

    @cute.jit
    def producer(self, io, smem, ports, thread):
        m_block, n_block, _ = cute.arch.block_idx()
        load_a = self.load("a", io.a, smem.a, row=m_block)
        load_b = self.load("b", io.b, smem.b, row=n_block)
        ring = ports.ab
        if thread < 32:
            for k in cutlass.range(self.k_tiles(io), unroll=1):
                slot = ring.acquire_and_advance()
                load_a(k, slot)  # no commit: the copies' bytes fill the slot
                load_b(k, slot)
            ring.tail()
