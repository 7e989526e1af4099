"""Cases on the GPU at hand: `python smem_runs.py FILE UNIT` keeps what one unit's kernels showed.

The same functions say what the cases are to the tests that read the files, so that a kernel that
hangs or faults takes a process of its own with it and no test. Each case has a launch of its own,
and a fault is told with its case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import copy_cases
import cutlass
import torch
from copy_cases import POISON, SMEM_BYTES, Case
from smem_dump import RawStore, TileLoad

from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.layouts import TensorMap, Tile, copy_engine
from cutedsl_fa3.tma_probe import (
    PRODUCT_TILE,
    SEEN,
    Product,
    RawLoad,
    corners,
    descriptors,
)

# Features by group of loads, and the ranks in which each is tried.
LOADS = {
    "plain": ((), (1, 2, 3, 4, 5)),
    "narrow": (("narrow",), (2, 3)),
    "shifted": (("shifted",), (2, 3)),
    "steps": (("steps",), (2, 3, 4)),
    "expanded": (("expanded",), (2, 4)),
    "nan": (("nan",), (1, 2, 4)),
}
STORES = {"inward": (("inward",), (1, 2, 3, 4)), "narrow": (("inward", "narrow"), (2,))}
COUNT = 72  # cases of a group and rank: three of each swizzle and type
BEYOND = (0, 1)  # bytes announced beyond those that come


def cases(groups: dict, group: str, rank: int) -> list[Case]:
    """The cases of a group of LOADS or STORES."""
    features, _ = groups[group]
    return copy_cases.cases(90, COUNT, rank, *features)


def stored_smem(rank: int) -> torch.Tensor:
    """What the cases of a rank store: bytes by case."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (COUNT, SMEM_BYTES), dtype=torch.uint8, generator=generator)


