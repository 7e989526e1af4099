"""What the ladder's kernels without roles share: one CTA's work, its argument, its last steps.

All warps of a CTA run one method, `attend`; a kernel of the ladder says how K and V come to shared
memory and what multiplies. What happens to an element in between is the project's own: Elements,
OnlineSoftmax, and rows that a hidden value has spoilt are computed again.

    tile    lies in shared memory
    q       once; o takes its place at the end
    k, v    `stages` slots each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cutedsl_fa3.layouts import Tile, mma_sync
from cutedsl_fa3.pipelines import Expect, Role, ScheduleError, WarpSpecialized
from cutedsl_fa3.pipelines.roles import WARPS_PER_GROUP, check_registers
from cutedsl_fa3.variant.bounds import Runs
from cutedsl_fa3.variant.describe import ever_full

from ..elements import Elements
from ..epilogue import Repairs
from ..exact import Again, lost_where, suspect
from ..operands import fake_args, heads_last, rows_first
from .order import IN_ORDER

if TYPE_CHECKING:
    from cutedsl_fa3.plans import Plan


@dataclass(frozen=True)
class Io:
    """What the kernel reads and writes.

    Shape: q, k, v, o (seqlen, head_dim, heads, batch); tma: the same with their TMA atoms, None
    where nothing is copied by TMA; lse (seqlen_q, heads, batch) fp32.
    Units: scale is natural (raw product -> score).
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    tma: tuple[tuple[cute.CopyAtom, cute.Tensor], ...] | None
    lse: cute.Tensor
    scale: Float32


@dataclass(frozen=True)
class Work:
    """One CTA's share: a tile of queries of one head, and the key tiles to visit."""

    m_block: Int32
    head: Int32
    batch: Int32
    kv_head: Int32
    elements: Elements
    runs: Runs


