"""Shared-memory swizzles as address arithmetic, and what they do to bank conflicts.

A swizzle moves 16-byte chunks inside a row so that the same column of consecutive rows falls into
different banks. TMA writes that order and WGMMA reads it; in between it is one XOR on the byte
address, which this module states in plain integers:

    row r, chunk c of a 128-byte row  ->  the chunk is stored at position c XOR (r mod 8)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import LayoutError

BANKS = 32
BANK_BYTES = 4
CHUNK = 16  # bytes that a swizzle keeps together
_LANES = 32


@dataclass(frozen=True)
class Swizzle:
    """XOR of `bits` address bits at `base + shift` into those at `base`: CuTe's Swizzle<B, M, S>.

    Units: addresses and sizes in bytes.
    Raises: LayoutError if the two bit fields overlap, since the map is then no involution.
    """

    bits: int
    base: int = 4
    shift: int = 3

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise LayoutError(
                f"Swizzle<{self.bits},{self.base},{self.shift}>: bits and base must not be "
                f"negative and shift must be at least bits; the nearest valid one is "
                f"Swizzle<{max(self.bits, 0)},{max(self.base, 0)},{max(self.shift, self.bits, 0)}>"
            )

    @property
    def span(self) -> int:
        """Bytes of a row among which chunks move: 16 (none), 32, 64 or 128."""
        return 1 << (self.base + self.bits)

    @property
    def period(self) -> int:
        """Bytes after which the pattern repeats; storage must start at a multiple of it."""
        return 1 << (self.base + self.shift + self.bits) if self.bits else self.span

    @property
    def name(self) -> str:
        """The name TMA gives it ("none", "32B", "64B", "128B"), else its three parameters."""
        if self.bits == 0:
            return "none"
        if (self.base, self.shift) == (4, 3) and self.bits <= 3:
            return f"{self.span}B"
        return f"S<{self.bits},{self.base},{self.shift}>"

    def __call__(self, byte: int) -> int:
        """The physical address of a logical one, and the reverse: applying it twice undoes it."""
        mask = ((1 << self.bits) - 1) << self.base
        return byte ^ ((byte >> self.shift) & mask)

    def __str__(self) -> str:
        return self.name


NONE, SW32, SW64, SW128 = (Swizzle(bits) for bits in range(4))


def widest(row_bytes: int) -> Swizzle:
    """The widest swizzle whose span divides a row of `row_bytes`.

    Raises: LayoutError if a row is no whole number of 16-byte chunks.
    """
    if row_bytes <= 0 or row_bytes % CHUNK:
        padded = max(CHUNK, -(-row_bytes // CHUNK) * CHUNK)
        raise LayoutError(
            f"a row of {row_bytes} bytes cannot be swizzled: rows are whole 16-byte chunks; "
            f"pad it to {padded} bytes"
        )
    return next(s for s in (SW128, SW64, SW32, NONE) if row_bytes % s.span == 0)


def bank(byte: int) -> int:
    """The shared-memory bank of a byte address: 32 banks, each 4 bytes wide."""
    return byte // BANK_BYTES % BANKS


def bank_conflicts(addresses: Iterable[int], access_bytes: int) -> int:
    """Wavefronts beyond the minimum when the lanes of a warp access `addresses`, in lane order.

    Lanes that ask for the same 4-byte word share it. Accesses of 8 bytes run half a warp at a time
    and accesses of 16 bytes a quarter; each such phase takes as many wavefronts as its most wanted
    bank holds different words, and at least one.

    Units: addresses in bytes, each a multiple of `access_bytes`.
    Raises: LayoutError for more than 32 lanes, another width, or a misaligned address.
    """
    lanes = list(addresses)
    if access_bytes not in (1, 2, 4, 8, 16):
        raise LayoutError(f"a lane accesses 1, 2, 4, 8 or 16 bytes, not {access_bytes}")
    if len(lanes) > _LANES:
        raise LayoutError(f"{len(lanes)} addresses: a warp has {_LANES} lanes; count warp by warp")
    for address in lanes:
        if address % access_bytes:
            raise LayoutError(
                f"address {address} is not a multiple of the {access_bytes} bytes accessed; "
                f"the nearest below is {address // access_bytes * access_bytes}"
            )
    per_phase = _LANES * BANK_BYTES // max(access_bytes, BANK_BYTES)
    extra = 0
    for start in range(0, len(lanes), per_phase):
        wanted: dict[int, set[int]] = {}
        for address in lanes[start : start + per_phase]:
            for byte in range(address, address + access_bytes, BANK_BYTES):
                wanted.setdefault(bank(byte), set()).add(byte // BANK_BYTES)
        extra += max(len(words) for words in wanted.values()) - 1
    return extra


def picture(swizzle: Swizzle, rows: int = 8) -> str:
    """A printable atom: a line per row, a cell per 16-byte place, in it the column stored there."""
    chunks = swizzle.span // CHUNK
    head = "row   " + " ".join(f"{CHUNK * place:4d}" for place in range(chunks))
    lines = [f"{head}   byte in the row; cells: which column lies there ({swizzle.name})"]
    for row in range(rows):
        start = row * swizzle.span
        columns = [swizzle(start + CHUNK * place) - start for place in range(chunks)]
        lines.append(f"{row:3d}   " + " ".join(f"{column // CHUNK:4d}" for column in columns))
    return "\n".join(lines)
