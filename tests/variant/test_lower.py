"""The device reader of graphs against the torch reader, on the same graphs and values."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import replace
from inspect import signature

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from on_cpu import COLS, ROWS, for_each, launchable, lowered
from one_thread import OneThread

from cutedsl_fa3 import masks, scores
from cutedsl_fa3.audit import census_of, disassemble
from cutedsl_fa3.compile import compile_kernel
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.variant import Graph, Ref, Variant, device, lower, seqlen_k, seqlen_q
from cutedsl_fa3.variant.bounds import PythonIntegers, QueryTile, key_sets, visit_runs
from cutedsl_fa3.variant.evaluate import evaluate
from cutedsl_fa3.variant.graph import CAPTURE_DTYPES, Builder
from cutedsl_fa3.variant.normalise import normalise
from cutedsl_fa3.variant.ops import OPS
from cutedsl_fa3.variant.variant import _checked

INT32 = -(2**31), 2**31 - 1
N = 96
_generator = torch.Generator().manual_seed(1)


def _integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator, dtype=torch.int32)


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, math.inf, -math.inf, math.nan, 3e4, -1e-3])
INPUTS = {
    "score": torch.cat(
        [SPECIAL, torch.randn(N * ROWS * COLS - len(SPECIAL), generator=_generator) * 8]
    ).reshape(N, ROWS, COLS),
    "q": _integers(-6, 200, N, ROWS),
    "k": _integers(-6, 200, N, COLS),
    "b": _integers(0, 4, N),
    "h": _integers(0, 8, N),
    "seqlen_q": _integers(0, 300, N),
    "seqlen_k": _integers(0, 300, N),
}
BROADCAST = {
    "score": INPUTS["score"],
    "q": INPUTS["q"][:, :, None],
    "k": INPUTS["k"][:, None, :],
    **{name: INPUTS[name][:, None, None] for name in ("b", "h", "seqlen_q", "seqlen_k")},
}

# One captured tensor of every type, of ranks 0 to 2.
CAPTURES = (
    torch.randn(5, generator=_generator),
    torch.randn(3, 4, generator=_generator).bfloat16(),
    torch.randn(6, generator=_generator).half(),
    torch.tensor([5, -3, 2**31 - 1, -(2**31), 0, 77, 1]),
    torch.tensor([[4, -4], [9, 0]], dtype=torch.int32),
    torch.tensor([300, -300, 7], dtype=torch.int16),
    torch.tensor([-128, 127, 3], dtype=torch.int8),
    torch.tensor([255, 0, 128, 9], dtype=torch.uint8),
    torch.tensor([True, False, False, True, True]),
    torch.tensor(1.25),
    torch.tensor(-9, dtype=torch.int32),
)


def expected(graph: Graph, captures=CAPTURES) -> torch.Tensor:
    """The torch reader's result for every element."""
    return torch.broadcast_to(evaluate(graph, BROADCAST, captures), (N, ROWS, COLS))


def defined(graph: Graph, captures=CAPTURES) -> torch.Tensor:
    """Where no step leaves what 32-bit integers and shifts are defined for."""
    values = [expected(Graph(graph.nodes, i), captures) for i in range(len(graph.nodes))]
    ok = torch.ones(N, ROWS, COLS, dtype=torch.bool)
    for node, value in zip(graph.nodes, values, strict=True):
        if node.dtype == "int":
            ok &= (value >= INT32[0]) & (value <= INT32[1])
        if node.op == "to_int" and isinstance(node.args[0], Ref):
            whole = values[node.args[0].id].float()
            ok &= whole.isfinite() & (whole.abs() < 2.0**31)
    return ok


def same(found: torch.Tensor, wanted: torch.Tensor, where: torch.Tensor, rtol: float = 0.0) -> None:
    """Equal (NaN as NaN), or within `rtol` of the larger of the value and the fp32 step at 1."""
    if not wanted.is_floating_point():
        assert torch.equal(found.long()[where], wanted.long()[where])
        return
    torch.testing.assert_close(
        found[where], wanted[where], rtol=rtol, atol=rtol * 1e-1, equal_nan=True
    )


