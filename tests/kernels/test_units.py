"""Scores in units of the raw product, run on the CPU, weigh keys as the graphs say."""

from __future__ import annotations

import math

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from on_cpu import for_each, launchable

from cutedsl_fa3 import Variant, masks, scores
from cutedsl_fa3.inputs import SMALLEST_SCALE
from cutedsl_fa3.kernels.sm90.elements import Elements
from cutedsl_fa3.kernels.sm90.units import Units
from cutedsl_fa3.layouts.wgmma import Places
from cutedsl_fa3.plans import Plan
from cutedsl_fa3.problem import Problem
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.fusion import with_known_signs
from cutedsl_fa3.variant.lower import select

ROWS, COLS = (0, 8), tuple(range(16))  # of one thread, which has whole rows here
FULL, MASKED, TILES = 3, 1, 4  # tiles of a row: the last one is masked
KEYS, THREADS, HEADS = TILES * len(COLS), 8, 3
SHAPE = THREADS, len(ROWS), KEYS


class Row:
    """Rows of queries from `first` on, of one head, that attend to KEYS keys from `begin` on."""

    def __init__(self, score, slopes, scale=0.125, head=1, first=48, begin=0, **more):
        self.variant = Variant(score(slopes), masks.causal)
        self.plan = Plan.default(self.variant, Problem("bf16", 64, 64))
        self.scale, self.head, self.first, self.begin = scale, head, first, begin
        self.lazy = more.get("lazy", False)
        self.lengths = first + 16, begin + KEYS
        assert self.plan.linear is not None

    def positions(self) -> dict:
        queries = self.first + torch.arange(THREADS)[:, None, None] + torch.tensor(ROWS)[:, None]
        return {
            "b": 0, "h": self.head, "q": queries, "k": self.begin + torch.arange(KEYS),
            "seqlen_q": self.lengths[0], "seqlen_k": self.lengths[1],
        }  # fmt: skip

    def exact(self, raw: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE in fp64; full tiles are seen whole, so that rows need not be causal."""
        at = {**self.positions(), "score": raw.double() * self.scale}
        graph = with_known_signs(self.variant.score, self.variant.mask)
        score = evaluate(graph, at, self.variant.captures, dtype=torch.float64)
        seen = evaluate(self.variant.mask, at, self.variant.captures).expand(SHAPE).clone()
        seen[..., : FULL * len(COLS)] = True
        score = score.expand(SHAPE).masked_fill(~seen, -math.inf)
        lse = score.logsumexp(-1)
        weights = torch.where(lse[..., None] == -math.inf, 0.0, (score - lse[..., None]).exp())
        return (weights * v).sum(-1), lse

    def found(self, raw: torch.Tensor, v: torch.Tensor, fits: bool):
        """As `exact`, by the kernel's code; `fits` says which way full tiles go."""
        out, lse, said = torch.zeros(SHAPE[:2]), torch.zeros(SHAPE[:2]), torch.zeros(THREADS)

        def write(i, given, results):
            *captures, products, values = given
            elements = self.elements(i, captures)
            softmax = elements.softmax(len(ROWS), self.lazy)
            acc_o = cute.make_rmem_tensor((len(ROWS), 2), Float32)
            acc_o.fill(0.0)
            mine, zero = Places(i, i * 0, ROWS, COLS), i * 0
            for tile in range(TILES):
                acc_s = cute.make_rmem_tensor((len(ROWS), len(COLS)), Float32)
                for r in range(len(ROWS)):
                    for c in range(len(COLS)):
                        acc_s[r, c] = products[i, r, tile * len(COLS) + c]
                corner = zero + self.first, zero + self.begin + tile * len(COLS)
                masked, bases = tile >= FULL, None
                if fits and not masked:
                    bases = elements.grown(acc_s, mine, corner)
                else:
                    memos = elements.ahead(mine, corner, masked)
                    elements.apply(acc_s, mine, corner, masked, memos)
                softmax.step(acc_s, 0, bases)
                for r in range(len(ROWS)):
                    total = acc_o[r, 0] * softmax.alpha[r]
                    for c in range(len(COLS)):
                        total = total + acc_s[r, c] * values[tile * len(COLS) + c]
                    acc_o[r, 0] = total
            for r in range(len(ROWS)):
                total = softmax.row_sum[r]
                inverse = select(total == 0.0, Float32(0.0), 1.0 / total)
                origin = softmax.row_max[r] * softmax.scale
                results[0][i, r] = acc_o[r, 0] * inverse
                results[1][i, r] = origin + cute.math.log(total)
            results[2][i] = select(elements.units.fits, Float32(1.0), Float32(0.0))

        given = [*map(launchable, self.variant.captures), raw, v]
        for_each(THREADS, given, [out, lse, said], write)
        assert said.bool().tolist() == [fits] * THREADS
        return out, lse

    def elements(self, i, captures) -> Elements:
        zero = i * 0
        seqlen_q, seqlen_k = (zero + length for length in self.lengths)
        uniform = {"b": zero, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        head, scale = zero + self.head, Float32(self.scale)
        units = Units(self.plan.linear, tuple(captures), scale, uniform, head)
        place, lengths = (zero, head), (seqlen_q, seqlen_k)
        return Elements(self.variant, tuple(captures), scale, place, lengths, units=units)

    def hold(self, raw: torch.Tensor, fits: bool = True, within: float = 2e-5) -> None:
        v = torch.randn(KEYS)
        (out, lse), (wanted, wanted_lse) = self.found(raw, v, fits), self.exact(raw, v)
        torch.testing.assert_close(out.double(), wanted, rtol=within, atol=within, equal_nan=True)
        known = wanted_lse.isfinite() | (wanted_lse == -math.inf)
        torch.testing.assert_close(lse[known].double(), wanted_lse[known], rtol=within, atol=within)
        assert not lse[~known].isfinite().any()


def distant(slopes):
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


def along(slopes):
    return lambda s, b, h, q, k: s + slopes[h] * k


def beside(slopes):
    return lambda s, b, h, q, k: s - slopes[h]


SCORES = {"alibi": scores.alibi, "distant": distant, "along": along, "beside": beside}
SLOPES = torch.tensor([9.0, 0.3, -0.7])


@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
@pytest.mark.parametrize("head", [1, 2])
@pytest.mark.parametrize("name", SCORES)
def test_rows_of_full_and_masked_tiles_are_what_the_score_says(name, head, lazy):
    row = Row(SCORES[name], SLOPES, head=head, lazy=lazy)
    row.hold(torch.randn(SHAPE) * 40)


@pytest.mark.parametrize("first", [48, 4000, 1_000_000])
@pytest.mark.parametrize("name", ["distant", "alibi"])
def test_keys_far_before_the_query_weigh_as_they_do_beside_it(name, first):
    """Scores are thousands below 0, all of them; rounded to what fp32 has there."""
    row = Row(SCORES[name], torch.tensor([0.0, 0.5, 0.0]), first=first)
    farthest = 0.5 * first
    row.hold(torch.randn(SHAPE) * 40, within=max(2e-5, 4 * farthest * 2.0**-23))


@pytest.mark.parametrize("base", [128.0, 100.0, -128.0, -33.3])
@pytest.mark.parametrize("lazy", [False, True], ids=["", "lazy"])
def test_products_so_far_that_a_base_is_lost_in_them_weigh_by_the_largest(base, lazy):
    """Sums with the base are rounded to 256 there: what is largest takes weight, no more than 1."""
    row = Row(beside, torch.full((HEADS,), -base / 8), lazy=lazy)
    raw = torch.full(SHAPE, 2.0**31)
    raw[..., 5::7] -= 2.0**12
    raw[:, 1, len(COLS) + 3] += 256.0  # the only one, in a tile behind the first
    out, lse = row.found(raw, torch.ones(KEYS), True)
    assert out.isfinite().all() and lse.isfinite().all()
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("scale", [0.0, 1e-12, 0.3, 1.0, 1.5, 100.0])
def test_every_scale_that_a_call_may_have_is_right(scale):
    """0 stands for the smallest one; what does not fit takes natural units."""
    scale = max(scale, SMALLEST_SCALE)
    fits = 2.0**-64 <= scale <= 1.0
    row = Row(distant, SLOPES, scale=scale)
    row.hold(torch.randn(SHAPE) * 8, fits)


@pytest.mark.parametrize("slope", [math.nan, math.inf, -math.inf, 1e30, -1e36, 3e6], ids=str)
def test_slopes_beyond_all_use_take_natural_units(slope):
    """And every other head of the sequence its own."""
    slopes = torch.tensor([0.3, slope, 0.3])
    raw = torch.randn(SHAPE) * 40
    Row(distant, slopes, head=0).hold(raw)
    row, v = Row(distant, slopes), torch.randn(KEYS)
    (out, _), (wanted, _) = row.found(raw, v, fits=False), row.exact(raw, v)
    if math.isfinite(slope):
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    else:
        assert out.isnan().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_products_that_are_not_finite_are_what_they_are_elsewhere(value):
    raw = torch.randn(SHAPE) * 40
    raw[:, 0, 5] = value
    raw[0, 0, :] = value
    Row(distant, SLOPES).hold(raw)


def test_rows_that_have_seen_nothing_take_what_comes():
    """The first tile hides all; then a key far below the lowest base, then all the others."""
    raw = torch.randn(SHAPE) * 40
    raw[..., :16] = -math.inf
    raw[:, 0, :40] = -math.inf
    Row(along, torch.tensor([0.0, -50.0, 0.0])).hold(raw)


@pytest.mark.parametrize("pack", [2, 8, 64])
def test_every_head_of_a_pack_is_asked_by_some_lane(pack, monkeypatch):
    """So that all warps of a tile take the same way, whatever the heads of their rows are."""
    slopes = torch.full((2 * pack,), 0.5)
    row = Row(distant, slopes)
    odd = torch.arange(pack, 2 * pack)
    fits = torch.zeros(len(odd), 32)
    given = slopes.repeat(len(odd), 1)
    given[torch.arange(len(odd)), odd] = math.inf

    def write(i, captures, results):
        zero = i * 0
        lanes, (each,) = results[0], captures
        for lane in range(32):
            monkeypatch.setattr(cute.arch, "lane_idx", lambda lane=lane: zero + lane)
            uniform = {"b": zero, "seqlen_q": zero + 16, "seqlen_k": zero + KEYS}
            units = Units(
                row.plan.linear, (each[i, None],), Float32(0.125), uniform, zero + 1, pack
            )
            lanes[i, lane] = select(units.fits, Float32(1.0), Float32(0.0))

    for_each(len(odd), [given], [fits], write)
    assert (fits == 0.0).any(1).all()
    assert ((fits == 0.0).sum(1) == 32 // min(pack, 32)).all()
