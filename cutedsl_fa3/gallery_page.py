"""The page of every shipped mask and score: its picture, its code, the tiles visited for it.

An example is the code that the page shows; it is run at one length for the picture and at another
for the table. `python -m cutedsl_fa3 gallery` writes page and pictures to `notebooks/gallery`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import gallery, masks, packing, scores
from .variant import Elementwise, Variant
from .variant.evaluate import evaluate

FOLDER = Path(__file__).resolve().parent.parent / "notebooks" / "gallery"
COMMAND = "python -m cutedsl_fa3 gallery"

SHEET = "masks.png"  # all masks in one picture

DRAWN, DRAWN_TILE = 64, (8, 8)
COUNTED = 4096


@dataclass(frozen=True)
class Example:
    """Code that ends in an expression: a mask, a score, or a softmax for weights."""

    kind: str
    name: str
    code: str

    def variant(self, n: int) -> Variant:
        *lines, last = self.code.splitlines()
        scope = {"torch": torch, "masks": masks, "packing": packing, "scores": scores, "n": n}
        scope |= {"Elementwise": Elementwise}
        exec("\n".join([*SETUP.splitlines(), *lines]), scope)
        return Variant(**{self.kind: eval(last, scope)})


SETUP = """\
offsets = (torch.tensor([0, 0.08, 0.33, 0.49, 0.72, 1]) * n).int()  # as cu_seqlens
ids = packing.document_ids(offsets, n)"""

EXAMPLES = (
    Example("mask", "full", "masks.full"),
    Example("mask", "none", "masks.none"),
    Example("mask", "causal", "masks.causal"),
    Example("mask", "window", "masks.window(n // 5, 0)"),
    Example("mask", "prefix", "masks.prefix(n // 3)"),
    Example("mask", "prefix_lm", "masks.prefix_lm(n // 3)"),
    Example(
        "mask",
        "padding",
        "lengths = torch.tensor([n * 3 // 5])\nmasks.padding(lengths, lengths)",
    ),
    Example("mask", "documents", "masks.documents(ids)"),
    Example("mask", "and_masks", "masks.and_masks(masks.causal, masks.documents(ids))"),
    Example("mask", "packed", "masks.packed(masks.prefix_lm(n // 10), ids, offsets)"),
    Example(
        "mask",
        "spans",
        "images = torch.where(ids % 2 == 1, ids, -1)\nmasks.spans(*packing.span_bounds(images))",
    ),
    Example(
        "mask",
        "or_masks",
        "images = torch.where(ids % 2 == 1, ids, -1)\n"
        "masks.or_masks(masks.causal, masks.spans(*packing.span_bounds(images)))",
    ),
    Example(
        "mask",
        "tree",
        "first, *others = offsets[2:-1].tolist()  # a prompt, and where its continuations start\n"
        "parents = list(range(-1, n - 1))\n"
        "parents = [first - 1 if i in others else p for i, p in enumerate(parents)]\n"
        "masks.tree(packing.tree_ends(parents))",
    ),
    Example("mask", "chunked", "masks.chunked(n // 5)"),
    Example("mask", "block_causal", "masks.block_causal(n // 7)"),
    Example("mask", "block_strided", "masks.block_strided(n // 6, 3)"),
    Example("mask", "dilated", "masks.dilated(n // 4, 3)"),
    Example("mask", "streaming", "masks.streaming(2, n // 5)"),
    Example("mask", "global_window", "masks.global_window(2, n // 8, n // 8)"),
    Example(
        "mask",
        "neighborhood",
        "side = int(n**0.5)\nmasks.neighborhood((side, side), side // 4 | 1)",
    ),
    Example(
        "mask",
        "block_sparse",
        "table = torch.arange(64).reshape(8, 8) * 5 % 7 < 2\nmasks.block_sparse(table, n // 8)",
    ),
    Example("mask", "not_mask", "masks.not_mask(masks.window(n // 5, n // 5))"),
    Example("score", "alibi", "scores.alibi(scores.alibi_slopes(8))"),
    Example("score", "softcap", "scores.softcap(5.0)"),
    Example(
        "score",
        "bias",
        "q, k = torch.arange(n)[:, None], torch.arange(n)\n"
        "scores.bias(torch.sin(q / 9) * torch.cos(k / 5))",
    ),
    Example(
        "score",
        "relative_bias",
        "scores.relative_bias(torch.cos(torch.arange(-n, n + 1) / 6)[None])",
    ),
    Example(
        "score",
        "t5_bias",
        "weight = -(torch.arange(32.0) % 16)[:, None]  # (buckets, heads)\n"
        "scores.t5_bias(weight, bidirectional=True, max_distance=n)",
    ),
    Example("score", "temperature", "scores.temperature(torch.tensor(2.0))"),
    Example("score", "log_length", "scores.log_length(n // 4)"),
    Example("score", "decay", "scores.decay(torch.tensor([0.9]))"),
    Example(
        "score",
        "chain",
        "scores.chain(scores.alibi(scores.alibi_slopes(8)), scores.softcap(5.0))",
    ),
    Example("softmax", "sigmoid", "Elementwise(lambda s: torch.sigmoid(s - 3))"),
    Example("softmax", "relu", "Elementwise(lambda s: torch.relu(s) ** 2)"),
)

# The same pairs in two forms, for many documents whose lengths grow: how much the form matters.
MANY = """\
offsets = (torch.linspace(0, 1, 17) ** 1.5 * n).int()
ids = packing.document_ids(offsets, n)
"""
WRITTEN_OUT = (
    Example("mask", "ids", MANY + "lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q)"),
    Example(
        "mask",
        "positions",
        MANY
        + "lambda b, h, q, k: (ids[q] == ids[k]) & (q - offsets[ids[q]] >= k - offsets[ids[k]])",
    ),
)

WEIGHTS = {
    "sigmoid": "Sigmoid attention: every key weighs on its own, and nothing is normalised.",
    "relu": "Squared ReLU: keys whose score is not positive weigh nothing.",
}


@dataclass(frozen=True)
class Visits:
    """How many tiles a mask needs, and how many a launch visits; `full` ones without the mask."""

    code: str
    tile: tuple[int, int]
    all: int
    needed: int
    visited: int
    needed_full: int
    full: int

    @property
    def ratio(self) -> float:
        return self.visited / self.needed if self.needed else 1.0 + self.visited


def counted(example: Example, n: int, tile: tuple[int, int] | None = None) -> Visits:
    """Tiles visited and, by brute force, needed; by default those of the kernel at head_dim 128."""
    variant = example.variant(n)
    tile = gallery.default_tile(variant) if tile is None else tile
    visited, full = gallery.visited_tiles(variant, n, n, tile)
    some, every = needed_tiles(variant, n, n, tile)
    return Visits(
        example.code.splitlines()[-1],
        tile,
        visited.numel(),
        int(some.sum()),
        int(visited.sum()),
        int(every.sum()),
        int(full.sum()),
    )


def needed_tiles(
    variant: Variant, seqlen_q: int, seqlen_k: int, tile: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles have a visible pair, and which are whole and have no hidden one: every pair.

    Shape: two of (m_blocks, n_blocks) bool.
    """
    tile_m, tile_n = tile
    keys = torch.arange(seqlen_k, dtype=torch.int32)
    n_blocks = -(-seqlen_k // tile_n)
    some, every = [], []
    for q0 in range(0, seqlen_q, tile_m):
        queries = torch.arange(q0, min(q0 + tile_m, seqlen_q), dtype=torch.int32)[:, None]
        seen = torch.ones((), dtype=torch.bool)
        if variant.mask is not None:
            inputs = {"b": 0, "h": 0, "q": queries, "k": keys}
            inputs |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
            seen = evaluate(variant.mask, inputs, variant.captures)
        seen = seen.expand(len(queries), seqlen_k)
        seen = torch.nn.functional.pad(seen, (0, n_blocks * tile_n - seqlen_k))
        seen = seen.unflatten(1, (n_blocks, tile_n))
        some.append(seen.any(2).any(0))
        every.append(seen.all(2).all(0))
    return torch.stack(some), torch.stack(every)


def drawn(examples: Sequence[Example]) -> dict[str, gallery.Picture]:
    """The picture of each, by name: of a mask its pairs, of others what becomes of a score."""
    return {one.name: _drawn(one)[-1] for one in examples}


def _drawn(example: Example) -> list[gallery.Picture]:
    return gallery.pictures(example.variant(DRAWN), DRAWN, DRAWN, tile=DRAWN_TILE)


# The page


def page(rows: Sequence[Visits]) -> str:
    """The text of the page, with these rows of its table."""
    return "\n".join([INTRODUCTION, *_sections(), *_table(rows)])


def table_rows() -> list[Visits]:
    """The rows of the table; by brute force."""
    examples = (*EXAMPLES, *WRITTEN_OUT)
    return [counted(example, COUNTED) for example in examples if example.kind == "mask"]


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False)


