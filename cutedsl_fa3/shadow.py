"""A new kernel's first result is held against fp64, where that is asked for.

    with fa3.shadow_check():                     # or CUTEDSL_FA3_SHADOW=1 in the environment
        out = fa3.attention(q, k, v, variant)

The first result of each kernel is compared in sampled rows with the reference: the output, that it
is finite where the reference is, and the LSE. A mismatch raises `ShadowMismatch`, which names the
worst coordinate and leaves a folder from which the call can be repeated. A kernel is known by its
plan; the emulation on the CPU counts as one. Off, which is the default, a call costs nothing more:
what is asked for is looked at only where a kind of call is met for the first time.

It applies to the whole process. Nothing can be compared while a CUDA graph is captured: such a call
runs unchecked, with a warning, and the kernel's next one is compared.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .counters import under_capture

if TYPE_CHECKING:
    from .calls import Call, Result
    from .pipelines import Schedule
    from .sampled import Mismatch
    from .variant import Variant

ENVIRONMENT = "CUTEDSL_FA3_SHADOW"
FOLDER = "cutedsl_fa3_shadow"  # in the working directory
ON, OFF = ("1", "on", "true", "yes"), ("", "0", "off", "false", "no")


class ShadowMismatch(RuntimeError):
    """A kernel's first result is not what the reference gives.

    `mismatch` is the worst coordinate with got, expected and allowed; `folder` holds the call, with
    `reproduce.py` to repeat it, or is None where it could not be written.
    """

    def __init__(self, mismatch: Mismatch, folder: Path | None, said: str) -> None:
        super().__init__(said)
        self.mismatch, self.folder = mismatch, folder


class NotChecked(UserWarning):
    """A result was not compared although that was asked for; the message says why."""


@dataclass
class Asked:
    """What was asked for, and the kernels that were found right since."""

    folder: Path | None = None
    every_call: bool = False
    right: set[tuple[str, str]] = field(default_factory=set)


_lock = threading.Lock()
_contexts: list[Asked] = []
_environment = Asked()


@contextlib.contextmanager
def shadow_check(
    folder: str | os.PathLike[str] | None = None, *, every_call: bool = False
) -> Iterator[None]:
    """Compare the first result of each kernel within, or with `every_call` every result.

    `folder` is where calls that are wrong are left: by default `cutedsl_fa3_shadow` in the working
    directory.
    """
    from . import interface

    asked = Asked(None if folder is None else Path(folder), every_call)
    with _lock:
        _contexts.append(asked)
        interface._calls.clear()  # calls that were checked before are met anew
    try:
        yield
    finally:
        with _lock:
            _contexts.remove(asked)


def asked_for() -> Asked | None:
    """What the innermost context or else the environment asks for."""
    if _contexts:
        return _contexts[-1]
    text = os.environ.get(ENVIRONMENT, "")
    if text.lower() in OFF:
        return None
    _environment.folder = None if text.lower() in ON else Path(text)
    return _environment


def first(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    schedule: Schedule | None,
) -> Call | Shadowed:
    """The call itself, or where its kernel is to be compared, what does so; not to be kept."""
    asked = asked_for()
    if asked is None:
        return call
    from .calls import WithoutScores, plan_for

    if isinstance(call, WithoutScores):  # no kernel
        return call
    plan = plan_for(q, k, v, variant, schedule)
    kernel = (plan.key_text, q.device.type)
    if kernel in asked.right and not asked.every_call:
        return call
    return Shadowed(call, asked, kernel, plan.schedule if plan.tuned else schedule)


class Shadowed:
    """A call whose result is compared before it is returned."""

    __slots__ = ("asked", "call", "kernel", "scale", "schedule")

    def __init__(
        self, call: Call, asked: Asked, kernel: tuple[str, str], schedule: Schedule | None
    ) -> None:
        self.call, self.asked, self.kernel, self.schedule = call, asked, kernel, schedule
        self.scale = call.scale

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, scale: float
    ) -> Result:
        if under_capture(q.device):
            warnings.warn(
                "shadow check: a CUDA graph is being captured, so this result is not compared; "
                "call once before the capture",
                NotChecked,
                stacklevel=4,  # the caller of attention
            )
            return self.call(q, k, v, variant, scale)
        with _filled() if q.is_cuda else contextlib.nullcontext():
            result = self.call(q, k, v, variant, scale)
        self.compare(q, k, v, variant, scale, result)
        self.asked.right.add(self.kernel)
        return result

    def compare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: Variant,
        scale: float,
        result: Result,
    ) -> None:
        """Hold a result against the reference.

        Raises: ShadowMismatch.
        """
        from . import sampled

        mismatch = sampled.compare(q, k, v, variant, scale, result)
        if mismatch is None:
            return
        from .reproducer import Case

        case = Case(q, k, v, variant, scale, self.schedule, result)
        folder, where = _left(case, mismatch, self.asked.folder)
        raise ShadowMismatch(
            mismatch,
            folder,
            f"a kernel's result is not what the reference gives: {mismatch}. {where}",
        )


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """New memory is NaN meanwhile, so that a row which is never written cannot look right."""
    mode = torch.utils.deterministic
    before = mode.fill_uninitialized_memory
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        mode.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        mode.fill_uninitialized_memory = before


def _left(case: Any, mismatch: Mismatch, wanted: Path | None) -> tuple[Path | None, str]:
    """Where the call was left, and what to say of it."""
    from . import reproducer

    tried = []
    for root in (wanted or Path(FOLDER), Path(tempfile.gettempdir()) / FOLDER):
        try:
            root.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=root)
            folder = reproducer.write(Path(made), case, str(mismatch)).resolve()
        except (OSError, RuntimeError) as error:
            tried.append(f"{root}: {error}")
        else:
            return folder, f"To repeat it: python {folder / 'reproduce.py'}"
    return None, f"It could not be left on disk ({'; '.join(tried)})"