def test_every_operation_has_a_device_reader_and_no_other_has():
    assert set(lower.LOWER) == set(OPS)


def test_every_type_that_may_be_captured_can_be_read_on_the_device():
    assert set(lower.CAPTURE_ELEMENTS) == set(CAPTURE_DTYPES)


# Random graphs of operations whose results are exact.

INT_LEAVES = ("b", "h", "q", "k", "seqlen_q", "seqlen_k")
INT_BINARY = ("add", "sub", "mul", "minimum", "maximum", "bit_and", "bit_or", "bit_xor")
DIVISIONS = ("floordiv", "truncdiv", "mod", "fmod")
ORDERS = ("lt", "le", "gt", "ge", "eq", "ne")


class Drawn:
    """Draws a typed expression into a builder; divisors are never 0 and shifts are in range."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.b = Builder()

    def value(self, kind: str, depth: int):
        return getattr(self, f"{kind}_")(depth)

    def pick(self, *names: str) -> str:
        return self.draw(st.sampled_from(names))

    def load(self, kind: str, depth: int):
        fitting = [i for i, t in enumerate(CAPTURES) if CAPTURE_DTYPES[t.dtype] == kind]
        number = self.draw(st.sampled_from(fitting))
        indices = tuple(self.int_(depth - 1) for _ in range(CAPTURES[number].dim()))
        return self.b.load(number, indices, kind)

    def divisor(self, depth: int):
        if self.draw(st.booleans()):
            return self.draw(st.integers(2, 90)) * self.draw(st.sampled_from([1, -1]))
        return self.b.emit("bit_or", self.b.emit("bit_and", self.int_(depth), -4), 2)

    def int_(self, depth: int):
        if depth <= 0:
            if self.draw(st.integers(0, 4)) == 0:
                return self.draw(st.integers(-40, 40))
            return self.b.input(self.pick(*INT_LEAVES))
        form = self.pick("binary", "division", "unary", "shift", "where", "convert", "load")
        if form == "binary":
            return self.b.emit(self.pick(*INT_BINARY), self.int_(depth - 1), self.int_(depth - 1))
        if form == "division":
            return self.b.emit(self.pick(*DIVISIONS), self.int_(depth - 1), self.divisor(depth - 1))
        if form == "unary":
            return self.b.emit(self.pick("neg", "abs", "bit_not"), self.int_(depth - 1))
        if form == "shift":
            count = self.draw(st.integers(0, 31))
            if self.draw(st.booleans()):
                count = self.b.emit("bit_and", self.int_(depth - 1), 7)
            return self.b.emit(self.pick("shl", "shr"), self.int_(depth - 1), count)
        if form == "where":
            return self.where("int", depth)
        if form == "convert":
            return self.b.convert(self.value(self.pick("bool", "float"), depth - 1), "int")
        return self.load("int", depth)

    def bool_(self, depth: int):
        if depth <= 0:
            return self.b.emit(self.pick(*ORDERS), self.b.input("q"), self.b.input("k"))
        form = self.pick("order", "logic", "not", "where", "load", "convert")
        if form == "order":
            kind = self.pick("int", "float")
            pair = self.value(kind, depth - 1), self.value(kind, depth - 1)
            return self.b.emit(self.pick(*ORDERS), *pair)
        if form == "logic":
            return self.b.emit(
                self.pick("and", "or", "xor"), self.bool_(depth - 1), self.bool_(depth - 1)
            )
        if form == "not":
            return self.b.emit("not", self.bool_(depth - 1))
        if form == "where":
            return self.where("bool", depth)
        if form == "convert":
            return self.b.convert(self.int_(depth - 1), "bool")
        return self.load("bool", depth)

    def float_(self, depth: int):
        if depth <= 0:
            if self.draw(st.integers(0, 2)) == 0:
                return self.draw(st.sampled_from([0.5, -3.25, 7.0, -1.0, 0.1]))
            return self.b.input("score")
        form = self.pick("binary", "unary", "where", "convert", "load")
        if form == "binary":
            name = self.pick("add", "sub", "mul", "minimum", "maximum")
            return self.b.emit(name, self.float_(depth - 1), self.float_(depth - 1))
        if form == "unary":
            name = self.pick("neg", "abs", "floor", "ceil", "trunc")
            return self.b.emit(name, self.float_(depth - 1))
        if form == "where":
            return self.where("float", depth)
        if form == "convert":
            return self.b.convert(self.value(self.pick("bool", "int"), depth - 1), "float")
        return self.load("float", depth)

    def where(self, kind: str, depth: int):
        values = self.value(kind, depth - 1), self.value(kind, depth - 1)
        return self.b.emit("where", self.bool_(depth - 1), *values)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A graph in the form in which a variant keeps it."""
    drawn = Drawn(draw)
    output = drawn.value(draw(st.sampled_from(["int", "bool", "float"])), draw(st.integers(1, 4)))
    if not isinstance(output, Ref):
        reject()
    try:
        return _checked(normalise(Graph(tuple(drawn.b.nodes), output.id), [*range(11)]), "score")
    except VariantError:
        reject()


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(graphs(), min_size=8, max_size=12))
def test_the_device_reader_computes_what_the_torch_reader_computes(drawn):
    for graph, found in zip(drawn, lowered(drawn, INPUTS, CAPTURES), strict=True):
        same(found, expected(graph), defined(graph))


