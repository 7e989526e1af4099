"""Every rule of a tensor map by name: the value given, what is allowed, the nearest valid choice.

Source: CUDA Driver API 13.0, cuTensorMapEncodeTiled, compared with the verdicts of driver 580.159
on an H200, of which tests/layouts keeps 938. The manual asks for strides that are multiples of 16
below 2^40. Sizes, boxes and element strides must be non-zero, strides need not: the driver accepts
them in any order, overlapping and zero (an expanded dimension), so the manual's formula in which
each stride contains the previous one is an illustration, no rule. Not in the manual, but refused:
addresses from 2^57 on, and boxes too large for a block's shared memory (204,800 bytes pass, 252,960
do not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .smem import SMEM_CAPACITY, SMEM_OF_ALL_BLOCKS
from .swizzle import NONE, SW32, SW64, SW128

if TYPE_CHECKING:
    from .tma import TensorMap

INTERLEAVES = ("none", "16B", "32B")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")
OOB_FILLS = ("zeros", "nan")
CACHE_HINTS = ("evict_normal", "evict_first", "evict_last", "evict_unchanged")
PREFETCHES = ("none", "descriptor", "tile")
SWIZZLES = (NONE, SW32, SW64, SW128)

_WIDTHS = (8, 16, 32, 64)
_FLOATING = ("Float16", "BFloat16", "TFloat32", "Float32", "Float64")


Source = Literal["driver", "documented", "instruction"]


@dataclass(frozen=True)
class Rule:
    """One rule of a tensor map: the value given, what is allowed, and the nearest valid choice.

    `source` says who refuses a broken rule: "driver" (cuTensorMapEncodeTiled returns an error),
    "documented" (the driver's manual asks for it, driver 580.159 lets it pass) or "instruction"
    (the encoding is accepted, but the copy instruction or this package cannot use it).
    """

    name: str
    value: str
    limit: str
    ok: bool
    fix: str = ""
    source: Source = "driver"

    def __str__(self) -> str:
        state = "ok" if self.ok else f"BROKEN: {self.fix}"
        return f"{self.name}: {self.value} (allowed: {self.limit}) {state}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _named(name: str, given: object, allowed: Sequence[object], source: Source = "driver") -> Rule:
    """A rule that a field is one of a few names."""
    choices = ", ".join(str(a) for a in allowed)
    return Rule(name, str(given), choices, given in allowed, f"choose one of {choices}", source)


def _each(
    name: str,
    values: dict[int, int],
    limit: str,
    ok: Callable[[int], bool],
    fix: Callable[[int], str],
    unit: str = "",
    source: Source = "driver",
) -> Rule:
    """A rule that holds for every dimension; the message names those that break it."""
    bad = {d: v for d, v in values.items() if not ok(v)}
    text = ", ".join(f"{v}{unit} in dimension {d}" for d, v in (bad or values).items())
    advice = "; ".join(f"dimension {d}: {fix(v)}" for d, v in bad.items())
    return Rule(name, text or "no dimension", limit, not bad, advice, source)


def tensor_map_rules(tmap: TensorMap) -> list[Rule]:
    """All rules in order; after a wrong type or number of dimensions, only those up to there."""
    form = [_type_rule(tmap), *_rank_rules(tmap)]
    if not all(rule.ok for rule in form):
        return form
    return [
        *form,
        *_memory_rules(tmap),
        *_box_rules(tmap),
        *_step_rules(tmap),
        *_mode_rules(tmap),
    ]


def _type_rule(tmap: TensorMap) -> Rule:
    width = getattr(tmap.dtype, "width", None)
    return Rule(
        "data type",
        getattr(tmap.dtype, "__name__", str(tmap.dtype)),
        "a cutlass type of 8, 16, 32 or 64 bits",
        width in _WIDTHS,
        "store packed elements as Uint8" if width else "use its cutlass type, e.g. BFloat16",
    )


def _rank_rules(tmap: TensorMap) -> list[Rule]:
    low = 1 if tmap.interleave == "none" else 3
    counts = {
        "strides": (len(tmap.strides), max(tmap.rank - 1, 0)),
        "box": (len(tmap.box), tmap.rank),
        "element strides": (len(tmap.steps), tmap.rank),
    }
    wrong = {name: pair for name, pair in counts.items() if pair[0] != pair[1]}
    return [
        Rule(
            "rank",
            f"{tmap.rank} dimensions",
            f"{low} to 5" + ("" if low == 1 else f" with interleave {tmap.interleave}"),
            low <= tmap.rank <= 5,
            "merge dimensions that are contiguous in each other"
            if tmap.rank > 5
            else "add a dimension of size 1",
        ),
        Rule(
            "lengths",
            ", ".join(f"{pair[0]} {name}" for name, pair in (wrong or counts).items()),
            f"{tmap.rank} of each and {max(tmap.rank - 1, 0)} strides for {tmap.rank} dimensions",
            not wrong,
            "list one entry a dimension; dimension 0 has no stride, since it is contiguous",
        ),
    ]


def _memory_rules(tmap: TensorMap) -> list[Rule]:
    unit = 32 if tmap.interleave == "32B" else 16
    because = " with interleave 32B" if unit == 32 else ""
    strides = dict(enumerate(tmap.strides, start=1))
    # A copy without gaps helps only where a row is itself a multiple.
    even = tmap.shape[0] * tmap.element_bytes % unit == 0
    copy = ", or copy with .contiguous()" if even else ""
    covered = {
        d: _round_up(size, max(extent, 1)) - 1
        for d, (size, extent) in enumerate(zip(tmap.shape, tmap.box, strict=True))
    }
    return [
        Rule(
            "address alignment",
            f"0x{tmap.address:x}",
            f"a multiple of {unit} bytes{because}",
            tmap.address % unit == 0,
            f"start {tmap.address % unit} bytes earlier, or copy with .clone()",
        ),
        Rule(
            "address range",
            f"0x{tmap.address:x}",
            "0 to 2^57 - 1",
            0 <= tmap.address < 2**57,
            "give a device address",
        ),
        _each(
            "size",
            dict(enumerate(tmap.shape)),
            "1 to 2^32 elements",
            lambda size: 1 <= size <= 2**32,
            lambda size: "launch nothing for an empty tensor" if size < 1 else "split it",
        ),
        _each(
            "stride alignment",
            strides,
            f"a multiple of {unit} bytes{because}",
            lambda stride: stride % unit == 0,
            lambda stride: (
                f"pad it to {_round_up(stride, unit)} bytes "
                f"({_round_up(stride, unit) / tmap.element_bytes:g} elements){copy}"
            ),
            " bytes",
        ),
        _each(
            "stride range",
            strides,
            "0 to 2^40 - 1 bytes; 0 repeats the same elements",
            lambda stride: 0 <= stride < 2**40,
            lambda stride: "split the tensor" if stride > 0 else "flip it, then .contiguous()",
            " bytes",
        ),
        _each(
            "int32 coordinates",
            covered,
            "the last element of the last box at most 2^31 - 1",
            lambda last: last < 2**31,
            lambda last: "split the tensor, or split the dimension in two",
            source="instruction",
        ),
    ]


def _box_rules(tmap: TensorMap) -> list[Rule]:
    inner = tmap.box[0] * tmap.element_bytes
    padded = max(16, _round_up(inner, 16))
    span = tmap.swizzle.span
    fits = tmap.interleave != "none" or tmap.swizzle.bits == 0 or inner <= span
    wider = next((s for s in SWIZZLES[1:] if s.span >= inner), NONE)
    total = tmap.bytes_per_box
    return [
        _each(
            "box extent",
            dict(enumerate(tmap.box)),
            "1 to 256 elements",
            lambda extent: 1 <= extent <= 256,
            lambda extent: (
                "use at least 1"
                if extent < 1
                else f"split it into {-(-extent // 256)} boxes of {-(-extent // -(-extent // 256))}"
            ),
        ),
        Rule(
            "inner box bytes",
            f"{tmap.box[0]} elements of {tmap.element_bytes} bytes = {inner} bytes",
            "a multiple of 16 bytes",
            inner > 0 and inner % 16 == 0,
            f"pad the inner box to {padded} bytes ({padded // tmap.element_bytes} elements)",
        ),
        Rule(
            "inner box within the swizzle span",
            f"{inner} bytes with swizzle {tmap.swizzle.name}",
            f"at most {span} bytes" if tmap.swizzle.bits else "any, without a swizzle",
            fits,
            f"split it into {-(-inner // span)} boxes of {span // tmap.element_bytes} elements,"
            f" or use swizzle {wider.name}",
        ),
        Rule(
            "box bytes",
            f"{total} bytes",
            f"at most {SMEM_CAPACITY}, the shared memory of a block",
            total <= SMEM_CAPACITY,
            f"split it into {-(-total // SMEM_CAPACITY)} boxes or more",
            "driver" if total > SMEM_OF_ALL_BLOCKS else "instruction",
        ),
    ]


def _step_rules(tmap: TensorMap) -> list[Rule]:
    steps = dict(enumerate(tmap.steps))
    uneven = {d: b for d, b in enumerate(tmap.box) if b % max(steps[d], 1)}
    return [
        _each(
            "element stride",
            steps,
            "1 to 8",
            lambda step: 1 <= step <= 8,
            lambda step: "use 1" if step < 1 else "use 8, or step through the stride instead",
        ),
        Rule(
            "element stride of dimension 0",
            str(tmap.steps[0]),
            "1 without interleave, where TMA does not step through dimension 0",
            tmap.interleave != "none" or tmap.steps[0] == 1,
            "use 1 and make the strided dimension an outer one",
            "documented",
        ),
        Rule(
            "box against element stride",
            ", ".join(f"{tmap.box[d]} by {steps[d]} in dimension {d}" for d in uneven or steps),
            "the box a multiple of the element stride, so that the count loaded is exact",
            not uneven,
            "; ".join(
                f"dimension {d}: use a box of {_round_up(b, steps[d])}" for d, b in uneven.items()
            ),
            "documented",
        ),
    ]


def _mode_rules(tmap: TensorMap) -> list[Rule]:
    floating = tmap.dtype.__name__ in _FLOATING
    return [
        _named("interleave", tmap.interleave, INTERLEAVES),
        _named("swizzle", tmap.swizzle, SWIZZLES),
        Rule(
            "swizzle with interleave 32B",
            f"interleave {tmap.interleave}, swizzle {tmap.swizzle.name}",
            "swizzle 32B if interleave is 32B",
            tmap.interleave != "32B" or tmap.swizzle == SW32,
            "use swizzle 32B, or interleave none",
            "documented",
        ),
        _named("out-of-bounds fill", tmap.oob_fill, OOB_FILLS),
        Rule(
            "NaN fill of a floating type",
            f"{tmap.oob_fill} for {tmap.dtype.__name__}",
            "nan only for " + ", ".join(_FLOATING),
            tmap.oob_fill != "nan" or floating,
            "fill with zeros",
        ),
        _named("L2 promotion", tmap.l2_promotion, L2_PROMOTIONS),
        _named("cache hint", tmap.cache_hint, CACHE_HINTS, source="instruction"),
        _named("prefetch", tmap.prefetch, PREFETCHES, source="instruction"),
    ]