_MADE = f"""Made by `{COMMAND}` from the code that it shows; a test holds it to that. An own variant
is drawn the same way in a notebook, at the lengths and tiles that it is given (by default the
kernel's, at head_dim 128):"""

_SIZES = f"""The pictures have {DRAWN} queries and {DRAWN} keys in tiles of {DRAWN_TILE[0]} x
{DRAWN_TILE[1]}, smaller than a kernel's so that pairs can be seen. `n` is {DRAWN} in them and
{COUNTED} in the [table](#tiles-visited) of what real tiles visit;
[notebook 8](../08_variants.ipynb) has what each costs. Several examples share the documents of
these first lines:"""

INTRODUCTION = f"""\
# Masks and scores in pictures

{_paragraph(_MADE)}

```python
fa3.gallery.draw(variant, seqlen_q, seqlen_k)
```

{_paragraph(_SIZES)}

```python
import torch
from cutedsl_fa3 import Elementwise, masks, packing, scores

{SETUP}
```
"""

_TITLES = {
    "mask": """\
## Masks

`Variant(mask=...)`. Tiles that show nothing are not loaded, and where every pair is seen no mask is
computed. No block mask is made: both are found in the function.

![colours](legend.png)
""",
    "score": """\
## Scores

`Variant(score=...)`. What is added to a score of 1 by query and key, or a curve where the score
alone matters.
""",
    "softmax": """\
## Weights without a softmax

`Variant(softmax=Elementwise(f))` weighs each key that is seen by a function of its score.
""",
}