# What random graphs meet too rarely, or not at all: given as a user writes it.

FLOATS, TABLE, HALVES, LONGS, PAIRS, SHORTS, BYTES, UBYTES, FLAGS, SCALAR, COUNT = CAPTURES

WRITTEN = {
    "floor division of negatives": lambda s, b, h, q, k: (q - k) // 7,
    "floor division by negatives": lambda s, b, h, q, k: (q - k) // -7,
    "floor division by 1 and -1": lambda s, b, h, q, k: (q - 100) // (1 - 2 * (h & 1)),
    "remainder of negatives": lambda s, b, h, q, k: (q - k) % 7,
    "remainder by negatives": lambda s, b, h, q, k: (q - k) % -7,
    "fmod of ints": lambda s, b, h, q, k: torch.fmod(q - k, 7),
    "fmod by negatives": lambda s, b, h, q, k: torch.fmod(q - k, -7),
    "truncated division": lambda s, b, h, q, k: torch.div(q - k, 7, rounding_mode="trunc"),
    "truncated division by negatives": lambda s, b, h, q, k: torch.div(
        q - k, -7, rounding_mode="trunc"
    ),
    "shifts of negatives": lambda s, b, h, q, k: ((q - k) >> 3) + ((q - k) << 5),
    "shift by a value": lambda s, b, h, q, k: (1 << (h + b)) | (q >> b),
    "conversion towards zero": lambda s, b, h, q, k: torch.clamp(s, -1e6, 1e6).int(),
    "remainder of floats": lambda s, b, h, q, k: torch.fmod(s, 3.0) + torch.fmod(s, -0.75),
    "division by zero": lambda s, b, h, q, k: s / 0.0,
    "division by almost zero": lambda s, b, h, q, k: s / 2.0**-128,
    "division by a power of two": lambda s, b, h, q, k: s / -8.0,
    "rounding": lambda s, b, h, q, k: torch.floor(s) + 4 * torch.ceil(s) + 16 * torch.trunc(s),
    "NaN through minimum": lambda s, b, h, q, k: torch.minimum(s, s * 0.0 + 1.0),
    "NaN through maximum": lambda s, b, h, q, k: torch.maximum(s * 0.0 + 1.0, s),
    "NaN through clamp": lambda s, b, h, q, k: torch.clamp(s, -2.0, 2.0),
    "comparisons with NaN": lambda s, b, h, q, k: torch.where((s < 1) | (s >= 1), s, s != s),
    "loads below the start": lambda s, b, h, q, k: LONGS[q - 1000] + PAIRS[-k, b - 9],
    "loads past the end": lambda s, b, h, q, k: LONGS[q + 1000] - PAIRS[k + 5, h + 77],
    "loads around both ends": lambda s, b, h, q, k: FLOATS[q - k] + TABLE[k - q, q - 100],
    "64-bit ints": lambda s, b, h, q, k: torch.where(LONGS[k % 7] > LONGS[q % 7], q, k),
    "16-bit ints": lambda s, b, h, q, k: SHORTS[q] * 2 + SHORTS[k % 3],
    "signed bytes": lambda s, b, h, q, k: BYTES[q % 3] + BYTES[k % 3],
    "unsigned bytes": lambda s, b, h, q, k: UBYTES[q % 4] - UBYTES[k % 4],
    "flags": lambda s, b, h, q, k: torch.where(FLAGS[q % 5] & ~FLAGS[k % 5], 1.5, s),
    "halves": lambda s, b, h, q, k: HALVES[q % 6] + TABLE[b, h % 4],
    "0-d floats": lambda s, b, h, q, k: s + SCALAR,
    "0-d ints": lambda s, b, h, q, k: q * COUNT + k,
    "precedence as Python's": lambda s, b, h, q, k: -q // 2 + k * 3 % 5 - 7 & 255 | h << 1 ^ b,
    "comparisons bind less than bits": lambda b, h, q, k: (q & 3 == k) | (q + 1 > k),
    "numbers fold": lambda s, b, h, q, k: q * (3 + 4 * 2 - 5 // 2) + (7 - 9) // 2 * k,
    "numbers on the left": lambda s, b, h, q, k: 1000 - q - (2 << b) % 3,
    "bools are numbers": lambda s, b, h, q, k: (q > k) + (k > 3) * 2 + s * (q == k),
    "lengths": lambda b, h, q, k: k <= q + (seqlen_k - seqlen_q),
    "true division of ints": lambda s, b, h, q, k: q / 4 - k / 8,
}


def as_variant(function) -> Variant:
    """A function of four positions is a mask, one of five a score."""
    is_mask = len(signature(function).parameters) == 4
    return Variant(mask=function) if is_mask else Variant(score=function)


def graph_of(variant: Variant) -> Graph:
    return variant.mask or variant.score


@pytest.fixture(scope="module")
def written() -> dict[str, tuple[Variant, torch.Tensor]]:
    """Every function of WRITTEN as a variant, and what the device reader makes of it."""
    variants = {name: as_variant(function) for name, function in WRITTEN.items()}
    captures, numbers = [], {}
    for tensor in (t for v in variants.values() for t in v.captures):
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(captures)
            captures.append(tensor)

    def shared(variant: Variant) -> Graph:
        mine = [numbers[id(tensor)] for tensor in variant.captures]
        nodes = tuple(
            n if n.op != "load" else replace(n, args=(mine[n.args[0]], *n.args[1:]))
            for n in graph_of(variant).nodes
        )
        return Graph(nodes, graph_of(variant).output)

    results = lowered([shared(v) for v in variants.values()], INPUTS, captures)
    return dict(zip(variants, zip(variants.values(), results, strict=True), strict=True))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_user_writes_means_on_the_device_what_it_means_in_torch(written, name):
    variant, found = written[name]
    graph, captures = graph_of(variant), variant.captures
    where = defined(graph, captures)
    assert where.sum() > N * ROWS * COLS // 2
    same(found, expected(graph, captures), where)


# Functions that are approximated: relative error 1e-5, and the special values exactly.

POINTS = torch.cat(
    [
        torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30]),
        torch.logspace(-6, 1.9, 60),
        -torch.logspace(-6, 1.9, 60),
    ]
)
FUNCTIONS = [name for name, op in OPS.items() if op.accepts == ("float",) and op.arity == 1]


