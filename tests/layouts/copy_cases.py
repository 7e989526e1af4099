"""Copies to try: a tensor map, where its box begins, memory; and what must come of them.

`expected` says it a second way, element by element: torch indexing for what is loaded, and the CUDA
C++ Programming Guide's formula on 128-byte lines of shared memory for where it lies.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import cutlass
import torch

from cutedsl_fa3.layouts import NONE, SW32, SW64, SW128, Swizzle, TensorMap

SWIZZLES = (NONE, SW32, SW64, SW128)
FLOATING = (cutlass.BFloat16, cutlass.Float16, cutlass.Float32)
DTYPES = (cutlass.Uint8, cutlass.Uint16, cutlass.Int32, *FLOATING)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SMEM_BYTES = 48 * 1024
POISON = 0x5A
LINE = 128  # bytes across all banks


@dataclass(frozen=True)
class Case:
    """A copy between `memory`, from the map's address on, and byte `at` of shared memory."""

    tmap: TensorMap
    coordinate: tuple[int, ...]
    at: int
    memory: bytes

    def __str__(self) -> str:
        return f"coordinate {self.coordinate}, to byte {self.at}, of {self.tmap}"


def case(rng: random.Random, rank: int, swizzle: Swizzle, dtype: type, *features: str) -> Case:
    """A map that keeps every rule, with a box that may begin before the tensor and end behind it.

    Features: "narrow" (rows shorter than the swizzle), "shifted" (a box that begins within a
    period), "steps" (element strides), "nan" (fill), "expanded" (a stride of zero), "inward" (no
    negative coordinate).
    """
    size = dtype.width // 8
    row = swizzle.span if swizzle.bits else 16 * rng.randint(1, 8)
    if "narrow" in features and swizzle.bits:
        row = 16 * rng.randint(1, max(1, swizzle.span // 16 - 1))
    pitch = max(row, swizzle.span)
    counts, rows = [row // size], 16384 // pitch
    for d in range(1, rank):
        most = min(256, round(1.5 * rows ** (1 / (rank - d))), max(1, rows))  # a share of the rows
        counts.append(rng.randint(1, most))
        rows //= counts[-1]
    steps = [1] + [rng.randint(1, 3) if "steps" in features else 1 for _ in range(rank - 1)]
    steps = [s if c * s <= 256 else 1 for c, s in zip(counts, steps, strict=True)]
    box = [c * s for c, s in zip(counts, steps, strict=True)]
    within = rng.random() < 0.25  # in every dimension; by chance that would be rare
    least = box if within else [1] * rank
    shape = [
        rng.randint(n, max(n, 2 * b if d < 2 else min(2 * b, 5)))
        for d, (n, b) in enumerate(zip(least, box, strict=True))
    ]
    strides, total = [], -(-shape[0] * size // 16) * 16
    for extent in shape[1:]:
        strides.append(total + 16 * rng.randint(0, 3))
        total = strides[-1] * extent
    if "expanded" in features and strides:
        strides[rng.randrange(len(strides))] = 0
    low = 0 if "inward" in features else 1
    coordinate = tuple(
        rng.randint(0, max(0, n - b))
        if within or rng.random() < 0.4
        else rng.randint(-low * (b + 2), n + 2)
        for b, n in zip(box, shape, strict=True)
    )
    apart = 16 // size  # elements: what the copy instruction takes along a row
    coordinate = (coordinate[0] // apart * apart, *coordinate[1:])
    tmap = TensorMap(
        dtype,
        0,
        tuple(shape),
        tuple(strides),
        tuple(box),
        element_strides=tuple(steps),
        swizzle=swizzle,
        oob_fill="nan" if "nan" in features else "zeros",
    )
    at = LINE * rng.randint(0, 31) if "shifted" in features else 1024 * rng.randint(0, 3)
    last = sum((n - 1) * s for n, s in zip(shape, (size, *strides), strict=True))
    return Case(tmap, coordinate, at, rng.randbytes(last + size))


def cases(seed: int, count: int, rank: int, *features: str) -> list[Case]:
    """Cases of every swizzle and type in turn, the same for the same arguments."""
    rng = random.Random(f"{seed} {rank} {features}")
    dtypes = FLOATING if "nan" in features else DTYPES
    kinds = [(s, d) for d in dtypes for s in SWIZZLES]
    return [case(rng, rank, *kinds[i % len(kinds)], *features) for i in range(count)]


def placed(case: Case, address: int) -> TensorMap:
    """The case's map, with its tensor at an address."""
    return replace(case.tmap, address=address)


# What must come of them


def _indices(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each element of the box lies in memory, in elements, and whether the tensor has it.

    Shape: two of (rows, columns), rows in the order in which they lie in shared memory.
    """
    tmap = case.tmap
    size = tmap.element_bytes
    offset, inside = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
    strides = (size, *tmap.strides)
    for d in reversed(range(tmap.rank)):
        index = case.coordinate[d] + torch.arange(0, tmap.box[d], tmap.steps[d])
        offset = (offset[:, None] + index * strides[d]).flatten()
        inside = (inside[:, None] & (index >= 0) & (index < tmap.shape[d])).flatten()
    columns = tmap.box[0]
    return offset.view(-1, columns), inside.view(-1, columns)


def _bytes_of(offset: torch.Tensor, size: int) -> torch.Tensor:
    return (offset[..., None] + torch.arange(size)).flatten(1)


def places(case: Case, rows: int) -> torch.Tensor:
    """The byte of shared memory of each byte of the box, by row.

    Source: CUDA C++ Programming Guide, swizzle modes: chunk x of line y is found at chunk
        ((y + offset) % 8) ^ x of it, offset = (address / 128) % 8; 4 and 2 for 64B and 32B.
    """
    tmap = case.tmap
    row = tmap.box[0] * tmap.element_bytes
    kinds = {"none": 1, "32B": 2, "64B": 4, "128B": 8}[tmap.swizzle.name]
    pitch = row if kinds == 1 else max(row, 16 * kinds)
    byte = torch.arange(rows)[:, None] * pitch + torch.arange(row)
    # Chunks of a box that begins at a line are those of its line, so only the line is shifted.
    line, chunk, rest = byte // LINE, byte % LINE // 16, byte % 16
    moved = ((line + case.at // LINE) % kinds) ^ chunk
    return case.at + LINE * line + 16 * moved + rest


def expected(case: Case) -> tuple[torch.Tensor, int]:
    """Shared memory after the load, poison where nothing came, and the elements filled."""
    tmap = case.tmap
    size = tmap.element_bytes
    offset, inside = _indices(case)
    memory = torch.frombuffer(bytearray(case.memory), dtype=torch.uint8)
    read = memory[_bytes_of(torch.where(inside, offset, 0), size)]
    fill = torch.tensor([0xF7, 0x7F] if tmap.oob_fill == "nan" else [0, 0], dtype=torch.uint8)
    fill = fill.repeat(read.shape[1] // 2)
    data = torch.where(inside.repeat_interleave(size, 1), read, fill)
    smem = torch.full((SMEM_BYTES,), POISON, dtype=torch.uint8)
    smem[places(case, len(data))] = data
    return smem, int((~inside).sum())


def expected_store(case: Case, smem: torch.Tensor) -> torch.Tensor:
    """Memory after the store: 16 bytes of a row are written if the first of them is inside."""
    offset, inside = _indices(case)
    memory = torch.frombuffer(bytearray(case.memory), dtype=torch.uint8)
    inside = inside.repeat_interleave(case.tmap.element_bytes, 1)
    target = _bytes_of(offset, case.tmap.element_bytes)
    inside = inside[:, ::16].repeat_interleave(16, 1) & (target < len(memory))
    memory[target[inside]] = smem[places(case, len(offset))][inside]
    return memory


def elements(case: Case) -> int:
    """Elements of the box."""
    return math.prod(-(-b // e) for b, e in zip(case.tmap.box, case.tmap.steps, strict=True))
