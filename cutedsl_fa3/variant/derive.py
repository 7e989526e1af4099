"""Derivatives of a variant's graphs, as graphs of the same language.

    of_element(variant)   score' (or the Elementwise weight) by the raw score s and by what it loads
    of_epilogue(variant)  the output element by o, by lse and by what it loads
    derivatives(graph)    of any other graph

Each returns `Derivatives`: one tuple of nodes in which all results lie, so that what they share is
computed once. `value` is the function itself; its nodes come first and are those of the forward's
own graph. `inputs["score"]` is d value / d score, and each of `loads` says what a captured floating
tensor is to get: at `indices`, clamped as a load clamps them, add `factor` times the gradient of
the value. Integers have no derivative: comparisons, rounding, indices and conditions add nothing,
and `torch.where` selects, so that nothing of the side not taken reaches the result, not even NaN.
Where floats tie, the share is that of the torch function that was written (`ops.MARKS`):

    torch.maximum, minimum, max, min   half each, at each node of a row's maximum
    clamp                              all of it for the value
    relu, relu6, hardtanh and kin      none
    abs                                0 at 0

A reader whose memo goes by node number (`device.Lowering`) evaluates value and factors in one pass:
the graphs in a `Derivatives` have the same `nodes` and differ in `output`. What is 0 everywhere is
absent, from `inputs` as from `loads`; `number(graph)` is the Python number that a graph is, if it
is one: 1.0 for `s + bias`, where nothing need be multiplied. `alone(graph)` is the graph without
the nodes that it does not need.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from cutedsl_fa3.errors import VariantError

from .fusion import composed, with_known_signs
from .graph import Builder, Graph, Node, Ref, Value
from .normalise import as_ref, renumbered, simplified

if TYPE_CHECKING:
    from .variant import Variant

LN_2 = math.log(2.0)
SQRT_HALF = math.sqrt(0.5)
TWO_BY_SQRT_PI = 2.0 / math.sqrt(math.pi)
DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)  # of the normal distribution
GELU_SLOPE, GELU_CUBE = math.sqrt(2.0 / math.pi), 0.044715  # of its approximation by tanh
SOFTPLUS_LINEAR = 20.0  # above it torch's softplus is the identity


@dataclass(frozen=True)
class Loaded:
    """What the gradient of a captured tensor gets: `factor` times the value's, at `indices`.

    `indices` are ints or nodes of the common tuple, one for each dimension; () for a 0-d tensor.
    """

    capture: int
    indices: tuple[Value, ...]
    factor: Graph


@dataclass(frozen=True)
class Derivatives:
    """A function and its derivatives on common nodes; what is absent is 0 everywhere."""

    value: Graph
    inputs: dict[str, Graph]
    loads: tuple[Loaded, ...]

    @property
    def captures(self) -> tuple[int, ...]:
        """Numbers of the captured tensors that have a gradient, in order of first use."""
        return tuple(dict.fromkeys(load.capture for load in self.loads))


@lru_cache(maxsize=256)
def derivatives(graph: Graph) -> Derivatives:
    """The derivatives of a graph's value by its floating inputs and loads.

    Raises: VariantError naming an operation without a derivative.
    """
    found = _Reverse(graph)
    inputs = {n.args[0]: i for i, n in enumerate(graph.nodes) if n.op == "input"}
    by_input = {name: found.share(i) for name, i in inputs.items()}
    by_load = [(n, found.share(i)) for i, n in enumerate(graph.nodes) if n.op == "load"]
    b = found.builder
    names = [name for name, share in by_input.items() if not _is_zero(share)]
    loads = [(node, share) for node, share in by_load if not _is_zero(share)]
    indices = [tuple(found.value(a) for a in node.operands) for node, _ in loads]
    outputs = [
        as_ref(b, found.values[graph.output]),
        *(as_ref(b, by_input[name]) for name in names),
        *(as_ref(b, share) for _, share in loads),
        *(one for several in indices for one in several if isinstance(one, Ref)),
    ]
    numbers = max((n.args[0] for n in graph.nodes if n.op == "load"), default=-1) + 1
    nodes, there = renumbered(b.nodes, outputs, [*range(numbers)])
    moved = dict(zip(outputs, there, strict=True))

    def graph_of(value: Value) -> Graph:
        return Graph(nodes, moved[as_ref(b, value)].id)

    return Derivatives(
        graph_of(found.values[graph.output]),
        {name: graph_of(by_input[name]) for name in names},
        tuple(
            Loaded(node.args[0], tuple(moved.get(i, i) for i in places), graph_of(share))
            for (node, share), places in zip(loads, indices, strict=True)
        ),
    )


Found = TypeVar("Found")


def _kept(function: Callable[[Variant], Found]) -> Callable[[Variant], Found]:
    """A function of a Variant, which is a snapshot, that is asked at each call of a kernel."""
    known: weakref.WeakKeyDictionary[Variant, Found] = weakref.WeakKeyDictionary()

    @wraps(function)
    def found(variant: Variant) -> Found:
        if variant not in known:
            known[variant] = function(variant)
        return known[variant]

    return found


@_kept
def of_element(variant: Variant) -> Derivatives | None:
    """Of what the kernel makes of a raw score: the weight of Elementwise, else the score.

    Magnitudes of distances whose sign the mask settles are without `abs`, as in the forward, so
    the results hold where the mask does. None where the raw score is what the softmax takes.
    """
    graphs = [variant.marked.get(role, getattr(variant, role)) for role in ("score", "weight")]
    changed = composed(*graphs)
    return None if changed is None else derivatives(with_known_signs(changed, variant.mask))


@_kept
def of_epilogue(variant: Variant) -> Derivatives | None:
    """Of an output element: by "o", by "lse" if it is read, and by what it loads; or None."""
    graph = variant.marked.get("epilogue", variant.epilogue)
    return None if graph is None else derivatives(graph)


def number(graph: Graph) -> float | None:
    """The number that a graph is, whatever its inputs are; None if there is none."""
    return float(graph.result.args[0]) if graph.result.op == "const" else None


def alone(graph: Graph) -> Graph:
    """The same function without nodes that it does not need."""
    numbers = max((n.args[0] for n in graph.nodes if n.op == "load"), default=-1) + 1
    nodes, (output,) = renumbered(graph.nodes, [Ref(graph.output)], [*range(numbers)])
    return Graph(nodes, output.id)


class _Reverse:
    """Shares of all nodes in the result, from the result backwards."""

    def __init__(self, graph: Graph) -> None:
        self.builder = Builder()
        self.values: list[Value] = []  # of the graph's nodes, marks taken off
        for node in graph.nodes:
            args = tuple(self.value(a) for a in node.args)
            self.values.append(simplified(self.builder, node, args, marks=False))
        self.active = _active(graph)
        self.shares: dict[int, Value] = {graph.output: 1.0} if self.active[graph.output] else {}
        for number in reversed(range(len(graph.nodes))):
            if number in self.shares and self.active[number]:
                self.hand_on(graph.nodes[number], number)

    def value(self, argument: Any) -> Any:
        return self.values[argument.id] if isinstance(argument, Ref) else argument

    def share(self, number: int) -> Value:
        """d result / d node."""
        return self.shares.get(number, 0.0)

    def hand_on(self, node: Node, number: int) -> None:
        """Add a node's share to those of its operands."""
        if node.op in ("input", "load"):
            return
        if node.op not in RULES:
            raise VariantError(
                f"{node.op} has no derivative here; a score that a gradient is asked for is made "
                f"of {', '.join(RULES)}"
            )
        rule = RULES[node.op]
        if rule is None:
            return
        moving = [isinstance(a, Ref) and self.active[a.id] for a in node.args]
        algebra = Algebra(self.builder, self.shares[number])
        operands = [self.value(a) for a in node.args]
        shares = rule(algebra, self.values[number], *operands)
        for argument, share, moves in zip(node.args, shares, moving, strict=True):
            if moves and share is not None:
                known = self.shares.get(argument.id, 0.0)
                self.shares[argument.id] = algebra.add(known, share)


