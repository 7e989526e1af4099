"""The error of this package."""


class LayoutError(ValueError):
    """A tile, tensor map or storage plan breaks a rule of the hardware; the message names it."""
