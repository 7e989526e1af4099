"""A Variant: what the user wrote, as graphs and captured tensors."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutedsl_fa3.errors import VariantError

from .graph import Graph
from .normalise import normalise, plain
from .softmax import Elementwise, OnlineSoftmax, check_softmax
from .trace import PARAMETERS, trace

INTEGER_DIVISIONS = ("floordiv", "truncdiv", "mod", "fmod")


ROLES = ("score", "mask", "weight", "epilogue")
_ONLINE = OnlineSoftmax()


class Variant:
    """An attention variant in plain Python: scores, visible keys, weights and the output.

    `score(s, b, h, q, k)` returns the score used instead of s (scaled, natural units),
    `mask(b, h, q, k)` whether query q sees key k, and `epilogue(o, lse, b, h, q)` the output used
    instead of each element o, in fp32 before it is rounded; q and k are raw indices. `softmax`
    turns scores into weights: OnlineSoftmax(sink=None) or Elementwise(f).

    The functions are traced here and not kept: code and Python numbers are frozen by value,
    captured tensors are kept by reference and read at each launch (a 0-d tensor is a scalar). They
    become the graphs `score`, `mask`, `weight` (None: the online softmax) and `epilogue`, None
    where there is nothing to do; `sink` is the number of the sink among `captures`. `marked` holds
    by role the graphs that say more of derivatives (`ops.MARKS`) than those; `derive.py` reads it. `handle` names the Variant in this
    process, where only text can: `by_handle` finds it as long as it lives.

    Integer arithmetic is 32-bit: captured int64 elements saturate at +-(2^31 - 1), smaller integers
    are widened to int32; captured fp16 and bf16 elements are widened to fp32, fp64 ones rounded to
    it. Indices of captured tensors are clamped to the tensor at hidden positions. copy and deepcopy
    return the Variant itself, captured tensors being references; it cannot be pickled.

    Raises: VariantError where a function cannot become a graph, or softmax is neither kind.
    """

    __slots__ = (
        "__weakref__", "captures", "epilogue", "handle", "marked", "mask", "score", "sink",
        "softmax", "weight",
    )  # fmt: skip

    score: Graph | None
    mask: Graph | None
    weight: Graph | None
    epilogue: Graph | None
    handle: str
    marked: dict[str, Graph]
    sink: int | None
    softmax: OnlineSoftmax | Elementwise
    captures: tuple[torch.Tensor, ...]

    def __init__(
        self,
        score: Callable[..., Any] | None = None,
        mask: Callable[..., Any] | None = None,
        softmax: OnlineSoftmax | Elementwise = _ONLINE,
        epilogue: Callable[..., Any] | None = None,
    ) -> None:
        check_softmax(softmax)
        weight = softmax.f if isinstance(softmax, Elementwise) else None
        found: list[torch.Tensor] = []
        raw = {
            role: trace(function, role, found)
            for role, function in zip(ROLES, (score, mask, weight, epilogue), strict=True)
            if function is not None
        }
        used: list[int] = []
        graphs: dict[str, Graph | None] = dict.fromkeys(ROLES)
        marked: dict[str, Graph] = {}
        sink = None
        for role in ROLES:
            if role == "epilogue" and isinstance(softmax, OnlineSoftmax):
                sink = _number(softmax.sink, found, used)
            if role in raw:
                found_graph = normalise(raw[role], used)
                graph = _checked(plain(found_graph), role)
                if not _changes_nothing(graph, role):
                    graphs[role] = graph
                if graph is not found_graph:
                    marked[role] = found_graph
        if weight is not None and graphs["epilogue"] and "lse" in graphs["epilogue"].inputs:
            raise VariantError(
                "epilogue reads lse, and Elementwise weights have none: nothing is normalised; "
                "valid are o, b, h and q"
            )
        values = {
            **graphs,
            "marked": marked,
            "sink": sink,
            "softmax": softmax,
            "captures": tuple(found[number] for number in used),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _registered(self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Variant is a snapshot; make another one to change {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Variant is a snapshot; {name} cannot be deleted")

    def __copy__(self) -> Variant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Variant cannot be pickled: its captured tensors are references, which no other "
            "process can follow; send what it is made from and call Variant(...) there"
        )

    @property
    def graphs(self) -> dict[str, Graph]:
        """The graphs that there are, by role: score, mask, weight, epilogue."""
        graphs = {role: getattr(self, role) for role in ROLES}
        return {role: graph for role, graph in graphs.items() if graph is not None}

    @property
    def has_lse(self) -> bool:
        """Whether rows have a log-sum-exp: Elementwise weights have none."""
        return self.weight is None

    def without_epilogue(self) -> Variant:
        """The same Variant up to the epilogue, on the same captured tensors; itself without one."""
        if self.epilogue is None and "epilogue" not in self.marked:
            return self
        marked = {role: graph for role, graph in self.marked.items() if role != "epilogue"}
        return self._with(epilogue=None, marked=marked)

    def bound_to(self, captures: Sequence[torch.Tensor]) -> Variant:
        """The same functions on other captured tensors; itself if these are the same memory."""
        pairs = zip(self.captures, captures, strict=True)
        if all(a is b or _same_memory(a, b) for a, b in pairs):
            return self
        return self._with(captures=tuple(captures))

    def _with(self, **changed: Any) -> Variant:
        other = object.__new__(Variant)
        for name in self.__slots__:
            if name != "__weakref__":
                object.__setattr__(other, name, changed.get(name, getattr(self, name)))
        return _registered(other)

    @property
    def text(self) -> str:
        """Canonical text: variants that generate the same code have the same text."""
        lines = [f"t{i}: {_described(tensor)}" for i, tensor in enumerate(self.captures)]
        for role, graph in self.graphs.items():
            lines += [f"{role}({', '.join(PARAMETERS[role])})"]
            lines += [f"  {line}" for line in graph.text.splitlines()]
        lines += [] if self.sink is None else [f"sink: t{self.sink}"]
        return "\n".join(lines) if lines else "plain attention"

    def __repr__(self) -> str:
        return f"Variant:\n{self.text}"


_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[str, Variant] = weakref.WeakValueDictionary()


def _registered(variant: Variant) -> Variant:
    object.__setattr__(variant, "handle", f"variant {next(_handles)}")
    _by_handle[variant.handle] = variant
    return variant


def by_handle(handle: str) -> Variant:
    """The Variant of this handle.

    Raises: VariantError if there is none any more.
    """
    found = _by_handle.get(handle)
    if found is None:
        raise VariantError(
            f"{handle} is no Variant of this process that still lives; keep a reference to it as "
            "long as what was compiled with it is called"
        )
    return found


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(), b.shape, b.stride(), b.dtype
    )


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]}[{', '.join('?' * tensor.ndim)}]"


def _number(tensor: torch.Tensor | None, found: list[torch.Tensor], used: list[int]) -> int | None:
    """The place among the captured tensors of one that no function reads."""
    if tensor is None:
        return None
    at = next((i for i, other in enumerate(found) if other is tensor), len(found))
    if at == len(found):
        found.append(tensor)
    if at not in used:
        used.append(at)
    return used.index(at)


def _changes_nothing(graph: Graph, role: str) -> bool:
    """A score that returns s, a mask that shows all keys, an epilogue that returns o."""
    result = graph.result
    if role == "mask":
        return result.op == "const" and result.args == (True,)
    given = {"score": "score", "epilogue": "o"}.get(role)
    return result.op == "input" and result.args[0] == given


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _checked(graph: Graph, role: str) -> Graph:
    for node in graph.nodes:
        if node.op in INTEGER_DIVISIONS and node.dtype == "int" and _is_zero(node.args[1]):
            raise VariantError(
                f"{role} divides an integer by 0 ({node.op}), which has no value; valid are other "
                "divisors, and floats"
            )
        for value in (*node.operands, *(node.args if node.op == "const" else ())):
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise VariantError(
                    f"{role} uses the integer {value}; integers are 32-bit, so it must lie between "
                    f"{-(2**31)} and {2**31 - 1}"
                )
            if isinstance(value, float) and not math.isinf(value) and abs(value) > 3.5e38:
                raise VariantError(f"{role} uses {value!r}, which does not fit fp32")
    return graph
