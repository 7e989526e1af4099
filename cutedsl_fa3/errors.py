"""Errors that a caller can act on: what was given, which rule it breaks, what is valid."""

from cutedsl_fa3.layouts.errors import LayoutError


class VariantError(ValueError):
    """A score or mask function cannot be traced or lowered."""


class Unsupported(ValueError):
    """A valid request that no kernel here serves; the message names what is supported."""


__all__ = ["LayoutError", "Unsupported", "VariantError"]
