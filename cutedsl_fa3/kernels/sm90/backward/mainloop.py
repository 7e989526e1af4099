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
from .schedule import EIGHTHS
from .sums import add, write
from .weights import Numbers, Weigher, changes_products

END = -1  # in place of a tile: there are no more


def before_the_wait(p16: cute.Tensor, eighths: int) -> None:
    """Keep the computation of so much of P in front of the next wait, as the forward's `finished`.

    The condition is one that P, rounded and packed by two, does not meet: its numbers have no sign.
    """
    words = cute.recast_tensor(p16, cutlass.Int32)
    together = words[0]
    for n in range(1, cute.size(words) * eighths // EIGHTHS):
        together = together | words[n]
    cute.arch.inline_ptx(
        "{ .reg .pred odd; .reg .b32 address; mov.b32 address, 0; "
        "setp.eq.u32 odd, {$r0}, 0x80008000; @odd st.volatile.shared.b32 [address], {$r0}; }",
        read_only_args=[together],
    )


class MainLoop:
    """What `BackwardSm90.consumer` does for each tile of queries.

    Mixed into a kernel that has `schedule`, `plan`, `barriers`, `elements` and what hands dQ on:
    `adders`, `strip`, `strip_of`, `first_strip`.
    """

    @cute.jit
    def along(self, io, smem, f, w, ports, thread):
        """All tiles of queries that the producer names; returns what `step` would take as `odd`."""
        ring, visits = ports.rows, ports.visits
        odd = cutlass.Int32(0)
        visits, word, head = take(visits, smem.visits)
        if cutlass.const_expr(self.plan.deterministic):
            while word != END:
                if word % 2 == 1:
                    ring, odd, visits, word, head = self.step(
                        io, smem, f, w, ring, visits, word, head, odd, thread, True
                    )
                else:
                    ring, odd, visits, word, head = self.step(
                        io, smem, f, w, ring, visits, word, head, odd, thread, False
                    )
        else:
            while word != END and word % 2 == 1:
                ring, odd, visits, word, head = self.step(
                    io, smem, f, w, ring, visits, word, head, odd, thread, True
                )
            if cutlass.const_expr(self.ever_full):
                while word != END:
                    ring, odd, visits, word, head = self.step(
                        io, smem, f, w, ring, visits, word, head, odd, thread, False
                    )
        return odd

    @cute.jit
    def step(self, io, smem, f, w, ring, visits, word, head, odd, thread,
             masked: cutlass.Constexpr):  # fmt: skip
        """One tile of queries; returns the rings' ends, the other of 0 and 1, and the next tile."""
        s = self.schedule
        place = odd if s.places > 1 else 0
        places = f.places(thread)
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        slot = ring.wait_and_advance()
        # Products leave shared memory little time for other reads, so LSE is read before they are
        # issued, and dS is stored before dV is, where a function of scores leaves the registers.
        roomy = s.spread or not changes_products(self.plan.variant)
        lse = self.numbers(smem.lse, slot, places) if roomy else None
        acc_s = f.multiply_scores(f.k, f.q, slot)
        acc_dp = f.multiply_scores(f.v, f.do, slot)
        weigher = self.weigher(io, head, w.batch)
        at = (places, (word // 2 * s.tile_m, w.n_block * s.tile_n))
        if cutlass.const_expr(s.places == 1):
            self.meet(group)
        warpgroup.wait_group(1)
        raw = self.kept(weigher, acc_s)
        if cutlass.const_expr(not roomy):
            lse = self.numbers(smem.lse, slot, places)
        weigher.weigh(acc_s, f.p16, *at, lse, masked)
        if cutlass.const_expr(s.sharing > 1):
            wgmma.to_smem(f.p16, smem.p[None, None, place], f.scores, thread)
        if cutlass.const_expr(s.spread):
            delta = self.numbers(smem.delta, slot, places)
        if cutlass.const_expr(roomy and s.early > 0 and not weigher.is_weight):
            before_the_wait(f.p16, s.early)
        warpgroup.wait_group(0)
        if cutlass.const_expr(not s.spread):
            delta = self.numbers(smem.delta, slot, places)
        again = self.once_more(smem, weigher, slot, places)
        weigher.differ(acc_s, acc_dp, *at, delta, masked, raw, again)
        if cutlass.const_expr(s.sharing == 1 and not roomy):
            f.multiply_dv(slot, place)
        rounded(acc_dp, f.ds16)
        f.store_ds(smem.ds, place, thread)
        if cutlass.const_expr(s.sharing == 1 and roomy):
            f.multiply_dv(slot, place)
        cute.arch.fence_view_async_shared()
        self.meet(group)
        acc_dq = f.multiply_dq(place)
        if cutlass.const_expr(s.sharing > 1):
            f.multiply_dv(slot, place)
        f.multiply_dk(slot, place)
        visits, following, head_after = take(visits, smem.visits)  # while products run
        warpgroup.wait_group(1 if s.sharing == 1 else 2)
        self.give(io, smem, w, acc_dq, word, head, odd, thread)
        warpgroup.wait_group(0)
        slot.release()
        odd = odd ^ int(s.places > 1 or self.adders > 1)
        return ring, odd, visits, following, head_after

    def numbers(self, rows: cute.Tensor, slot, places) -> Numbers:
        """LSE or delta of this thread's queries."""
        return Numbers(rows, slot.index, places, self.schedule.spread)

    def once_more(self, smem, weigher: Weigher, slot, places) -> Numbers | None:
        """The LSE anew, where gradients of captured tensors need the weights again."""
        if not weigher.keeps_products or weigher.is_weight:
            return None
        return self.numbers(smem.lse, slot, places)

    def give(self, io, smem, w, acc_dq, word, head, odd, thread) -> None:
        """Add this warpgroup's share of dQ to its sums, or hand it to the warp that adds."""
        s = self.schedule
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        if s.add == "direct":
            strip = self.first_strip(io, head, w.batch) + word // 2 * s.consumers + group
            add(acc_dq, io.sums[1], strip, thread % wgmma.WARPGROUP)
            return
        number = self.strip_of(odd, group)
        self.barriers["empty", number].arrive_and_wait()
        strip = cute.local_tile(smem.sums, (self.strip.rows, self.strip.cols), (group, 0))
        write(acc_dq, strip, thread % wgmma.WARPGROUP)
        cute.arch.fence_view_async_shared()
        self.barriers["full", number].arrive_unaligned()

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