def _active(graph: Graph) -> list[bool]:
    """Whether each node is a float that a floating input or load reaches through floats."""
    found: list[bool] = []
    for node in graph.nodes:
        if node.dtype != "float":
            found.append(False)
        elif node.op in ("input", "load"):
            found.append(True)
        else:
            found.append(any(isinstance(a, Ref) and found[a.id] for a in node.args))
    return found


def _is_zero(value: Value) -> bool:
    return not isinstance(value, Ref) and value == 0


class Algebra:
    """Arithmetic on shares: floats of the graph and Python numbers, simplified as they are made.

    `g` is the share of the node whose rule runs. A `where` with 0 on one side stays outermost, so
    that the side which is not taken is never multiplied into the result: 0 * inf would be NaN.
    """

    def __init__(self, builder: Builder, g: Value) -> None:
        self.builder, self.g = builder, g

    def op(self, name: str, *args: Value) -> Value:
        """One operation on values, not simplified."""
        if not any(isinstance(a, Ref) for a in args):
            node = Node(name, args, "float", frozenset())
            return simplified(self.builder, node, args)
        return self.builder.emit(name, *args)

    def parts(self, value: Value, op: str) -> tuple[Any, ...] | None:
        """The arguments of a value that is this operation."""
        if not isinstance(value, Ref) or self.builder.nodes[value.id].op != op:
            return None
        return self.builder.nodes[value.id].args

    def one_sided(self, value: Value) -> tuple[Value, Value, bool] | None:
        """(condition, x, side) of a value that is x where the condition is `side`, else 0."""
        parts = self.parts(value, "where")
        if parts is None:
            return None
        condition, yes, no = parts
        if _is_zero(no):
            return condition, yes, True
        return (condition, no, False) if _is_zero(yes) else None

    def where(self, condition: Value, yes: Value, no: Value) -> Value:
        if isinstance(condition, bool):
            return yes if condition else no
        for side, other in ((True, no), (False, yes)):  # a choice within the same choice
            inner = self.one_sided(yes if side else no)
            if inner and inner[0] == condition and _is_zero(other):
                yes, no = (inner[1] if inner[2] else 0.0), (0.0 if inner[2] else inner[1])
                if inner[2] != side:
                    return 0.0
        return yes if yes == no else self.builder.emit("where", condition, yes, no)

    def mul(self, a: Value, b: Value) -> Value:
        if isinstance(a, Ref) and not isinstance(b, Ref):
            a, b = b, a
        if not isinstance(a, Ref):
            return self.scaled(b, float(a))
        for x, y in ((a, b), (b, a)):
            if sided := self.one_sided(x):
                condition, inner, side = sided
                product = self.mul(inner, y)
                sides = (product, 0.0) if side else (0.0, product)
                return self.where(condition, *sides)
        for x, y in ((a, b), (b, a)):  # numbers move outwards, where they meet
            factor, inner = self.factor(x)
            if factor != 1.0:
                return self.scaled(self.mul(inner, y), factor)
        return self.op("mul", a, b)

    def scaled(self, value: Value, by: float) -> Value:
        """A value times a number."""
        if not isinstance(value, Ref):
            return float(value) * by
        if by == 0.0:
            return 0.0
        factor, inner = self.factor(value)
        factor *= by
        if factor == 1.0:
            return inner
        if sided := self.one_sided(inner):
            condition, x, side = sided
            product = self.scaled(x, factor)
            return self.where(condition, *((product, 0.0) if side else (0.0, product)))
        return self.op("neg", inner) if factor == -1.0 else self.op("mul", inner, factor)

    def factor(self, value: Value) -> tuple[float, Value]:
        """(number, rest) of which a value is the product."""
        if parts := self.parts(value, "neg"):
            return -1.0, parts[0]
        if (parts := self.parts(value, "mul")) and not isinstance(parts[1], Ref):
            return float(parts[1]), parts[0]
        if parts and not isinstance(parts[0], Ref):
            return float(parts[0]), parts[1]
        return 1.0, value

    def add(self, a: Value, b: Value) -> Value:
        if _is_zero(a) or _is_zero(b):
            return b if _is_zero(a) else a
        if a == b and isinstance(a, Ref):
            return self.scaled(a, 2.0)
        first, second = self.one_sided(a), self.one_sided(b)
        if first and second and first[0] == second[0]:
            (condition, x, side), (_, y, other) = first, second
            if side != other:
                return self.where(condition, *((x, y) if side else (y, x)))
            both = self.add(x, y)
            return self.where(condition, *((both, 0.0) if side else (0.0, both)))
        negative, rest = self.factor(b)
        return self.op("sub", a, rest) if negative == -1.0 else self.op("add", a, b)

    def div(self, a: Value, b: Value) -> Value:
        if _is_zero(a):
            return 0.0
        if not isinstance(b, Ref) and b != 0 and 2.0**-126 <= abs(1.0 / b) <= 2.0**126:
            return self.scaled(a, 1.0 / b)
        if sided := self.one_sided(a):
            condition, x, side = sided
            quotient = self.div(x, b)
            return self.where(condition, *((quotient, 0.0) if side else (0.0, quotient)))
        factor, inner = self.factor(a)
        if factor != 1.0:
            return self.scaled(self.div(inner, b), factor)
        return self.op("div", a, b)

    def less(self, a: Value, b: Value) -> Value:
        return self.op("lt", a, b)

    def times(self, *factors: Value) -> Value:
        """The share times these."""
        found: Value = self.g
        for factor in factors:
            found = self.mul(found, factor)
        return found