def at_points(functions: dict[str, Graph]) -> dict[str, torch.Tensor]:
    """The device reader's values of functions of the score at POINTS."""
    count = len(POINTS)
    score = POINTS[:, None, None].expand(count, ROWS, COLS).contiguous()
    inputs = {
        name: score if name == "score" else torch.zeros(count, *t.shape[1:], dtype=torch.int32)
        for name, t in INPUTS.items()
    }
    found = lowered(list(functions.values()), inputs, ())
    return {name: result[:, 0, 0] for name, result in zip(functions, found, strict=True)}


def of_the_score(name: str) -> Graph:
    b = Builder()
    output = b.emit(name, b.input("score"))
    return Graph(tuple(b.nodes), output.id)


@pytest.fixture(scope="module")
def functions() -> dict[str, torch.Tensor]:
    return at_points({name: of_the_score(name) for name in FUNCTIONS})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_float_are_those_of_torch(functions, name):
    wanted = OPS[name].torch(POINTS.double())
    # A result beyond what fp32 holds normally is 0 or infinite on the special-function unit.
    wanted = torch.where(wanted.abs() < 2.0**-126, 0.0 * wanted, wanted).float()
    same(functions[name], wanted, torch.ones_like(POINTS, dtype=torch.bool), rtol=1e-5)


