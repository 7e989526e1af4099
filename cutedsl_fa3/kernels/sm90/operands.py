"""What the forward's roles work on: arguments, one head's tensors, a thread's fragments."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cutedsl_fa3.layouts import transposed, wgmma
from cutedsl_fa3.pipelines import Schedule


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes.

    Shape: q, k, v, o as (seqlen, head_dim, heads, batch) with their TMA atoms; lse (seqlen_q,
    heads, batch) fp32; captures in the variant's order.
    Units: scale is natural (raw product -> score).
    """

    q: tuple[cute.CopyAtom, cute.Tensor]
    k: tuple[cute.CopyAtom, cute.Tensor]
    v: tuple[cute.CopyAtom, cute.Tensor]
    o: tuple[cute.CopyAtom, cute.Tensor]
    lse: cute.Tensor
    captures: tuple[cute.Tensor, ...]
    scale: Float32


def fake_args(
    dtype: type, head_dim: int, head_dim_v: int, captures: tuple[cute.Tensor, ...] | None
) -> tuple:
    """(q, k, v, o, lse, captures, scale, stream) of any lengths, heads, batch and strides."""
    aligned = 16 // (dtype.width // 8)
    batch, heads, kv_heads, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))

    def tensor(seqlen: cute.SymInt, heads: cute.SymInt, dim: int) -> cute.Tensor:
        strides = (*(cute.sym_int64(divisibility=aligned) for _ in range(3)), 1)
        return make_fake_tensor(dtype, (batch, seqlen, heads, dim), strides, assumed_align=16)

    lse_strides = tuple(cute.sym_int64() for _ in range(3))
    return (
        tensor(seqlen_q, heads, head_dim),
        tensor(seqlen_k, kv_heads, head_dim),
        tensor(seqlen_k, kv_heads, head_dim_v),
        tensor(seqlen_q, heads, head_dim_v),
        make_fake_tensor(Float32, (batch, heads, seqlen_q), lse_strides, assumed_align=4),
        captures,
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def heads_last(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch): a tile is modes 0 and 1."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def head_of(source: tuple, head: Int32, batch: Int32) -> tuple:
    """The (atom, coordinates) of one head."""
    atom, gmem = source
    return atom, gmem[None, None, head, batch]


class Fragments:
    """One consumer thread's operands and accumulators, with the two products on them.

    `output` is acc_o as (rows, cols) of this thread; `places` says where its scores lie in the
    tile. CuTe calls these tSrQ, tSrK, tOrP, tOrV.
    """

    def __init__(
        self, schedule: Schedule, dtype: type, dv: int, smem: SimpleNamespace, thread: Int32
    ) -> None:
        s = schedule
        self.qk = wgmma.tiled_mma(dtype, s.tile_n, s.consumers)
        self.pv = wgmma.tiled_mma(dtype, dv, s.consumers, a_from="registers", b_major="n")
        self.pv_strip = wgmma.tiled_mma(dtype, dv, 1, a_from="registers", b_major="n")
        qk, pv = self.qk.get_slice(thread), self.pv.get_slice(thread)
        self.q = self.qk.make_fragment_A(qk.partition_A(smem.q))
        self.k = self.qk.make_fragment_B(qk.partition_B(smem.k))
        self.v = self.pv.make_fragment_B(pv.partition_B(transposed(smem.v)))
        self.tile_m, self.tile_n = s.tile_m, s.tile_n
        self.acc_o = wgmma.accumulator(self.pv, s.tile_m, dv)
        self.acc_o.fill(0.0)
        self.p = cute.make_rmem_tensor(self.qk.partition_shape_C((s.tile_m, s.tile_n)), dtype)
        self.output = wgmma.as_rows_cols(self.acc_o)
        self.places = wgmma.places(self.qk, s.tile_m, s.tile_n, thread)

    def multiply_qk(self, slot) -> cute.Tensor:
        """Issue S = Q K^T into a fresh acc_s, so that no registers are held for it in between."""
        warpgroup.fence()
        q, k = self.q[None, None, None, 0], self.k[None, None, None, slot.index]
        acc_s = wgmma.accumulator(self.qk, self.tile_m, self.tile_n)
        wgmma.issue(self.qk, acc_s, q, k, accumulate=False)
        return acc_s

    def multiply_pv(self, slot) -> None:
        """Issue O += P V."""
        warpgroup.fence()
        p, v = wgmma.as_operand(self.p), self.v[None, None, None, slot.index]
        wgmma.issue(self.pv, self.acc_o, p, v, accumulate=True)

    def round_p(self, acc_s: cute.Tensor) -> None:
        """P in the input dtype, as the second product reads it."""
        self.p.store(acc_s.load().to(self.p.element_type))
