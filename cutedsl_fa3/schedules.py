"""The schedule to use when none is given: a table, each row with the reason that chose it.

Rows are tried from the top; the first whose head sizes and needs match is taken. What a variant
needs of registers decides: scores and element loads live beside the accumulators, and three
warpgroups leave 160 registers each where two leave 240. "spills" is what the compiler says.

`python -m cutedsl_fa3 tune --table` measures every row beside its alternatives, all in one record.
A row that names a record says what `evidence.why` makes of it: TFLOP/s with the variants that it
serves (`evidence.VARIANTS`, in that order), then the speed of the best others over its own. It is
the fastest there or within 1% of it; a test holds both. The rows without were seen in sweeps on an
H200 that kept no record: this row's and other choices' time at S = 8192, TFLOP/s of full attention
(and causal) at S = 16384, or speed over this row's. "not tuned anew" are tiles of a time when
larger ones spilled, which the compiler denies today.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .ledger.rates import SMS
from .pipelines import MAX_HEAD_GROUP, PACKS, Overlap, Schedule, Store
from .problem import DTYPES, Problem
from .variant import Variant
from .variant.describe import differs_by_head, most_edges, most_spans


@dataclass(frozen=True)
class Extents:
    """What a schedule may depend on besides types and head sizes."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Row:
    """A schedule for tiles of up to these head sizes, for variants that need no more than `needs`.

    With `masked` it is for variants with a mask alone, or without one; with `keys` for no fewer and
    no more keys than these; `narrow` is for variants with a mask. `record` is the file in
    notebooks/data that chose it, `why` what that says.
    """

    head_dim: int
    head_dim_v: int
    needs: str
    tile_m: int
    tile_n: int
    consumers: int
    overlap: Overlap
    early: int
    store: Store
    lazy: bool
    why: str
    residents: int = 1
    masked: bool | None = None
    keys: tuple[int, int] | None = None
    record: str = ""
    narrow: bool = False

    def serves(self, problem: Problem, level: str, masked: bool, seqlen_k: int | None) -> bool:
        """Whether it is for such a call; `seqlen_k` None is any length."""
        if self.masked not in (None, masked):
            return False
        if self.keys is not None:
            least, most = self.keys
            if seqlen_k is None or not least <= seqlen_k <= most:
                return False
        d, dv = problem.tile_dims
        fits = d <= self.head_dim and dv <= self.head_dim_v
        return fits and NEEDS.index(level) <= NEEDS.index(self.needs)

    def schedule(self, masked: bool) -> Schedule:
        """The whole schedule, for variants with or without a mask."""
        return Schedule(
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            stages=2,
            consumers=self.consumers,
            overlap=self.overlap,
            head_group=HEAD_GROUP if masked else 1,
            persistent=True,
            residents=self.residents,
            store=self.store,
            early=self.early,
            lazy=self.lazy,
            narrow=self.narrow and masked,
        )


MOST_KEYS = 2**31 - 1
NEEDS = ("nothing", "light", "weights", "mask", "uniform", "tables", "elements", "much")
LIGHT = 3  # operations of one instruction each, beyond which a score is not "light"
SIMPLE = ("add", "sub", "mul", "neg", "to_float")
MUCH = 8  # operations on floats, beyond which a score counts as "much"