class Arena:
    """The memory of many cases in one allocation, each at an address that is a multiple of 16."""

    def __init__(self, memories: Sequence[bytes]) -> None:
        self.starts, self.ends, end = [], [], 0
        for i, memory in enumerate(memories):
            self.starts.append(-(-end // 128) * 128 + 16 * (i % 8))
            end = self.starts[-1] + len(memory)
            self.ends.append(end)
        host = torch.full((end + 128,), POISON, dtype=torch.uint8)
        for start, memory in zip(self.starts, memories, strict=True):
            host[start : start + len(memory)] = torch.frombuffer(
                bytearray(memory), dtype=torch.uint8
            )
        self.device = host.cuda()

    def address(self, i: int) -> int:
        return self.device.data_ptr() + self.starts[i]

    def contents(self) -> list[torch.Tensor]:
        host = self.device.cpu()
        return [host[a:b].clone() for a, b in zip(self.starts, self.ends, strict=True)]


def run_loads(chosen: list[Case], kernel: object, beyond: int) -> dict:
    """Shared memory and mbarriers of each case."""
    smem = torch.zeros(len(chosen), SMEM_BYTES // 4, dtype=torch.int32, device="cuda")
    seen = torch.zeros(len(chosen), SEEN, dtype=torch.int64, device="cuda")
    arena = Arena([case.memory for case in chosen])
    for i, case in enumerate(chosen):
        said = [[case.tmap.bytes_per_box, case.at, beyond, 0]]
        row = torch.zeros(
            1, SEEN, dtype=torch.int64, device="cuda"
        )  # a row of `seen` is not aligned
        with naming(case):
            kernel.launch(
                descriptors([copy_cases.placed(case, arena.address(i))]),
                corners([case.coordinate]),
                torch.tensor(said, dtype=torch.int32, device="cuda"),
                smem[i : i + 1],
                row,
            )
            torch.cuda.synchronize()
        seen[i] = row[0]
    return {"smem": smem.cpu().view(torch.uint8), "seen": seen.cpu()}


def run_stores(chosen: list[Case], rank: int, kernel: object) -> list[torch.Tensor]:
    """Memory of each case after its launch."""
    arena = Arena([case.memory for case in chosen])
    smem = stored_smem(rank).view(torch.int32).cuda()
    for i, case in enumerate(chosen):
        with naming(case):
            kernel.launch(
                descriptors([copy_cases.placed(case, arena.address(i))]),
                corners([case.coordinate]),
                torch.tensor([[0, case.at, 0, 0]], dtype=torch.int32, device="cuda"),
                smem[i : i + 1],
            )
            torch.cuda.synchronize()
    return arena.contents()


@contextmanager
def naming(case: Case) -> Iterator[None]:
    """A scope whose fault is told with its case."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{str(error).partition(chr(10))[0]}: {case}") from error


# Tiles, through the project's own classes

# Tile and rank of the tensor: every swizzle, one box and several, side by side and stacked.
TILES = (
    (Tile(128, 128, cutlass.BFloat16), 4),
    (Tile(64, 96, cutlass.BFloat16), 3),
    (Tile(64, 32, cutlass.Int8), 2),
    (Tile(64, 8, cutlass.BFloat16), 2),
    (Tile(320, 64, cutlass.Float32), 2),
)
TORCH = {
    cutlass.BFloat16: torch.bfloat16,
    cutlass.Int8: torch.int8,
    cutlass.Float32: torch.float32,
}
OUTER = (3, 2)


def tile_tensor(tile: Tile, rank: int) -> torch.Tensor:
    """A tensor (rows, cols, heads, batch), or its first dimensions, with rows in wider ones."""
    dtype = TORCH[tile.dtype]
    rows, cols, apart = tile.rows + tile.rows // 2 + 3, tile.cols + 5, 16 // dtype.itemsize
    heads, batch = (OUTER[i] if rank > 2 + i else 1 for i in range(2))
    wide = (-(-cols // apart) + 1) * apart
    generator = torch.Generator().manual_seed(tile.rows)
    shape = (batch, rows, heads, wide * dtype.itemsize)
    stored = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    view = stored[..., :cols].permute(1, 3, 2, 0)
    return view[(slice(None),) * rank + (0,) * (4 - rank)]


def tile_corners(tile: Tile, rank: int) -> list[tuple[int, ...]]:
    """Where loads begin, as (row, col, ...): within, over each edge, outside; an even number."""
    rows, cols, *outer = tile_tensor(tile, rank).shape
    apart = copy_engine.INNER_ALIGN // TORCH[tile.dtype].itemsize
    last_col = (cols - 1) // apart * apart
    corners = [
        *product((0, -3, rows - 5), (0, -apart, last_col)),
        *((-tile.rows, 0), (rows, 0), (0, -tile.cols), (0, last_col + apart), (5, apart)),
    ]
    last = tuple(n - 1 for n in outer)
    found = [(*corner, *last) for corner in corners]
    found += [
        (1, apart, *last[:i], beyond, *last[i + 1 :])
        for i in range(len(outer))
        for beyond in (-1, outer[i])
    ]
    return found + found[: len(found) % 2]


def run_tile(tile: Tile, rank: int) -> torch.Tensor:
    """The bytes of each load's slot."""
    view = tile_tensor(tile, rank)
    # The same strides on the device: a copy of a view would lose them.
    span = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1
    flat = view.as_strided((span,), (1,)).cuda()
    on_device = flat.as_strided(view.shape, view.stride())
    kernel = TileLoad(tile, rank)
    at = tile_corners(tile, rank)
    smem = torch.zeros(len(at) // 2, kernel.words, dtype=torch.int32, device="cuda")
    compile_kernel(kernel).launch(on_device, corners(at), smem)
    torch.cuda.synchronize()
    return smem.cpu().view(torch.uint8).view(len(at), tile.bytes)


# NaN fill and products


@dataclass(frozen=True)
class Operand:
    """A matrix of `rows` x `cols`, from which a tile is loaded at (`row`, `col`)."""

    rows: int
    cols: int
    row: int = 0
    col: int = 0
    oob_fill: str = "nan"

    @property
    def matrix(self) -> torch.Tensor:
        """Small whole numbers, so that every product is exact."""
        generator = torch.Generator().manual_seed(self.rows + self.cols)
        shape = (self.rows, -(-self.cols // 8) * 8)
        stored = torch.randint(-3, 4, shape, generator=generator).bfloat16()
        return stored[:, : self.cols]

    def map(self, address: int) -> TensorMap:
        stride = 2 * self.matrix.stride(0)
        shape = self.cols, self.rows
        return PRODUCT_TILE.tensor_map(address, shape, (stride,), oob_fill=self.oob_fill)


WHOLE = Operand(64, 64)
PRODUCTS = {
    "inside": (WHOLE, WHOLE),
    "rows behind a": (Operand(41, 64), WHOLE),
    "rows before a": (Operand(64, 64, row=-9), WHOLE),
    "rows behind b": (WHOLE, Operand(50, 64)),
    "rows before b": (WHOLE, Operand(64, 64, row=-3)),
    "rows of both": (Operand(60, 64), Operand(70, 64, row=30)),
    "columns behind a": (Operand(64, 57), WHOLE),
    "columns before b": (WHOLE, Operand(64, 64, col=-8)),
    "columns behind a against zeros": (Operand(64, 57), Operand(64, 57, oob_fill="zeros")),
    "all of a": (Operand(64, 64, row=64), WHOLE),
    "zeros behind a": (Operand(41, 64, oob_fill="zeros"), WHOLE),
    "zeros before b": (WHOLE, Operand(64, 64, row=-3, oob_fill="zeros")),
    "zeros in columns": (Operand(64, 57, oob_fill="zeros"), WHOLE),
}


def run_products() -> torch.Tensor:
    """The 64 x 64 products, by case."""
    operands = [operand for pair in PRODUCTS.values() for operand in pair]
    stored = [
        o.matrix.as_strided((o.rows, o.matrix.stride(0)), (o.matrix.stride(0), 1)) for o in operands
    ]
    arena = Arena([bytes(s.contiguous().view(torch.uint8).flatten().tolist()) for s in stored])
    maps = [o.map(arena.address(i)) for i, o in enumerate(operands)]
    out = torch.zeros(64 * len(PRODUCTS), 64, device="cuda")
    compile_kernel(Product()).launch(
        descriptors(maps), corners([(o.col, o.row) for o in operands]), out
    )
    torch.cuda.synchronize()
    return out.cpu().view(-1, 64, 64)


# By name: one process each.
UNITS: dict[str, Callable[[], Any]] = {
    **{
        f"load {group} {rank} {beyond}": lambda group=group, rank=rank, beyond=beyond: run_loads(
            cases(LOADS, group, rank), compile_kernel(RawLoad(rank)), beyond
        )
        for group, (_, ranks) in LOADS.items()
        for rank in ranks
        for beyond in (BEYOND if group == "plain" else BEYOND[:1])
    },
    **{
        f"store {group} {rank}": lambda group=group, rank=rank: run_stores(
            cases(STORES, group, rank), rank, compile_kernel(RawStore(rank))
        )
        for group, (_, ranks) in STORES.items()
        for rank in ranks
    },
    **{
        f"tile {i}": lambda tile=tile, rank=rank: run_tile(tile, rank)
        for i, (tile, rank) in enumerate(TILES)
    },
    "products": run_products,
}


if __name__ == "__main__":
    torch.save(UNITS[sys.argv[2]](), sys.argv[1])