_NEEDED = f"""{COUNTED} queries and keys, tiles of the default schedule at head_dim 128. A tile is
needed if some pair in it is seen, by brute force over all pairs. "Without mask" counts the tiles
visited without computing the mask, of all in which every pair is seen."""

_FORMS = """The last two rows are written out. Both show causal documents, of 16 lengths that grow:
by their ids, and by the positions within a document."""

_COUNTED = f"""\
## Tiles visited

{_paragraph(_NEEDED)}

{_paragraph(_FORMS)}

| mask | tile | all | needed | visited | visited / needed | without mask |
| --- | --- | --- | --- | --- | --- | --- |"""


def _sections() -> Iterator[str]:
    kind = ""
    for example in EXAMPLES:
        if example.kind != kind:
            kind = example.kind
            yield _TITLES[kind]
        yield f"### {example.name}\n\n{_said(example)}\n"
        yield f"```python\n{example.code}\n```\n"
        yield f"![{example.name}]({example.name}.png)\n"


def _said(example: Example) -> str:
    """The first sentence of the function's docstring."""
    if example.kind == "softmax":
        return WEIGHTS[example.name]
    function = getattr(masks if example.kind == "mask" else scores, example.name)
    return (inspect.getdoc(function) or "").partition("\n\n")[0]


def _table(rows: Sequence[Visits]) -> Iterator[str]:
    yield _COUNTED
    for row in rows:
        code = row.code.replace("|", "\\|")  # else a cell would end there
        ratio = f"{row.ratio:.2f}" if row.needed else "-"
        yield (
            f"| `{code}` | {row.tile[0]} x {row.tile[1]} | {row.all} | {row.needed} "
            f"| {row.visited} | {ratio} | {row.full} of {row.needed_full} |"
        )
    yield ""


def write(folder: Path = FOLDER) -> list[Path]:
    """Writes page and pictures; what it wrote.

    Raises: ModuleNotFoundError without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "legend.png", folder / "README.md", folder / SHEET]
    gallery.save(gallery.legend(), [], written[0])
    masks_drawn = drawn([example for example in EXAMPLES if example.kind == "mask"])
    gallery.save(gallery.sheet(masks_drawn, 6), list(masks_drawn.values()), written[2])
    for example in EXAMPLES:
        parts = _drawn(example)
        written.append(folder / f"{example.name}.png")
        gallery.save(gallery.figure(parts), parts, written[-1])
    written[1].write_text(page(table_rows()))
    return written