# (algebra, value of the node, *operands) -> a share for each operand, None for none.
Rule = Callable[..., Sequence[Value | None]]


def _of_one(slope: Callable[[Algebra, Value, Value], Value]) -> Rule:
    """A function of one float with this derivative at (value, operand)."""
    return lambda a, y, x: (a.times(slope(a, y, x)),)


def _quotient(a: Algebra, y: Value, x: Value, divisor: Value) -> Sequence[Value]:
    by_x = a.div(a.g, divisor)
    return by_x, a.scaled(a.mul(by_x, y), -1.0)


def _remainder(a: Algebra, y: Value, x: Value, divisor: Value) -> Sequence[Value]:
    whole = a.op("trunc", a.op("div", x, divisor))
    return a.g, a.scaled(a.times(whole), -1.0)


def _shared(beats: str) -> Rule:
    """A minimum or maximum of two floats: ties go to both in halves, NaN to both."""

    def rule(a: Algebra, y: Value, x: Value, other: Value) -> Sequence[Value]:
        half = a.scaled(a.g, 0.5)
        tied = a.where(a.op("eq", x, other), half, a.g)
        return tuple(
            a.where(a.op(beats, two, one), 0.0, tied) for one, two in ((x, other), (other, x))
        )

    return rule


def _bounded(inside: str, at_bound: bool) -> Rule:
    """A value held by a bound, which has it where the value is not `inside`."""

    def rule(a: Algebra, y: Value, x: Value, bound: Value) -> Sequence[Value]:
        if at_bound:
            condition = a.op(inside, x, bound)
            return a.where(condition, a.g, 0.0), a.where(condition, 0.0, a.g)
        outside = a.op({"gt": "le", "lt": "ge"}[inside], x, bound)  # NaN is not outside
        return a.where(outside, 0.0, a.g), a.where(outside, a.g, 0.0)

    return rule


