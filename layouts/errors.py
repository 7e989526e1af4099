"""The error of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .doctor import Diagnosis


class LayoutError(ValueError):
    """A tile, tensor map or storage plan breaks a rule of the hardware; the message names it.

    `diagnosis` is what the doctor says, where a tensor was refused: `print(error.diagnosis)`.
    """

    diagnosis: Diagnosis | None = None
