"""The schedule to use when none is given: a table, each row with the reason that chose it.

Rows are tried from the top; the first whose head sizes and needs match is taken. What a variant
needs of registers decides: scores and element loads live beside the accumulators, and three
warpgroups leave 160 registers each where two leave 240. "spills" is what the compiler says.

`python -m cutedsl_fa3 tune --table` measures every row beside its alternatives, all in one record.
A row that names a record says what `evidence.why` makes of it: TFLOP/s with the variants that it
serves (`evidence.VARIANTS`, in that order), then the speed of the best others over its own. It is
the fastest there or within 1% of it; a test holds both. The rows without were seen in one sweep on
an H200 that kept no record: TFLOP/s at S = 8192, bf16, of full attention unless another variant is
named, of this row and of other choices.
"""

from __future__ import annotations

from dataclasses import dataclass

from .pipelines import Overlap, Schedule
from .problem import Problem
from .variant import Variant
from .variant.describe import most_spans


@dataclass(frozen=True)
class Row:
    """A schedule for tiles of up to these head sizes, for variants that need no more than `needs`.

    `record` is the file in notebooks/data that chose it, `why` what that says.
    """

    head_dim: int
    head_dim_v: int
    needs: str
    tile_m: int
    tile_n: int
    consumers: int
    overlap: Overlap
    why: str
    record: str = ""

    def schedule(self, masked: bool) -> Schedule:
        """The whole schedule, for variants with or without a mask."""
        return Schedule(
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            stages=2,
            consumers=self.consumers,
            overlap=self.overlap,
            head_group=HEAD_GROUP if masked else 1,
        )


NEEDS = ("nothing", "light", "uniform", "elements", "much")
LIGHT = 3  # operations of one instruction each, beyond which a score is not "light"
SIMPLE = ("add", "sub", "mul", "neg", "to_float")
MUCH = 8  # operations on floats, beyond which a score counts as "much"

FIRST = "tune-h200-20261129-195356.json"

TABLE = (
    Row(64, 64, "nothing", 192, 128, 3, "both", "549 509; overlap intra 0.99", FIRST),
    Row(64, 64, "light", 192, 128, 3, "both", "causal ALiBi 422; 128 x 128 by two: 370"),
    Row(64, 64, "uniform", 128, 128, 2, "intra", "192 x 128 spills with `or` or a tanh"),
    Row(64, 64, "elements", 128, 112, 2, "intra", "a bias by distance 252; tile_n 128: 240"),
    Row(64, 64, "much", 128, 96, 2, "intra", "128 x 128 spills with 20 operations a score"),
    Row(96, 96, "uniform", 128, 128, 2, "intra", "568; tile_n 160: 548; 192 x 80 by three: 578"),
    Row(96, 96, "elements", 128, 112, 2, "intra", "a bias by distance 312; tile_n 128: 310"),
    Row(96, 96, "much", 128, 96, 2, "intra", "tile_n 128 spills with 20 operations a score"),
    Row(128, 128, "uniform", 128, 128, 2, "intra", "661 646; overlap both 1.00", FIRST),
    Row(128, 128, "elements", 128, 112, 2, "intra", "tile_n 128 spills if a mask loads elements"),
    Row(128, 128, "much", 128, 96, 2, "intra", "tile_n 112 spills with 20 operations a score"),
    Row(192, 128, "uniform", 128, 128, 2, "intra", "757; tile_n 112: 636, 96: 608"),
    Row(192, 128, "elements", 128, 112, 2, "intra", "tile_n 128 spills if a mask loads elements"),
    Row(192, 128, "much", 128, 96, 2, "intra", "tile_n 128 spills with 20 operations a score"),
    Row(192, 192, "nothing", 128, 112, 2, "intra", "716; tile_n 96: 647, 64: 736, but causal less"),
    Row(192, 192, "elements", 128, 96, 2, "intra", "causal ALiBi 607; tile_n 112: 575"),
    Row(192, 192, "much", 128, 64, 2, "intra", "20 operations a score 180; tile_n 96: 172"),
    Row(256, 256, "uniform", 128, 80, 2, "intra", "696; more keys do not fit shared memory"),
    Row(256, 256, "elements", 128, 64, 2, "intra", "tile_n 80 spills if a mask loads elements"),
    Row(256, 256, "much", 128, 48, 2, "intra", "fewer registers for scores"),
)

# Heads side by side where the mask skips tiles, so that their K and V stay in L2 together: causal
# at d64 509 (one head after the other: 487), at d128 646 (629), in the same record.
HEAD_GROUP = 8


def needs(variant: Variant) -> str:
    """What a variant's functions hold in registers besides the accumulators.

    "nothing": a mask of positions without `or`, with one span of visible keys. "light": besides,
    a score of a few additions and products, such as ALiBi. "uniform": any other score or mask of
    positions, or captured tensors read once a tile. "elements": captured tensors read by query or
    key. "much": more than a few operations on floats for each score.
    """
    roles = ("score", "mask", "weight")
    graphs = [variant.graphs[role] for role in roles if role in variant.graphs]
    nodes = [node for graph in graphs for node in graph.nodes]
    each = [node for node in nodes if node.depends & {"score", "q", "k"}]
    if sum(node.dtype == "float" for node in each) > MUCH:
        return "much"
    if any(node.op == "load" for node in each):
        return "elements"
    of_mask = variant.mask.nodes if variant.mask is not None else ()
    if any(node.op in ("load", "or") for node in of_mask) or most_spans(variant.mask) > 1:
        return "uniform"
    floats = [node for node in each if node.dtype == "float" and node.op != "input"]
    if len(floats) > LIGHT or any(node.op not in SIMPLE for node in floats):
        return "uniform"
    return "light" if variant.score is not None or variant.weight is not None else "nothing"


def serving_row(variant: Variant, problem: Problem) -> Row:
    """The first row of the table that serves this variant and problem."""
    d, dv = problem.tile_dims
    level = NEEDS.index(needs(variant))
    serving = (r for r in TABLE if d <= r.head_dim and dv <= r.head_dim_v)
    return next(r for r in serving if level <= NEEDS.index(r.needs))


def default_schedule(variant: Variant, problem: Problem) -> Schedule:
    """The schedule of the row that serves this variant and problem."""
    return serving_row(variant, problem).schedule(masked=variant.mask is not None)
