"""The fields of a TMA tensor map, every rule they must keep, and the 128 bytes that encode them.

A tensor map tells the copy engine how a tensor lies in global memory and which box of it one
instruction moves. `make_tiled_tma_atom` encodes whatever it is given (a row stride of 1022 bytes
silently becomes 1008), so the rules are checked here, on the host and by name.

Dimensions are listed innermost first, as the hardware numbers them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import LayoutError
from .swizzle import NONE, Swizzle
from .tma_rules import INTERLEAVES, L2_PROMOTIONS, OOB_FILLS, SWIZZLES, Rule, tensor_map_rules

DESCRIPTOR_BYTES = 128  # and aligned to 64, which a kernel parameter is

# How the descriptor numbers element types. TMA moves bits: types it does not know by name travel as
# the unsigned type of their width. Source: decoded from what driver 580.159 encodes for each type.
_TYPE_CODES = {
    "Uint8": 0,
    "Uint16": 1,
    "Uint32": 2,
    "Int32": 3,
    "Uint64": 4,
    "Int64": 5,
    "Float16": 6,
    "Float32": 7,
    "Float64": 9,
    "BFloat16": 10,
    "TFloat32": 7,
}
_CODE_BY_WIDTH = {8: 0, 16: 1, 32: 2, 64: 4}


@dataclass(frozen=True)
class TensorMap:
    """The fields of a tensor map for tiled copies, as cuTensorMapEncodeTiled takes them.

    The last two fields are no part of the descriptor but of the instructions that use it: the
    cache hint of each copy, and what is prefetched before the first one (the descriptor, or a tile
    into L2).

    Shape: `shape`, `box` and `element_strides` have one entry a dimension, innermost first;
        `strides` leaves out dimension 0, which is contiguous.
    Units: `shape` and `box` in elements, `strides` and `address` in bytes.
    Raises: LayoutError for an address or a swizzle of another type; values are for `check`.
    """

    dtype: type
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] | None = None
    swizzle: Swizzle = NONE
    interleave: str = "none"
    l2_promotion: str = "128B"
    oob_fill: str = "zeros"
    cache_hint: str = "evict_normal"
    prefetch: str = "descriptor"

    def __post_init__(self) -> None:
        if not isinstance(self.address, int):
            raise LayoutError(
                f"tensor map address = {self.address!r}: an int is needed, e.g. tensor.data_ptr()"
            )
        if not isinstance(self.swizzle, Swizzle):
            raise LayoutError(
                f"tensor map swizzle = {self.swizzle!r}: a Swizzle is needed; NONE is no swizzle"
            )

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def steps(self) -> tuple[int, ...]:
        """Element strides, all 1 unless given."""
        return self.element_strides or (1,) * self.rank

    @property
    def element_bytes(self) -> int:
        """Bytes of one element; 0 for what is no element type of TMA."""
        return getattr(self.dtype, "width", 0) // 8

    @property
    def bytes_per_box(self) -> int:
        """Bytes that one instruction moves, which is what its mbarrier counts, edges included."""
        counts = (-(-b // max(e, 1)) for b, e in zip(self.box, self.steps, strict=False))
        return math.prod(counts) * self.element_bytes

    @property
    def boxes(self) -> tuple[int, ...]:
        """How many boxes cover each dimension, the last one partly outside where it must be."""
        return tuple(-(-s // max(b, 1)) for s, b in zip(self.shape, self.box, strict=False))

    def rules(self) -> list[Rule]:
        """Every rule by name with the value given, its limit, and whether it holds."""
        return tensor_map_rules(self)

    def check(self) -> None:
        """Refuse a map that the hardware would refuse or misread.

        Raises: LayoutError naming each broken rule, its value, and the nearest valid choice.
        """
        broken = [rule for rule in self.rules() if not rule.ok]
        if broken:
            lines = "; ".join(
                f"{r.name}: given {r.value}, allowed {r.limit}; {r.fix}" for r in broken
            )
            raise LayoutError(f"this tensor map breaks {len(broken)} rule(s). {lines}")

    def __str__(self) -> str:
        def by(values: Sequence[object]) -> str:
            return " x ".join(str(v) for v in values)

        pitch = ", ".join(f"{s}" for s in self.strides)
        row = f"{self.element_bytes} (contiguous)"
        fields = {
            "address": f"0x{self.address:x}",
            "shape": f"{by(self.shape)} elements",
            "strides": f"{row}, {pitch} bytes" if pitch else f"{row} bytes",
            "box": f"{by(self.box)} elements, {self.bytes_per_box} bytes per instruction",
            "boxes": f"{by(self.boxes)} = {math.prod(self.boxes)}",
            "element strides": by(self.steps),
            "swizzle": f"{self.swizzle.name}, repeats every {self.swizzle.period} bytes",
            "interleave": self.interleave,
            "L2 promotion": self.l2_promotion,
            "out of bounds": f"filled with {self.oob_fill}",
            "cache hint": f"{self.cache_hint} (on each copy)",
            "prefetch": self.prefetch,
        }
        kind = getattr(self.dtype, "__name__", self.dtype)  # a wrong type can be printed too
        head = f"tensor map of {kind}, {self.rank} dimensions, innermost first"
        return "\n".join([head, *(f"  {name:<16}{text}" for name, text in fields.items())])

    @classmethod
    def from_bytes(cls, raw: bytes, dtype: type) -> TensorMap:
        """The map that a 128-byte descriptor encodes; cache hint and prefetch are not in it.

        Raises: LayoutError if the length is another or the descriptor is for another element type.
        Source: bit positions found by changing one field at a time in cuTensorMapEncodeTiled
            (driver 580.159, CUDA 13.0); undocumented, so inspect with this and build nothing on it.
        """
        if len(raw) != DESCRIPTOR_BYTES:
            raise LayoutError(f"a tensor map is {DESCRIPTOR_BYTES} bytes, not {len(raw)}")
        if getattr(dtype, "width", None) is None:
            raise LayoutError(f"dtype = {dtype!r}: a cutlass type is needed, e.g. cutlass.BFloat16")
        word = int.from_bytes(raw, "little")

        def field(low: int, bits: int) -> int:
            return word >> low & ((1 << bits) - 1)

        code = _TYPE_CODES.get(dtype.__name__, _CODE_BY_WIDTH.get(dtype.width))
        if field(71, 4) != code:
            raise LayoutError(
                f"the descriptor holds element type {field(71, 4)}, {dtype.__name__} is {code}; "
                "decode it with the type it was made for"
            )
        rank = field(68, 3) + 1
        # A stride is kept in units of 16 bytes: 32 bits in its own word and 4 more further on.
        strides = ((field(96 + 32 * i, 32) | field(224 + 4 * i, 4) << 32) * 16 for i in range(4))
        return cls(
            dtype=dtype,
            address=field(0, 64),
            shape=tuple(field(256 + 32 * i, 32) + 1 for i in range(rank)),
            strides=tuple(strides)[: rank - 1],
            box=tuple(field(440 + 8 * i, 8) + 1 for i in range(rank)),
            element_strides=tuple(field(416 + 3 * i, 3) + 1 for i in range(rank)),
            swizzle=SWIZZLES[field(77, 2)],
            interleave=INTERLEAVES[field(75, 2)],
            l2_promotion=L2_PROMOTIONS[field(81, 2)],
            oob_fill=OOB_FILLS[field(79, 1)],
        )