def _magnitude(a: Algebra, y: Value, x: Value) -> Sequence[Value]:
    below = a.where(a.op("lt", x, 0.0), a.scaled(a.g, -1.0), 0.0)
    return (a.where(a.op("gt", x, 0.0), a.g, below),)


def _choice(
    a: Algebra, y: Value, condition: Value, yes: Value, no: Value
) -> Sequence[Value | None]:
    return None, a.where(condition, a.g, 0.0), a.where(condition, 0.0, a.g)


def _one_minus_square(a: Algebra, t: Value) -> Value:
    return a.op("sub", 1.0, a.op("mul", t, t))


def _gelu(a: Algebra, y: Value, x: Value) -> Value:
    """Distribution + x * density, of the normal distribution."""
    below = a.op("mul", a.op("add", a.op("erf", a.op("mul", x, SQRT_HALF)), 1.0), 0.5)
    density = a.op("exp", a.op("mul", a.op("mul", x, x), -0.5))
    return a.op("add", below, a.op("mul", a.op("mul", x, density), DENSITY_AT_0))


def _gelu_tanh(a: Algebra, y: Value, x: Value) -> Value:
    square = a.op("mul", x, x)
    inner = a.op("mul", x, a.op("add", a.op("mul", square, GELU_CUBE * GELU_SLOPE), GELU_SLOPE))
    t = a.op("tanh", inner)
    steep = a.op("add", a.op("mul", square, 3.0 * GELU_CUBE * GELU_SLOPE), GELU_SLOPE)
    moved = a.op("mul", a.op("mul", x, steep), _one_minus_square(a, t))
    return a.op("mul", a.op("add", a.op("add", t, 1.0), moved), 0.5)


