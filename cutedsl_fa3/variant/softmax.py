"""What turns scores into weights: the online softmax, or a function of each score alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError

from .trace import check_parameters, name_of

SINK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEEWAY = (
    8.0  # base 2: where O is rescaled lazily P stays within 2^8, and is rounded as it is below 1
)
FAR = 2.0**28  # base-2 logarithm of a score, rounded to a multiple of 32 or more beyond
LARGEST = 3e38  # near the end of fp32
LOWEST = -3.4028234663852886e38  # the end of fp32 on the other side
FORMS = "OnlineSoftmax(sink=None) and Elementwise(f)"


class OnlineSoftmax:
    """Weights exp(score - LSE): a softmax over the keys that a query sees.

    `sink` is one more logit, of no key: it takes its share of the weights and has no value. It is
    kept by reference and read at each launch. A row that sees no key has output 0 and LSE = sink.

    Shape: sink () or (heads,), float32, float16 or bfloat16.
    Units: the sink is natural, as a score after its function is; scale does not apply to it.
    Raises: VariantError for a sink of another kind.
    """

    __slots__ = ("sink",)

    sink: torch.Tensor | None

    def __init__(self, sink: torch.Tensor | None = None) -> None:
        if sink is not None:
            _check_sink(sink)
        object.__setattr__(self, "sink", sink)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"OnlineSoftmax is a snapshot; make another one to change {name}")

    def __repr__(self) -> str:
        if self.sink is None:
            return "OnlineSoftmax()"
        return f"OnlineSoftmax(sink={_said(self.sink)})"


class Elementwise:
    """Weights f(score), each from its own score alone; nothing is normalised.

    The output of a row is the sum of f(score) * value over the keys that it sees; a hidden key
    weighs exactly 0, whatever f is there. There is no LSE. `f` is traced when a Variant is made of
    this object.

    Raises: VariantError if f cannot be called with one score.
    """

    __slots__ = ("f",)

    f: Callable[..., Any]

    def __init__(self, f: Callable[..., Any]) -> None:
        check_parameters(f, "weight")
        object.__setattr__(self, "f", f)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Elementwise is a snapshot; make another one to change {name}")

    def __repr__(self) -> str:
        return f"Elementwise({name_of(self.f)})"


def check_softmax(given: object) -> None:
    """Raises: VariantError for what is neither kind of softmax."""
    if isinstance(given, OnlineSoftmax | Elementwise):
        return
    hint = ""
    if isinstance(given, torch.Tensor):
        given, hint = _said(given), "; give a sink as OnlineSoftmax(sink=...)"
    elif isinstance(given, str):
        given, hint = repr(given), "; give a function of the score, as Elementwise(torch.sigmoid)"
    elif given is OnlineSoftmax or given is Elementwise:
        one = "OnlineSoftmax()" if given is OnlineSoftmax else "Elementwise(torch.sigmoid)"
        given, hint = f"the class {name_of(given)}", f"; make one, as {one}"
    elif callable(given):
        given, hint = f"the function `{name_of(given)}`", f"; give Elementwise({name_of(given)})"
    raise VariantError(f"softmax is {given}; valid are {FORMS}{hint}")


def _check_sink(sink: object) -> None:
    valid = "valid is a tensor of shape () or (heads,) in float32, float16 or bfloat16"
    if not isinstance(sink, torch.Tensor):
        raise VariantError(f"sink is {sink!r}; {valid}, as in torch.tensor(1.0)")
    dense = not sink.is_nested and sink.layout == torch.strided and sink.device.type != "meta"
    if not dense or sink.ndim > 1 or sink.dtype not in SINK_DTYPES or sink.numel() == 0:
        raise VariantError(f"sink is {_said(sink)}; {valid}")


def _said(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    kind = "" if tensor.layout == torch.strided else f"{str(tensor.layout)[6:]} "
    where = " on device meta" if tensor.device.type == "meta" else ""
    return f"a {kind}{str(tensor.dtype)[6:]} tensor of shape {tuple(tensor.shape)}{where}"