# Head sizes, needs; tile_m, tile_n, consumers, overlap; early, store, lazy; why.
TABLE = (
    Row(64, 64, "light", 192, 128, 3, "both", 0, "tma", False, "narrow off 0.99", narrow=True),
    Row(64, 64, "weights", 192, 96, 3, "both", 0, "tma", False, "sigmoid 0.63 ms; 128 x 128: 0.67"),
    Row(64, 64, "uniform", 64, 64, 1, "none", 0, "tma", False, "window 0.17 ms; 128: 0.19", 4),
    Row(64, 64, "tables", 192, 96, 3, "both", 0, "tma", False, "bias 0.69 ms; 128 x 128: 0.79"),
    Row(64, 64, "elements", 64, 64, 1, "intra", 0, "tma", False, "documents 0.21 ms; 128: 0.25", 3),
    Row(64, 64, "much", 128, 96, 2, "intra", 2, "tma", False, "not tuned anew"),
    Row(64, 128, "mask", 128, 128, 2, "intra", 1, "tma", False, "narrow spills in fp16"),
    Row(96, 96, "nothing", 192, 96, 3, "both", 0, "tma", True, "617; 128 x 128: 573"),
    Row(96, 96, "uniform", 128, 128, 2, "intra", 2, "tma", False, "tile_n 160: 0.98, 192: 0.99"),
    Row(96, 96, "elements", 128, 112, 2, "intra", 2, "tma", False, "tile_n 128 spills in fp16"),
    Row(96, 96, "much", 128, 96, 2, "intra", 2, "tma", False, "not tuned anew"),
    Row(128, 128, "nothing", 128, 128, 2, "intra", 1, "tma", False, "narrow off 0.98", narrow=True),
    Row(128, 128, "light", 128, 128, 2, "intra", 2, "tma", True, "lazy off 0.97"),
    Row(128, 128, "mask", 128, 128, 2, "intra", 1, "tma", False, "narrow off 0.98", narrow=True),
    Row(128, 128, "uniform", 128, 128, 2, "intra", 1, "tma", False, "narrow spills in fp16"),
    Row(128, 128, "tables", 128, 128, 2, "both", 0, "tma", True, "bias: lazy off 0.98, intra 0.94"),
    Row(128, 64, "elements", 128, 112, 2, "intra", 2, "tma", False, "tile_n 128 spills in fp16"),
    Row(128, 128, "elements", 128, 128, 2, "intra", 2, "tma", False, "documents 0.30 ms; 96: 0.32"),
    Row(128, 128, "much", 128, 96, 2, "intra", 2, "tma", False, "not tuned anew"),
    Row(192, 128, "uniform", 128, 128, 2, "intra", 1, "direct", False, "early 2 0.99"),
    Row(192, 128, "elements", 128, 112, 2, "intra", 2, "direct", False, "not tuned anew"),
    Row(192, 128, "much", 128, 96, 2, "intra", 2, "direct", False, "not tuned anew"),
    Row(192, 192, "nothing", 128, 112, 2, "intra", 2, "direct", True, "793 801; lazy off 788 794"),
    Row(192, 192, "elements", 128, 96, 2, "intra", 2, "direct", True, "tile_n 112 spills in fp16"),
    Row(192, 192, "much", 128, 64, 2, "intra", 2, "direct", True, "not tuned anew"),
    Row(256, 256, "uniform", 128, 80, 2, "both", 0, "direct", True, "789 797; lazy off 745 750"),
    Row(256, 256, "elements", 128, 64, 2, "intra", 2, "direct", True, "not tuned anew"),
    Row(256, 256, "much", 128, 48, 2, "intra", 2, "direct", True, "fewer registers for scores"),
)

# Rows that come before those of their head size. Where a mask leaves out tiles and keys are few, so
# are the tiles of a work tile, and four that are under way at a time fill each other's first and
# last steps. Larger tiles need many keys to pay for what the first and the last of them cost.
FEW, MORE, MANY = (0, 1024), (4096, MOST_KEYS), (8192, MOST_KEYS)
SEVERAL = (2049, MANY[0] - 1)
SPECIAL = (
    Row(64, 64, "weights", 64, 64, 1, "none", 0, "tma", False, "368; 192 x 128: 319", 4, True, FEW),
    Row(64, 64, "nothing", 192, 128, 3, "both", 0, "tma", True, "lazy off 0.99", 1, False, MANY),
    Row(96, 96, "nothing", 192, 112, 3, "intra", 3, "tma", True, "96 keys: 0.98", 1, False, MORE),
    Row(96, 96, "nothing", 192, 96, 3, "intra", 2, "tma", True, "both 0.98, 1.00", 1, False),
    Row(128, 128, "nothing", 128, 128, 2, "intra", 2, "tma", False, "early 1 0.99", 1, False),
    Row(128, 128, "nothing", 128, 160, 2, "intra", 2, "tma", False, "128: 0.99", 1, True, MANY),
    Row(
        128, 128, "nothing", 128, 128, 2, "intra", 1, "tma", False, "narrow 0.99", 1, True, SEVERAL
    ),
)

# Heads side by side where the mask skips tiles, so that their K and V stay in L2 together: causal
# at d64 509 (one head after the other: 487), at d128 646 (629), in the same record; fewer where
# theirs would be more than L2_BYTES: 4 heads 1.015 at d128 with 16,384 keys, 2 heads 1.019 with
# 32,768 and 1.018 at d256 with 16,384, no gain with half of the keys; 0.96 at d96 with 16,384.
# More than 8 while all their K and V are no more than SHORT_BYTES, since the last group's longest
# tiles start late: with 1024 keys 16 heads 1.026 at d256, 64 heads 1.033 at d64, 16 and 32 heads
# 1.003 and 0.996 at d128; with 2048 keys 16 heads 1.010 at d128 (of 32 MiB: 1.010; 64: 0.95).
HEAD_GROUP = 8
L2_BYTES = 48 << 20  # of an H100's or H200's 50 MB
SHORT_BYTES = 16 << 20

# Heads share tiles where that leaves at most so many of a CTA's turns. Each work tile reads all
# keys that it sees, however few of its rows are queries: with two turns for one, few queries take
# twice as long. Fewer tiles than CTAs are no gain, and leave some idle (1.36 times as long with 16
# heads on 8 tiles): notebooks/leads.md.
FEWER = 0.9


