"""Thousands of tensor maps, legal and not, the same ones every time they are asked for.

Half are maps with fields at and beside the limits of the rules; half come from tensors as they are
met (dense, sliced, transposed, padded, expanded, offset) with tiles and boxes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import cutlass

from cutedsl_fa3.layouts import NONE, SW32, SW64, SW128, Diagnosis, Geometry, TensorMap, explain

SEED, COUNT = 20261130, 8000
BASE = 0x7F0000000000  # a device address; nothing is read from it
TYPES = (
    cutlass.BFloat16,
    cutlass.Float16,
    cutlass.Float32,
    cutlass.Uint8,
    cutlass.Uint16,
    cutlass.Int32,
    cutlass.Float64,
    cutlass.Int64,
)
NAMES = ("bfloat16", "float16", "float32", "uint8", "float64", "bool", "complex64")


def maps(seed: int = SEED, count: int = COUNT) -> list[TensorMap]:
    """The maps themselves; every fourth is plainly legal before some of its fields are changed."""
    rng = random.Random(seed)
    made = [_changed(rng, _legal(rng)) for _ in range(count // 2)]
    asked = diagnoses(seed, count - len(made))
    return made + [one.map for one in asked if hasattr(one.map.dtype, "width")]


def diagnoses(seed: int = SEED, count: int = COUNT // 2) -> Iterator[Diagnosis]:
    """Tensors with a tile or a box each, as the doctor sees them."""
    rng = random.Random(seed + 1)
    for _ in range(count):
        tensor = _tensor(rng)
        yield explain(tensor, **_asked(rng, tensor))


def _legal(rng: random.Random) -> TensorMap:
    """A map that keeps every rule."""
    dtype, rank = rng.choice(TYPES), rng.randint(1, 5)
    size = dtype.width // 8
    swizzle = rng.choice((NONE, SW32, SW64, SW128))
    span = swizzle.span if swizzle.bits else rng.choice((16, 48, 128, 256))
    inner = min(span // size, 256)
    box = [inner, *(rng.choice((1, 1, 1, 2, 8)) for _ in range(rank - 1))]
    if rank > 1:
        box[1] = rng.choice((1, 8, 64, 128, 256)) if inner * size <= 128 else 8
    shape = [rng.choice((inner, 2 * inner, 1, 127)) for _ in range(rank)]
    strides, step = [], size * shape[0]
    for n in shape[1:]:
        step = -(-step // 32) * 32 + 32 * rng.randint(0, 3)
        strides.append(step)
        step *= n
    return TensorMap(
        dtype,
        BASE + 32 * rng.randint(0, 100),
        tuple(shape),
        tuple(strides),
        tuple(box),
        (1,) * rank,
        swizzle,
        l2_promotion=rng.choice(("none", "64B", "128B", "256B")),
    )


def _changed(rng: random.Random, tmap: TensorMap) -> TensorMap:
    """The map with up to three fields at or beside a limit."""
    fields = dict(vars(tmap))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(_CHANGES)(rng, fields)
    return TensorMap(**fields)


def _one(rng: random.Random, values: tuple[int, ...], choices: tuple[int, ...]) -> tuple[int, ...]:
    """One entry replaced."""
    if not values:
        return values
    at = rng.randrange(len(values))
    return (*values[:at], rng.choice(choices), *values[at + 1 :])


def _address(rng: random.Random, fields: dict) -> None:
    offsets = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    fields["address"] = rng.choice((*(BASE + o for o in offsets), 0, 2**57 - 32, 2**57, 2**60))


def _size(rng: random.Random, fields: dict) -> None:
    near = (0, 1, 2**31 - 256, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33)
    fields["shape"] = _one(rng, fields["shape"], near)


def _stride(rng: random.Random, fields: dict) -> None:
    near = (0, 2, 8, 14, 16, 24, 32, 130, 1008, 1022, 2**32, 2**40 - 32, 2**40 - 16, 2**40, 2**41)
    fields["strides"] = _one(rng, fields["strides"], (*near, 2**40 - 2, 2**40 + 48, -16, -256))


def _box(rng: random.Random, fields: dict) -> None:
    fields["box"] = _one(rng, fields["box"], (0, 1, 2, 3, 7, 64, 128, 255, 256, 257, 512))


def _inner(rng: random.Random, fields: dict) -> None:
    inner = rng.choice((1, 2, 3, 4, 8, 12, 15, 16, 24, 32, 48, 64, 96, 128, 192, 256))
    fields["box"] = (inner, *fields["box"][1:])


def _volume(rng: random.Random, fields: dict) -> None:
    """Boxes around the shared memory of a block, 232,448 bytes."""
    size, rank = fields["dtype"].width // 8, len(fields["shape"])
    if rank < 3:
        return
    outer = rng.choice(((227, 64), (226, 64), (256, 50), (256, 56), (256, 64), (228, 64)))
    fields["box"] = (16 // size, *outer, *(1,) * (rank - 3))
    fields["swizzle"] = NONE
    fields["element_strides"] = (1,) * rank


def _step(rng: random.Random, fields: dict) -> None:
    fields["element_strides"] = _one(rng, fields["element_strides"], (0, 1, 2, 3, 7, 8, 9))


def _swizzle(rng: random.Random, fields: dict) -> None:
    fields["swizzle"] = rng.choice((NONE, SW32, SW64, SW128))


def _interleave(rng: random.Random, fields: dict) -> None:
    fields["interleave"] = rng.choice(("16B", "32B"))
    if rng.random() < 0.5:
        fields["swizzle"] = SW32


def _fill(rng: random.Random, fields: dict) -> None:
    fields["oob_fill"] = "nan"


def _rank(rng: random.Random, fields: dict) -> None:
    rank = rng.choice((0, 6, 1, 5))
    more = rank - len(fields["shape"])
    for name, value in (("shape", 2), ("strides", 4096), ("box", 1), ("element_strides", 1)):
        longer = (*fields[name], *(value,) * max(more, 0))
        fields[name] = longer[: max(rank - (name == "strides"), 0)]


_CHANGES = (
    _address,
    _size,
    _stride,
    _stride,
    _box,
    _inner,
    _volume,
    _step,
    _swizzle,
    _interleave,
    _fill,
    _rank,
)


def _tensor(rng: random.Random) -> Geometry:
    """A tensor as users have them: (batch, seqlen, heads, head_dim) and others, cut and turned."""
    rank = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 6))
    inner = rng.choice((16, 32, 40, 63, 64, 65, 96, 100, 128, 192, 256, 511, 512))
    shape = [*(rng.choice((1, 2, 3, 8, 100, 1000)) for _ in range(rank - 1)), inner]
    name, kind = rng.choice(NAMES), rng.choice(("dense", "sliced", "turned", "expanded", "far"))
    wide = list(shape)
    if kind == "sliced":
        wide[-1] += rng.choice((1, 2, 3, 4, 8, 64))
    dense = Geometry.dense(wide, name)
    strides, order = list(dense.strides), list(range(rank))
    if kind == "turned":
        rng.shuffle(order)
    elif kind == "expanded" and rank > 1:
        strides[rng.randrange(rank - 1)] = 0
    elif kind == "far" and rank > 1:
        strides[rng.randrange(rank - 1)] = rng.choice((2**39, 2**40, 2**41 + 16))
    offset = rng.choice((0, 0, 0, 0, 16, 8, dense.itemsize, 3 * dense.itemsize))
    return Geometry(
        tuple(shape[d] for d in order),
        tuple(strides[d] for d in order),
        dense.dtype,
        BASE + offset,
        dense.itemsize,
    )


def _asked(rng: random.Random, tensor: Geometry) -> dict:
    """A tile or a box for it."""
    rank = len(tensor.shape)
    if rng.random() < 0.6:
        rows, cols = rng.choice((64, 80, 100, 128, 192, 256)), rng.choice((16, 60, 64, 96, 128))
        return {"tile": (rows, cols), "rows": rng.randrange(rank - 1) if rank > 2 else None}
    box = tuple(rng.choice((1, 1, 2, 8, 16, 64, 128, 256, 300)) for _ in range(rank))
    return {"box": box, "swizzle": rng.choice(("none", "32B", "64B", "128B"))}
