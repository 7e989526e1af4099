"""What a kernel's tables promise about its machine code, before the compiler has been asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Expect:
    """One claim about the instruction census of a cubin.

    `opcode` is a SASS mnemonic or a dotted prefix of it ("UTMALDG", "HGMMA.64x128x16"); `why` names
    the table entry that the claim follows from.
    """

    opcode: str
    rule: Literal["exactly", "at least", "none"]
    count: int
    why: str

    def holds(self, found: int) -> bool:
        """Whether a census with `found` such instructions keeps the promise."""
        if self.rule == "none":
            return found == 0
        return found == self.count if self.rule == "exactly" else found >= self.count

    def __str__(self) -> str:
        amount = self.rule if self.rule == "none" else f"{self.rule} {self.count}"
        return f"{self.opcode}: {amount} ({self.why})"


def exactly(opcode: str, counts: Mapping[str, int], what: str) -> Expect:
    """The sum of `counts`, which say by table entry where each comes from; "none" where 0."""
    total = sum(counts.values())
    if total == 0:
        return Expect(opcode, "none", 0, f"{what} nothing")
    return Expect(
        opcode, "exactly", total, f"{what} {', '.join(f'{n} ({c})' for n, c in counts.items())}"
    )
