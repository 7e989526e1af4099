"""The consumers' step for one tile of queries.

S^T = K Q^T    dP^T = V dO^T         both issued at once
P = 2^(S - LSE)                      while dP runs
dS = P * (dP - delta)
dV += P^T dO                         from registers
dS -> shared memory, all warpgroups meet
dQ = dS K                            each warpgroup its share of the tile
dK += dS^T Q                         from registers; meanwhile dQ goes to the warp that adds it

Warpgroups that share keys weigh a share of the queries each and need all of P: it goes to shared
memory beside dS, and dV comes between dQ and dK.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cutedsl_fa3.layouts import wgmma
from cutedsl_fa3.pipelines import take

from .operands import AT_ONCE, FEW, rounded
from .sums import add, write
from .weights import Weigher, rounded_before

END = -1  # in place of a tile: there are no more


def again(number: cutlass.Int32) -> cutlass.Int32:
    """The same number, of which the compiler does not know that.

    What follows from it is then computed in each step, in a few instructions, instead of being kept
    in registers that the products need.
    """
    move = "mov.b32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(move, write_only_types=[cutlass.Int32], read_only_args=[number])


class MainLoop:
    """What `BackwardSm90.consumer` does for each tile of queries.

    Mixed into a kernel that has `schedule`, `barriers`, `sums` and `elements`.
    """

    @cute.jit
    def along(self, io, smem, f, w, ports, thread):
        """All tiles of queries that the producer names."""
        ring, visits = ports.rows, ports.visits
        place = cutlass.Int32(0)
        visits, word, head = take(visits, smem.visits)
        if cutlass.const_expr(self.plan.deterministic):
            while word != END:
                at = (word, head, place, thread)
                if word % 2 == 1:
                    ring, place = self.step(io, smem, f, w, ring, *at, True)
                else:
                    ring, place = self.step(io, smem, f, w, ring, *at, False)
                visits, word, head = take(visits, smem.visits)
        else:
            while word != END and word % 2 == 1:
                ring, place = self.step(io, smem, f, w, ring, word, head, place, thread, True)
                visits, word, head = take(visits, smem.visits)
            if cutlass.const_expr(self.ever_full):
                while word != END:
                    ring, place = self.step(io, smem, f, w, ring, word, head, place, thread, False)
                    visits, word, head = take(visits, smem.visits)

    @cute.jit
    def step(self, io, smem, f, w, ring, word, head, place, thread,
             masked: cutlass.Constexpr):  # fmt: skip
        """One tile of queries; returns the ring's end and the next place of dS."""
        s = self.schedule
        m_block = word // 2
        thread = again(thread)
        places = f.places(thread)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        slot = ring.wait_and_advance()
        products = []
        for part in cutlass.range_constexpr(s.parts):
            acc_s = f.multiply_scores(f.k, f.q[part], slot)
            acc_dp = f.multiply_scores(f.v, f.do[part], slot)
            products.append((acc_s, acc_dp))
        weigher = self.weigher(io, head, w.batch)
        corner = (m_block * s.tile_m, w.n_block * s.tile_n)
        if cutlass.const_expr(s.places == 1):
            self.meet(group)
        for part in cutlass.range_constexpr(s.parts):
            acc_s, acc_dp = products[part]
            # Products of later parts, and dV of earlier ones.
            later = 2 * (s.parts - 1 - part) + (part if s.sharing == 1 else 0)
            warpgroup.wait_group(later + 1)
            at = (places[part], corner)
            raw = self.kept(weigher, acc_s)
            weigher.weigh(acc_s, f.p16[part], *at, smem.lse, slot.index, masked)
            if cutlass.const_expr(s.sharing > 1):
                p = f.of_part(smem.p, part)[None, None, place]
                wgmma.to_smem(f.p16[part], p, f.scores, thread)
            if cutlass.const_expr(s.early and not weigher.is_weight):
                rounded_before(f.p16[part])
            warpgroup.wait_group(later)
            weigher.differ(acc_s, acc_dp, *at, smem.delta, slot.index, masked, raw, smem.lse)
            if cutlass.const_expr(s.sharing == 1):
                f.multiply_dv(slot, part, place)
            rounded(acc_dp, f.ds16[part])
            ds = f.of_part(smem.ds, part)[None, None, place]
            wgmma.to_smem(f.ds16[part], ds, f.scores, thread)
        cute.arch.fence_view_async_shared()
        self.meet(group)
        acc_dq = f.multiply_dq(place)
        if cutlass.const_expr(s.sharing > 1):
            for part in cutlass.range_constexpr(s.parts):
                f.multiply_dv(slot, part, place)
        for part in cutlass.range_constexpr(s.parts):
            f.multiply_dk(slot, part, place)
        warpgroup.wait_group(s.parts if s.sharing == 1 else 2 * s.parts)
        self.give(io, smem, w, acc_dq, word, head, thread)
        warpgroup.wait_group(0)
        slot.release()
        return ring, place ^ (s.places - 1)

    def give(self, io, smem, w, acc_dq, word, head, thread) -> None:
        """Add this warpgroup's share of dQ to its sums, or hand it to the warp that adds."""
        s = self.schedule
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        if s.add == "direct":
            strip = self.first_strip(io, head, w.batch) + word // 2 * s.consumers + group
            add(acc_dq, io.sums[1], strip, thread % wgmma.WARPGROUP)
            return
        self.barriers["empty", group].arrive_and_wait()
        strip = cute.local_tile(smem.sums, (self.strip.rows, self.strip.cols), (group, 0))
        write(acc_dq, strip, thread % wgmma.WARPGROUP)
        cute.arch.fence_view_async_shared()
        self.barriers["full", group].arrive_unaligned()

    def meet(self, group: cutlass.Int32) -> None:
        """Wait until all warpgroups have come here; this one is `group`."""
        self.barriers["ds"].arrive_and_wait()

    def weigher(self, io, head, batch) -> Weigher:
        """The variant's functions at one head of queries, and where captured tensors' parts go."""
        sums = dict(zip(self.plan.wanted, io.captured or (), strict=True))
        elements = self.elements(io, head, batch)
        at_once = AT_ONCE if self.schedule.sharing == 1 else FEW
        return Weigher(elements, self.plan.variant, sums, at_once)

    def kept(self, weigher: Weigher, acc: cute.Tensor) -> cute.Tensor | None:
        """A copy of the products, where gradients of captured tensors read them again."""
        if not weigher.keeps_products:
            return None
        copy = cute.make_rmem_tensor(acc.layout, acc.element_type)
        copy.store(acc.load())
        return copy