def needs(variant: Variant, with_mask: bool = True) -> str:
    """What a variant's functions, its mask among them or not, hold besides the accumulators.

    "nothing": a mask of positions without `or`, with one span of visible keys and one edge.
    "light": besides, a score of a few additions and products, such as ALiBi. "weights": a function
    in place of the softmax. "mask": any other mask of positions, or of what is read of captured
    tensors once a tile, alone. "uniform": one beside a score or weights, or any other score of
    positions and of what is read once a tile. "tables": a score that reads captured tensors by
    query or key. "elements": a mask that does. "much": more than a few operations on floats for
    each score.
    """
    roles = ("score", "mask", "weight") if with_mask else ("score", "weight")
    mask = variant.mask if with_mask else None
    graphs = [variant.graphs[role] for role in roles if role in variant.graphs]
    nodes = [node for graph in graphs for node in graph.nodes]
    each = [node for node in nodes if node.depends & {"score", "q", "k"}]
    if sum(node.dtype == "float" for node in each) > MUCH:
        return "much"
    of_mask = mask.nodes if mask is not None else ()
    if any(node.op == "load" and node in each for node in of_mask):
        return "elements"
    if any(node.op == "load" for node in each):
        return "tables"
    edges = max(most_spans(mask), most_edges(mask))
    if edges > 1 or any(node.op in ("load", "or") for node in of_mask):
        return "mask" if len(graphs) == 1 else "uniform"
    if variant.weight is not None:
        return "weights"
    floats = [node for node in each if node.dtype == "float" and node.op != "input"]
    if len(floats) > LIGHT or any(node.op not in SIMPLE for node in floats):
        return "uniform"
    return "light" if variant.score is not None else "nothing"


def table_fingerprint() -> str:
    """One hash of which schedules the tables here choose and for what; reasons do not count."""
    rows = [
        (row.head_dim, row.head_dim_v, row.needs, row.masked, row.keys, row.schedule(masked))
        for row in (*SPECIAL, *TABLE)
        for masked in (False, True)
    ]
    return hashlib.sha256(repr((rows, LIGHT, MUCH, FEWER)).encode()).hexdigest()


def serving_row(
    variant: Variant,
    problem: Problem,
    seqlen_k: int | None = None,
    special: Iterable[Row] | None = None,
) -> Row:
    """The first row that serves this variant and problem, for any length or one.

    `special`, instead of SPECIAL, come before those of their head size in TABLE.
    """
    level, masked = needs(variant), variant.mask is not None
    before = SPECIAL if special is None else special
    rows = sorted((*before, *TABLE), key=lambda row: row.head_dim)
    return next(row for row in rows if row.serves(problem, level, masked, seqlen_k))


def default_schedule(variant: Variant, problem: Problem, seqlen_k: int | None = None) -> Schedule:
    """The schedule of the row that serves this variant and problem, for any length or one."""
    return serving_row(variant, problem, seqlen_k).schedule(masked=variant.mask is not None)


def schedule_for(variant: Variant, problem: Problem, extents: Extents) -> Schedule:
    """The table's schedule for tensors of these extents."""
    default = default_schedule(variant, problem, extents.seqlen_k)
    if not differs_by_head(variant.mask):
        default = replace(default, pack=packed(default, extents))
    if default.head_group > 1:
        default = replace(default, head_group=head_group(problem, extents, default.pack))
    return default


def head_group(problem: Problem, extents: Extents, pack: int = 1) -> int:
    """How many packs of heads are side by side: HEAD_GROUP, fewer with many keys, more with few."""
    element = DTYPES[problem.dtype].itemsize
    head = extents.seqlen_k * (problem.head_dim + problem.head_dim_v) * element
    shared = max(1, extents.heads // max(1, extents.kv_heads))

    def occupied(packs: int) -> int:
        return -(-packs * pack // shared) * head

    group = HEAD_GROUP
    while group > 1 and occupied(group) > L2_BYTES:
        group //= 2
    while group < MAX_HEAD_GROUP and occupied(2 * group) <= SHORT_BYTES:
        group *= 2
    return group


def packs_of(heads: int, kv_heads: int) -> list[int]:
    """How many heads may share a tile: what divides the number of those that share a key head."""
    group = heads // max(1, kv_heads)
    return [pack for pack in PACKS if group and group % pack == 0]


def packed(schedule: Schedule, extents: Extents) -> int:
    """How many heads of a key head share a tile: as few as leave the fewest turns (`FEWER`)."""
    packs = packs_of(extents.heads, extents.kv_heads)
    turns = {pack: _turns(schedule, extents, pack) for pack in packs}
    best = min(packs, key=lambda pack: (turns[pack], pack), default=1)
    return best if turns and turns[best] <= FEWER * turns[1] else 1


def _turns(schedule: Schedule, extents: Extents, pack: int) -> int:
    """How many work tiles one of the CTAs that a GPU runs at a time has, at most, if all are alike.

    Of an H100 or H200, so that a plan is the same wherever it is made.
    """
    blocks = -(-extents.seqlen_q // (schedule.tile_m // pack))
    tiles = extents.batch * (extents.heads // pack) * blocks
    return -(-tiles // (SMS * schedule.residents))
