"""Memory that holds NaN before it is written, so that what a kernel leaves out shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cutedsl_fa3 import calls

GARBAGE = 0x5A5A5A5  # in place of integers; as a counter it would be waited for, and seen


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated uninitialised holds NaN, or a large integer."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            t = make(*args, **options)
            return t.fill_(torch.nan if t.is_floating_point() else GARBAGE)

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", filled(torch.empty))
        patch.setattr(calls, "empty_like", filled(torch.empty_like))
        yield