class Alike(Repairs, WarpSpecialized):
    """A forward whose warps all do the same, for plain variants: a mask found by runs of tiles.

    `schedule.consumers` warpgroups of four warps; they share the rows of a tile.
    """

    arch = "sm_90a"
    order = IN_ORDER

    def __init__(self, plan: Plan) -> None:
        s, problem = plan.schedule, plan.problem
        dtype, (d, dv) = problem.element, problem.tile_dims
        self.plan, self.schedule, self.dtype, self.head_dim_v = plan, s, dtype, dv
        self.tiles = {
            "q": Tile(s.tile_m, d, dtype),
            "k": Tile(s.tile_n, d, dtype),
            "v": Tile(s.tile_n, dv, dtype),
            "o": Tile(s.tile_m, dv, dtype),
        }
        self.aliases = {"o": "q"}
        self.rings = {}
        self.roles = {"all": Role(WARPS_PER_GROUP * s.consumers)}
        self.ever_full = ever_full(plan.variant.mask)
        self.repairs = plan.variant.mask is not None

    @property
    def key_text(self) -> str:
        """Everything that affects the code."""
        return f"{self.name}\n{self.plan.key_text}"

    def check(self) -> None:
        """Refuse what these kernels do not do; they show how the forward came to be.

        Raises: ScheduleError, LayoutError.
        """
        variant, problem = self.plan.variant, self.plan.problem
        if (problem.head_dim, problem.head_dim_v) != problem.tile_dims:
            raise ScheduleError(f"{problem}: the ladder takes head sizes that fill their tiles")
        if self.plan.by_tile or set(variant.graphs) - {"mask"} or variant.sink is not None:
            raise ScheduleError(
                "variant: the ladder takes plain attention and masks of positions, such as causal"
            )
        if self.schedule.pack != 1:
            raise ScheduleError(f"pack = {self.schedule.pack}: the ladder's tiles are of one head")
        if not self.tiles["q"].holds_rows_of(self.tiles["o"]):
            raise ScheduleError(f"head_dim_v = {self.head_dim_v}: O must fit in the place of Q")
        check_registers(self.roles)
        self.smem.check()

    @property
    def loops(self) -> int:
        """Where the code has both products: the loop over masked tiles, and that over full ones."""
        return 1 + int(self.ever_full)

    def exponentials(self, rows: int) -> Expect:
        """One a score and one a row to rescale, for each place; `rows` are those of a thread."""
        cols = self.schedule.tile_m * self.schedule.tile_n // (self.threads * rows)
        count = self.loops * rows * (cols + 1)
        return Expect("MUFU.EX2", "at least", count, "an exponential a score, and one a row")

    def sync_products(self) -> tuple[Expect, ...]:
        """What products by mma.sync promise: QK, PV, and ldmatrix of Q, K and V, once a place."""
        s, (d, dv) = self.schedule, self.plan.problem.tile_dims
        warps, places = self.roles["all"].warps, self.loops
        name, qk = mma_sync.instructions(s.tile_m, s.tile_n, d, warps)
        _, pv = mma_sync.instructions(s.tile_m, dv, s.tile_n, warps)
        loads = mma_sync.loads_of_a(s.tile_m, d, warps)
        loads += mma_sync.loads_of_b(s.tile_n, d) + mma_sync.loads_of_b(dv, s.tile_n)
        return (
            Expect(name, "exactly", places * (qk + pv), f"QK and PV, in {places} places"),
            Expect("LDSM.16", "exactly", places * loads, "Q, K and V, 4 matrices each"),
            Expect("HGMMA", "none", 0, "mma.sync multiplies"),
            self.exponentials(s.tile_m // (mma_sync.ROWS * warps) * mma_sync.ROWS_HELD),
        )

    def fake_args(self) -> tuple:
        """Stand-ins for the arguments of `host`: any lengths, heads, batch and strides."""
        return fake_args(self.plan, None)

    # Traced from here on.

    def atoms(self, q: object, k: object, v: object, o: object) -> tuple | None:
        """The TMA atoms of q, k, v and o; None where nothing is copied by TMA."""
        return None

    @cute.jit
    def host(self, q, k, v, o, lse, captures, table, visits, counter, ctas, scale, stream):
        """Launch a CTA for each tile of queries of each head."""
        q, k, v, o = (heads_last(t) for t in (q, k, v, o))
        io = Io(q, k, v, o, self.atoms(q, k, v, o), rows_first(lse), scale)
        m_blocks = cute.ceil_div(q.shape[0], self.schedule.tile_m)
        tiles = self.order.tiles(m_blocks, q.shape[2] * q.shape[3])
        self.launch(io, (tiles, 1, 1), stream)

    def run_roles(self, io: Io, smem: object, ends: dict) -> None:
        """All warps do the same."""
        thread, _, _ = cute.arch.thread_idx()
        self.attend(io, smem, ends, thread)

    def work(self, io: Io) -> Work:
        """This CTA's tile."""
        index, _, _ = cute.arch.block_idx()
        seqlen_q, _, heads, batches = io.q.shape
        seqlen_k, _, kv_heads, _ = io.k.shape
        m_blocks = cute.ceil_div(seqlen_q, self.schedule.tile_m)
        m_block, head_of_all = self.order.at(index, m_blocks, heads * batches, cutlass.min)
        batch = head_of_all // heads
        head = head_of_all - batch * heads
        lengths = (seqlen_q, seqlen_k)  # and no bits: there is no register to spare
        elements = Elements(self.plan.variant, (), io.scale, (batch, head), lengths, bits=False)
        runs = elements.runs(m_block, self.schedule.tile_m, self.schedule.tile_n)
        return Work(m_block, head, batch, head // (heads // kv_heads), elements, runs)

    def modify(self, w: Work, f: object, acc_s: cute.Tensor, n_block: Int32, masked: bool) -> None:
        """The mask of one tile, in place; acc_s (rows, cols) of this thread."""
        corner = (w.m_block * self.schedule.tile_m, n_block * self.schedule.tile_n)
        memos = w.elements.ahead(f.places, corner, masked)
        w.elements.apply(acc_s, f.places, corner, masked, memos)

    @cute.jit
    def finish(self, io, smem, w, f, softmax, thread):
        """O and LSE to global memory; no copy into shared memory is under way any more."""
        suspected = suspect(f.output) if self.repairs else False
        lse = softmax.finish(f.output)
        spoilt = lost_where(suspected, f.output, lse) if self.repairs else []
        cute.arch.sync_threads()  # all have read Q, whose place O takes
        f.write(smem.o, thread)
        if cutlass.const_expr(self.repairs):
            first = w.m_block * self.schedule.tile_m
            self.repair(io, w, f.places, smem.o, first, spoilt, lse, thread)
        self.store_o(io, smem, w, thread)
        lse_row = io.lse[None, w.head, w.batch]
        for r in cutlass.range_constexpr(len(lse)):
            row = w.m_block * self.schedule.tile_m + f.places.row + f.places.row_offsets[r]
            if thread % 4 == 0 and row < io.lse.shape[0]:
                lse_row[row] = lse[r]

    def again(self, io: Io, w: Work, row: Int32) -> Again:
        """What computes rows of this work tile again, from global memory."""
        q = io.q[None, None, w.head, w.batch]
        k, v = (t[None, None, w.kv_head, w.batch] for t in (io.k, io.v))
        problem = self.plan.problem
        return Again(w.elements, q, k, v, (problem.head_dim, problem.head_dim_v))
