"""What is fixed when a kernel is compiled; lengths, batch, heads and strides stay dynamic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import Unsupported

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Problem:
    """Input type and head sizes of one forward.

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
            if size not in HEAD_DIMS:
                allowed = ", ".join(map(str, HEAD_DIMS))
                raise Unsupported(f"{field} = {size}: supported are {allowed}")

    @property
    def element(self) -> type:
        """The compiler's name of the dtype."""
        import cutlass

        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[self.dtype]

    def __str__(self) -> str:
        sizes = f"head_dim {self.head_dim}"
        if self.head_dim_v != self.head_dim:
            sizes += f" (v: {self.head_dim_v})"
        return f"{self.dtype}, {sizes}; any lengths, batch, strides and integer GQA ratio"