def _silu(a: Algebra, y: Value, x: Value) -> Value:
    """sigmoid(x) + y * (1 - sigmoid(x))."""
    share = a.op("sigmoid", x)
    return a.op("add", share, a.op("mul", y, a.op("sub", 1.0, share)))


def _softplus(a: Algebra, y: Value, x: Value) -> Value:
    return a.where(a.op("gt", x, SOFTPLUS_LINEAR), 1.0, a.op("sigmoid", x))


# By operation; None where nothing is handed on. An operation that is missing has no derivative.
RULES: dict[str, Rule | None] = {
    "add": lambda a, y, *_: (a.g, a.g),
    "sub": lambda a, y, *_: (a.g, a.scaled(a.g, -1.0)),
    "mul": lambda a, y, x, other: (a.times(other), a.times(x)),
    "div": _quotient,
    "fmod": _remainder,
    "minimum": _shared("lt"),
    "maximum": _shared("gt"),
    "clamp_min": _bounded("ge", at_bound=True),
    "clamp_max": _bounded("le", at_bound=True),
    "threshold_min": _bounded("gt", at_bound=False),
    "threshold_max": _bounded("lt", at_bound=False),
    "neg": lambda a, y, x: (a.scaled(a.g, -1.0),),
    "abs": _magnitude,
    "exp": _of_one(lambda a, y, x: y),
    "exp2": _of_one(lambda a, y, x: a.scaled(y, LN_2)),
    "log": lambda a, y, x: (a.div(a.g, x),),
    "log2": lambda a, y, x: (a.scaled(a.div(a.g, x), 1.0 / LN_2),),
    "sqrt": lambda a, y, x: (a.scaled(a.div(a.g, y), 0.5),),
    "rsqrt": _of_one(lambda a, y, x: a.scaled(a.op("mul", a.op("mul", y, y), y), -0.5)),
    "sin": _of_one(lambda a, y, x: a.op("cos", x)),
    "cos": _of_one(lambda a, y, x: a.op("neg", a.op("sin", x))),
    "tanh": _of_one(lambda a, y, x: _one_minus_square(a, y)),
    "sigmoid": _of_one(lambda a, y, x: a.op("mul", y, a.op("sub", 1.0, y))),
    "expm1": _of_one(lambda a, y, x: a.op("add", y, 1.0)),
    "log1p": lambda a, y, x: (a.div(a.g, a.op("add", x, 1.0)),),
    "erf": _of_one(
        lambda a, y, x: a.scaled(a.op("exp", a.op("neg", a.op("mul", x, x))), TWO_BY_SQRT_PI)
    ),
    "gelu": _of_one(_gelu),
    "gelu_tanh": _of_one(_gelu_tanh),
    "silu": _of_one(_silu),
    "softplus": _of_one(_softplus),
    "where": _choice,
    # constant between its steps, or no float
    **dict.fromkeys(("floor", "ceil", "trunc", "detach", "to_int", "to_float")),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not")),
    **dict.fromkeys(("floordiv", "truncdiv", "mod")),
    **dict.fromkeys(("bit_and", "bit_or", "bit_xor", "bit_not", "shl", "shr")),
}
