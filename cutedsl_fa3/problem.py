"""What is fixed when a kernel is compiled; lengths, batch, heads and strides stay dynamic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import Unsupported

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Head sizes (of q and k, of v) that have tiles of their own; sources: design table of FA3's tiles.
NATIVE = (
    (64, 64),
    (96, 96),
    (64, 128),
    (128, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
)
LARGEST = 256
STEP = 8  # elements of 16 bits in the 16 bytes that strides of a tensor map are multiples of


@dataclass(frozen=True)
class Problem:
    """Input type and head sizes of one forward.

    Any multiple of 8 up to 256 is served: its tiles have the next native size, whose columns past
    the tensor's end are filled with zeros by TMA and never stored.

    Raises:
        Unsupported: naming argument, value and what the kernels here serve.
    """

    dtype: str
    head_dim: int
    head_dim_v: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise Unsupported(f"dtype = {self.dtype!r}: supported are {', '.join(DTYPES)}")
        for field in ("head_dim", "head_dim_v"):
            size = getattr(self, field)
            if not isinstance(size, int) or size % STEP or not STEP <= size <= LARGEST:
                natives = ", ".join(str(d) for d, dv in NATIVE if d == dv)
                raise Unsupported(
                    f"{field} = {size}: supported are multiples of {STEP} from {STEP} to "
                    f"{LARGEST} (of their own size {natives} and (192, 128), others at the cost "
                    f"of the next){_way_out(size)}"
                )

    @property
    def tile_dims(self) -> tuple[int, int]:
        """The smallest native (head_dim, head_dim_v) that holds both."""
        return min(
            (pair for pair in NATIVE if pair[0] >= self.head_dim and pair[1] >= self.head_dim_v),
            key=sum,
        )

    @property
    def element(self) -> type:
        """The compiler's name of the dtype."""
        import cutlass

        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[self.dtype]

    def __str__(self) -> str:
        sizes = f"head_dim {self.head_dim}"
        if self.head_dim_v != self.head_dim:
            sizes += f" (v: {self.head_dim_v})"
        if self.tile_dims != (self.head_dim, self.head_dim_v):
            sizes += f", in tiles of {' and '.join(map(str, dict.fromkeys(self.tile_dims)))}"
        return f"{self.dtype}, {sizes}; any lengths, batch, strides and integer GQA ratio"


def _way_out(size: object) -> str:
    """What to do about a head size that is not served, if anything simple."""
    if not isinstance(size, int) or not 0 < size < LARGEST:
        return ""
    return f"; pad with zeros to {-(-size // STEP) * STEP} and give scale"
