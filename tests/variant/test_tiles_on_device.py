"""Summaries and decisions by the device's code, run on this machine, against Python and torch."""

from __future__ import annotations

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from on_cpu import for_each, launchable

from cutedsl_fa3 import masks
from cutedsl_fa3.kernels.sm90 import summarise as one_warp
from cutedsl_fa3.variant import Variant, lower
from cutedsl_fa3.variant.bounds import PythonIntegers
from cutedsl_fa3.variant.keys import QueryTile
from cutedsl_fa3.variant.summaries import reader, summarise
from cutedsl_fa3.variant.tiles import Scan

SEQLENS, SIZES = (170, 140), (32, 12)
_generator = torch.Generator().manual_seed(3)


def _vector(low: int, high: int, *shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape or (170,), generator=_generator).to(dtype)


DOC = _vector(0, 6).sort().values
BEGINS = torch.searchsorted(DOC, torch.arange(7, dtype=torch.int32))
EXTREME = torch.where(_vector(0, 5) > 0, _vector(0, 9), _vector(-(2**31), 2**31))
LONGS = torch.tensor([2**40, -(2**40), 7, -7])
SHORTS = _vector(-99, 99, 3, 170, dtype=torch.int16)
BYTES = _vector(0, 256, 2, 170, dtype=torch.uint8)
GRID = _vector(-3, 4, 4, 6)
PAIRS = _vector(0, 3, 6, 6) > 1
FLAGS = torch.arange(170) % 50 < 30
FLOATS = torch.linspace(-1.0, 1.0, 170)
LENGTHS = torch.tensor([17, 400])


def packed(b, h, q, k):
    inside = q - BEGINS[DOC[q]] >= k - BEGINS[DOC[k]]
    return (DOC[q] == DOC[k]) & inside


SUMMARISED = {
    "documents": lambda b, h, q, k: (DOC[q] == DOC[k]) & (k <= q),
    "positions inside documents": packed,
    "32-bit ends": lambda b, h, q, k: EXTREME[q] + 3 > EXTREME[k] - q,
    "64-bit ends": lambda b, h, q, k: LONGS[q // 64] - 3 > LONGS[k // 50],
    "each head, each batch entry": lambda b, h, q, k: SHORTS[h, q] * 3 > BYTES[b, k] - 9,
    "conditions": lambda b, h, q, k: (FLAGS[k] & (k > 5)) | (FLOATS[q] * 2 > 0.5),
    "bits": lambda b, h, q, k: ((1 << DOC[q]) & (5 << DOC[k]) & ~(k & 3)) != 0,
    "a table of pairs": lambda b, h, q, k: GRID[DOC[q], EXTREME[k]] > 0,
    "a table of pairs, by conditions": lambda b, h, q, k: PAIRS[DOC[q], DOC[k]] & (k <= q),
    "quotients": lambda b, h, q, k: (
        torch.fmod(EXTREME[q], 7) <= torch.div(SHORTS[h, k], 9, rounding_mode="trunc")
    ),
}
OTHERS = {
    "everything": lambda b, h, q, k: k >= 0,
    "nothing": masks.none,
    "causal": masks.causal,
    "prefix and window": lambda b, h, q, k: (k < 20) | ((q - k < 30) & (k <= q)),
    "strided blocks": lambda b, h, q, k: ((k // 16) % 5 == 1) & (k < LENGTHS[b]),
    "a checkerboard": lambda b, h, q, k: (q // 32 + k // 36) % 2 == h % 2,
    "products": lambda b, h, q, k: (q * k < 900) | (abs(q - k) * 77777777 < 0),
}


@pytest.mark.parametrize("name", SUMMARISED)
def test_one_lane_that_does_all_finds_the_table_that_torch_finds(name):
    """The pass of kernels/sm90/summarise.py with warps of one thread, which exchange nothing."""
    variant = Variant(mask=SUMMARISED[name])
    wanted = summarise(variant.mask, variant.captures, 2, 3, *SEQLENS, *SIZES)
    table = torch.zeros_like(wanted)
    batches, heads, count, _ = table.shape

    def write(index, given, out):
        place = (index // (count * heads), index // count % heads, index % count)
        lengths = tuple(map(Int32, SEQLENS))
        found = one_warp.Summarise(variant.mask, *SIZES).extremes(given, lengths, place, Int32(0))
        for word, value in enumerate(value for ends in found for value in ends):
            out[0][(*place, word)] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_warp, "WARP", 1)
        patch.setattr(cute.arch, "warp_redux_sync", lambda value, kind: value)
        for_each(batches * heads * count, [*map(launchable, variant.captures)], [table], write)
    assert torch.equal(table, wanted)


@pytest.mark.parametrize("name", SUMMARISED | OTHERS)
def test_device_integers_decide_as_python_integers_do(name):
    variant = Variant(mask=(SUMMARISED | OTHERS)[name])
    mask, (tile_m, tile_n) = variant.mask, SIZES
    table = summarise(mask, variant.captures, 2, 3, *SEQLENS, *SIZES)
    tiles = [
        (q0, min(q0 + tile_m, SEQLENS[0]) - 1, b, h, *SEQLENS)
        for b in range(2)
        for h in range(3)
        for q0 in range(0, SEQLENS[0], tile_m)
    ]
    n_blocks = -(-SEQLENS[1] // tile_n)
    ends = torch.full((len(tiles), 2), -1, dtype=torch.int32)
    found = torch.full((len(tiles), n_blocks + 2, 2), -1, dtype=torch.int32)

    def write(i, given, out):
        tile = QueryTile(*(given[0][i, j] for j in range(6)))
        table = given[1] if name in SUMMARISED else None
        scan = lower.scan(mask, tile, tile.q0 // tile_m, tile_n, given[2:], table)
        out[0][i, 0], out[0][i, 1] = Int32(scan.first), Int32(scan.end)
        for n in range(n_blocks + 2):
            for j, condition in enumerate(scan.decide(Int32(n))):
                out[1][i, n, j] = Int32(lower.select(condition, 1, 0))

    given = [torch.tensor(tiles, dtype=torch.int32)]
    given.append(table if table is not None else torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    for_each(len(tiles), [*given, *map(launchable, variant.captures)], [ends, found], write)
    for row, tile in enumerate(tiles):
        ints, read = PythonIntegers(variant.captures), reader(mask, table, *tile[2:4])
        scan = Scan(mask, QueryTile(*tile), tile[0] // tile_m, tile_n, ints, read)
        assert ends[row].tolist() == [scan.first, scan.end], tile
        wanted = [list(scan.decide(n)) for n in range(n_blocks)]
        assert found[row, :n_blocks].bool().tolist() == wanted, tile
        assert not found[row, n_blocks:, 0].any(), "a tile behind the sequence is visited"