@pytest.mark.parametrize("cap", [30.0, 50.0, 2.0])
def test_a_capped_score_keeps_its_small_values(cap):
    graph = Variant(score=scores.softcap(cap)).score
    found = at_points({"softcap": graph})["softcap"]
    wanted = cap * torch.tanh(POINTS.double() / cap)
    error = (found - wanted).abs()
    assert torch.equal(found.isnan(), POINTS.isnan())
    assert error[~POINTS.isnan()].max() <= cap * 2.0**-22


def test_division_is_that_of_torch():
    def divided(s, b, h, q, k):
        return (s / 3.0) / (s + 100.0) + 2.0 / (s * s + 1.0)

    graph = Variant(score=divided).score
    found = at_points({"div": graph})["div"]
    wanted = divided(POINTS, 0, 0, 0, 0)
    same(found, wanted, torch.ones_like(POINTS, dtype=torch.bool), rtol=1e-5)


# What is computed once.


def counting(patch: pytest.MonkeyPatch, *names: str) -> list[str]:
    calls: list[str] = []
    for name in names:
        function = lower.LOWER[name]

        def counted(*values, name=name, function=function):
            calls.append(name)
            return function(*values)

        patch.setitem(lower.LOWER, name, counted)
    return calls


def fragment_calls(function, rows: int, cols: int, *names: str) -> dict[str, int]:
    """How often each operation is computed for a rows x cols fragment."""
    graph = Variant(score=function).score
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "KINDS", {"bool": bool, "int": int, "float": float})
        calls = counting(patch, *names)
        reader = device.Lowering(graph, (), {"b": 1, "h": 2, "seqlen_q": 50, "seqlen_k": 60})
        memo: dict = {}
        for r in range(rows):
            for c in range(cols):
                reader.at({"score": 0.5, "q": 10 + r, "k": 20 + c, "b": 1, "h": 2}, r, c, memo)
    return {name: calls.count(name) for name in names}


def test_a_value_is_computed_once_where_what_it_depends_on_is_one():
    def mixed(s, b, h, q, k):
        return s + ((h ^ b) | (q & 3) | (k - 5)) * 2.0

    found = fragment_calls(mixed, 2, 32, "bit_xor", "bit_and", "sub", "bit_or", "mul", "add")
    assert found["bit_xor"] == 1  # of the head: once a work tile
    assert found["bit_and"] == 2  # of the query: once a row
    assert found["sub"] == 32  # of the key: once a column
    assert found["bit_or"] == 2 + 64  # (h ^ b) | row, then | column
    assert found["mul"] == found["add"] == 64


def test_equal_parts_of_one_element_are_computed_once():
    found = fragment_calls(lambda s, b, h, q, k: (s * s) + (s * s), 2, 2, "mul", "add")
    assert found == {"mul": 4, "add": 4}


# Key tiles, from device integers.

