"""The consumers' step for one tile of queries.

S^T = K Q^T    dP^T = V dO^T         both issued at once
P = 2^(S - LSE)                      while dP runs
dS = P * (dP - delta)                to shared memory
dV += P^T dO                         from registers; all warpgroups meet
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
from .weights import Weigher, changes_products, numbers

END = -1  # in place of a tile: there are no more
MAX_THREADS = 512


def again(number: cutlass.Int32) -> cutlass.Int32:
    """The same number, of which the compiler does not know that.

    What follows from it is then computed in each step, in a few instructions, instead of being kept
    in registers that the products need.
    """
    move = "mov.b32 {$w0}, {$r0};"
    same = cute.arch.inline_ptx(move, write_only_types=[cutlass.Int32], read_only_args=[number])
    return same & (MAX_THREADS - 1)  # so that it knows at least that this is not negative


class MainLoop:
    """What `BackwardSm90.consumer` does for each tile of queries.

    Mixed into a kernel that has `schedule`, `barriers`, `sums` and `elements`, and the steps of
    `Ahead`.
    """

    @cute.jit
    def along(self, io, smem, f, w, ports, thread):
        """All tiles of queries that the producer names."""
        ring, visits = ports.rows, ports.visits
        place = cutlass.Int32(0)
        visits, word, head = take(visits, smem.visits)
        step = self.step_ahead if self.schedule.ahead else self.step
        if cutlass.const_expr(self.schedule.ahead):
            self.begin(f, ring, word)
        if cutlass.const_expr(self.plan.deterministic):
            while word != END:
                if word % 2 == 1:
                    ring, place, visits, word, head = step(
                        io, smem, f, w, ring, visits, word, head, place, thread, True
                    )
                else:
                    ring, place, visits, word, head = step(
                        io, smem, f, w, ring, visits, word, head, place, thread, False
                    )
        else:
            while word != END and word % 2 == 1:
                ring, place, visits, word, head = step(
                    io, smem, f, w, ring, visits, word, head, place, thread, True
                )
            if cutlass.const_expr(self.ever_full):
                while word != END:
                    ring, place, visits, word, head = step(
                        io, smem, f, w, ring, visits, word, head, place, thread, False
                    )

    @cute.jit
    def step(self, io, smem, f, w, ring, visits, word, head, place, thread,
             masked: cutlass.Constexpr):  # fmt: skip
        """One tile of queries; returns the rings' ends, the next place of dS and the next tile."""
        s = self.schedule
        m_block = word // 2
        thread = again(thread)
        places = f.places(thread)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        slot = ring.wait_and_advance()
        # Products leave shared memory little time for other reads, so LSE is read before they are
        # issued, and dS is stored before dV is, where no function of scores takes the registers.
        roomy = not changes_products(self.plan.variant)
        lse = numbers(smem.lse, slot.index, places[0]) if roomy else None
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
            if cutlass.const_expr(not roomy):
                lse = numbers(smem.lse, slot.index, places[part])
            weigher.weigh(acc_s, f.p16[part], *at, lse, masked)
            if cutlass.const_expr(s.sharing > 1):
                p = f.of_part(smem.p, part)[None, None, place]
                wgmma.to_smem(f.p16[part], p, f.scores, thread)
            if cutlass.const_expr(roomy and part + 1 < s.parts):
                lse = numbers(smem.lse, slot.index, places[part + 1])
            warpgroup.wait_group(later)
            delta = numbers(smem.delta, slot.index, places[part])
            of_part = self.once_more(smem, weigher, slot, places[part])
            weigher.differ(acc_s, acc_dp, *at, delta, masked, raw, of_part)
            if cutlass.const_expr(s.sharing == 1 and not roomy):
                f.multiply_dv(slot, part, place)
            rounded(acc_dp, f.ds16[part])
            f.store_ds(smem.ds, part, place, thread)
            if cutlass.const_expr(s.sharing == 1 and roomy):
                f.multiply_dv(slot, part, place)
        cute.arch.fence_view_async_shared()
        self.meet(group)
        acc_dq = f.multiply_dq(place)
        if cutlass.const_expr(s.sharing > 1):
            for part in cutlass.range_constexpr(s.parts):
                f.multiply_dv(slot, part, place)
        for part in cutlass.range_constexpr(s.parts):
            f.multiply_dk(slot, part, place)
        visits, following, head_after = take(visits, smem.visits)  # while products run
        warpgroup.wait_group(s.parts if s.sharing == 1 else 2 * s.parts)
        self.give(io, smem, w, acc_dq, word, head, thread)
        warpgroup.wait_group(0)
        slot.release()
        return ring, place ^ (s.places - 1), visits, following, head_after

    def once_more(self, smem, weigher: Weigher, slot, places) -> list | None:
        """The LSE anew, where gradients of captured tensors need the weights again."""
        if not weigher.keeps_products or weigher.is_weight:
            return None
        return numbers(smem.lse, slot.index, places)

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