LENGTHS = torch.tensor([90, 0, 128, 37], dtype=torch.int64)
SMALL_LENGTHS = torch.tensor([90, 0, 128, 200], dtype=torch.uint8)
VISITED = {
    "everything": Variant(),
    "causal": Variant(mask=masks.causal),
    "window": Variant(mask=masks.window(40, 9)),
    "window or prefix": Variant(mask=lambda b, h, q, k: (k < 20) | ((q - k < 30) & (k <= q))),
    "lengths": Variant(mask=lambda b, h, q, k: (k < LENGTHS[b]) & (k <= q)),
    "lengths in bytes": Variant(mask=lambda b, h, q, k: k < SMALL_LENGTHS[b]),
    "blocks": Variant(mask=lambda b, h, q, k: k // 32 <= q // 32),
    "heads": Variant(mask=lambda b, h, q, k: (h % 2 == 0) | (k <= q)),
}
TILE_N = 16


@pytest.mark.parametrize("name", VISITED)
def test_device_integers_find_the_runs_that_python_integers_find(name):
    variant = VISITED[name]
    tiles = [
        (q0, min(q0 + 31, seqlen_q - 1), b, h, seqlen_q, seqlen_k)
        for seqlen_q, seqlen_k in ((70, 70), (40, 130), (130, 40), (5, 0))
        for q0 in range(0, seqlen_q, 32)
        for b in range(4)
        for h in range(2)
    ]
    most = 130 // TILE_N + 1
    given_tiles = torch.tensor(tiles, dtype=torch.int32)
    counts = torch.full((len(tiles), 2), -1, dtype=torch.int32)
    blocks = torch.full((len(tiles), most), -1, dtype=torch.int32)

    def write(i, given, out):
        tile = QueryTile(*(given[0][i, j] for j in range(6)))
        runs = lower.visits(variant.mask, tile, TILE_N, given[1:])
        out[0][i, 0] = runs.n_partial
        out[0][i, 1] = runs.n_total
        for j in range(most):
            out[1][i, j] = lower.Int32(runs.n_block(lower.Int32(j)))

    for_each(len(tiles), [given_tiles, *map(launchable, variant.captures)], [counts, blocks], write)
    ints = PythonIntegers(variant.captures)
    for row, tile in enumerate(tiles):
        wanted = visit_runs(key_sets(variant.mask, QueryTile(*tile), ints), TILE_N, tile[5], ints)
        assert counts[row].tolist() == [wanted.n_partial, wanted.n_total], tile
        total = operator.index(wanted.n_total)
        assert blocks[row, :total].tolist() == [wanted.n_block(j) for j in range(total)], tile


# What has no CPU counterpart, in the machine code of a kernel.

UNIT = {
    "exp": "EX2",
    "exp2": "EX2",
    "log": "LG2",
    "log2": "LG2",
    "sqrt": "SQRT",
    "rsqrt": "RSQ",
    "sin": "SIN",
    "cos": "COS",
    "tanh": "EX2",
    "sigmoid": "EX2",
    "div": "RCP",
}


@pytest.mark.compile
def test_every_operation_compiles_for_the_gpu_without_spilling():
    compiled = compile_kernel(OneThread(tuple(OPS)))
    assert compiled.resources.spills == 0
    assert compiled.resources.advisories == ()


@pytest.mark.compile
def test_functions_run_on_the_special_function_unit_without_a_slow_path():
    census = census_of(disassemble(compile_kernel(OneThread(tuple(UNIT))).cubin))
    wanted = Counter(UNIT.values())
    found = {unit: census.count(f"MUFU.{unit}") for unit in wanted}
    assert found == wanted | {"RCP": 3}  # of div, and of the quotients in tanh and sigmoid
    assert census.count("CALL") == 0


@pytest.mark.compile
def test_functions_put_together_from_the_unit_call_nothing():
    census = census_of(disassemble(compile_kernel(OneThread(lower.APPROXIMATED)).cubin))
    assert census.count("CALL") == 0


def test_every_function_of_a_float_is_either_on_the_unit_or_a_rounding():
    others = set(FUNCTIONS) - set(UNIT) - set(lower.APPROXIMATED)
    assert others == {"floor", "ceil", "trunc"}
