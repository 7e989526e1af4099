"""Pictures of the newest records: our speed beside the peers', a group of bars for each problem.

Drawn from the files in notebooks/data alone, so no GPU is needed. Each picture names its record
within the PNG, and a test holds it to the newest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cases import PLAIN, shown
from .figures import BLUE, GREY, LABEL, NAVY, PALE, RUST, SAND, TICK, TITLE, figure, tidy
from .peers import OURS
from .record import DATA, ROOT, Record, Row, newest, sustained_beside
from .tables import plain_backward

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = ROOT / "notebooks" / "bars"
INKS = {
    OURS: RUST,
    "fa3": NAVY,
    "fa4": BLUE,
    "cudnn": SAND,
    "fa2": PALE,
    "flex": SAND.hatched(),
    "flex_fa4": PALE.hatched(),
}
DPI = 150
FROM = "Record"  # the key in a PNG that says what it was drawn from
BAR = 0.82  # of the room between two groups


def write(folder: Path = FOLDER, data: Path = DATA) -> list[Path]:
    """Draw every kind of record that there is; the files written.

    Raises: ModuleNotFoundError naming the extra, where matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, draw in PICTURES.items():
        record = newest(data, kind)
        if record is not None:
            path = folder / f"{kind}.png"
            drawing = draw(record, sustained_beside(record, data, kind))
            if drawing is None:
                continue
            # Without its usual date and version, so that the same record gives the same file.
            about = {FROM: origin(record, data, kind), "Software": None}
            drawing.savefig(path, format="png", dpi=DPI, metadata=about)
            written.append(path)
    return written


def origin(record: Record, data: Path, kind: str) -> str:
    """What tells the records of a picture from the others."""
    drawn = (record, sustained_beside(record, data, kind))
    return " ".join(f"{each.meta['commit']} {each.meta['date']}" for each in drawn if each)


def plain(record: Record, sustained: Record | None = None) -> Figure:
    """TFLOP/s of full and of causal attention, by head sizes and length.

    A line across a bar is the speed under sustained load, where that was recorded too.
    """
    rows = list(record.rows)
    providers = _providers(rows)
    variants = list(dict.fromkeys(row.variant for row in rows))
    dims = list(dict.fromkeys((row.head_dim, row.head_dim_v) for row in rows))
    lengths = {d: _lengths(rows, d) for d in dims}
    held = {
        (r.problem, r.provider): r.tflops
        for r in (sustained.rows if sustained else ())
        if isinstance(r, Row)
    }
    drawing = figure(13, 2.9 * len(variants) + 0.9, DPI)
    panels = drawing.subplots(
        len(variants),
        len(dims),
        sharey=True,
        squeeze=False,
        width_ratios=[len(lengths[d]) + 0.3 for d in dims],
    )
    ratios: list[float] = []
    for line, variant in zip(panels, variants, strict=True):
        for axes, d in zip(line, dims, strict=True):
            some = {(r.seqlen_q, r.provider): r for r in rows if _is(r, variant, d)}
            groups = [
                {name: some[n, name].tflops for name in providers if (n, name) in some}
                for n in lengths[d]
            ]
            _groups(axes, groups, providers, [f"{n}" for n in lengths[d]])
            ratios += filter(None, (_ratio(values) for values in groups))
            for (n, name), row in some.items():
                if (row.problem, name) in held:
                    middle = lengths[d].index(n) + _offset(providers, name)
                    _line_across(axes, middle, held[row.problem, name], len(providers))
            axes.set_title(f"{variant}, head_dim {shown(d)}")
            tidy(axes)
        line[0].set_ylabel("TFLOP/s")
    title = f"Attention {rows[0].direction}, {rows[0].dtype}, by sequence length."
    if ratios:
        title += " Above each group: our speed over the best peer's, in the geometric mean "
        title += f"{statistics.geometric_mean(ratios):.2f}."
    title += " Black lines: sustained." if held else ""
    _finish(drawing, record, providers, title)
    return drawing


def variants(record: Record, sustained: Record | None = None) -> Figure:
    """Milliseconds of each variant by head size, in units of our own plain causal."""
    rows = list(record.rows)
    providers = _providers(rows)
    dims = list(dict.fromkeys((row.head_dim, row.head_dim_v) for row in rows))
    names = list(dict.fromkeys(row.variant for row in rows))
    drawing = figure(13, 3.1 * len(dims) + 0.8, DPI)
    panels = drawing.subplots(len(dims), 1, sharex=True, squeeze=False)[:, 0]
    for axes, d in zip(panels, dims, strict=True):
        times = {(r.variant, r.provider): r.ms for r in rows if (r.head_dim, r.head_dim_v) == d}
        unit = times[PLAIN, OURS]
        groups = [
            {p: times[name, p] / unit for p in providers if (name, p) in times} for name in names
        ]
        _groups(axes, groups, providers, names, times=True)
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0.9)
        axes.set_ylabel(f"head_dim {shown(d)}\ntime / our {PLAIN}")
        tidy(axes)
    row = rows[0]
    sizes = f"{row.dtype}, batch {row.batch}, {row.heads} heads, length {row.seqlen_q}"
    note = "Shorter is better; empty: not offered. Above our bar: the best peer's time over ours."
    _finish(drawing, record, providers, f"Variants, {sizes}. {note}")
    return drawing


def backward(record: Record, sustained: Record | None = None) -> Figure | None:
    """As `plain`, of the backward alone; None for a record that has other parts only."""
    rows = tuple(row for row in plain_backward(record) if row == row.beside(row.variant))
    return plain(Record(record.meta, rows), sustained) if rows else None


PICTURES = {"bench": plain, "variants": variants, "backward": backward}


def _providers(rows: Sequence[Row]) -> list[str]:
    """Ours first, then the peers in the order of their inks."""
    found = {row.provider for row in rows}
    return [name for name in INKS if name in found]


def _is(row: Row, variant: str, dims: tuple[int, int]) -> bool:
    return row.variant == variant and (row.head_dim, row.head_dim_v) == dims


def _lengths(rows: Iterable[Row], dims: tuple[int, int]) -> list[int]:
    return sorted({row.seqlen_q for row in rows if (row.head_dim, row.head_dim_v) == dims})


def _groups(
    axes: Axes,
    groups: Sequence[dict[str, float]],
    providers: Sequence[str],
    labels: Sequence[str],
    times: bool = False,
) -> None:
    """A group of bars for each label, and how we compare: above all bars, or of `times` above ours.

    What a provider does not offer leaves its place empty.
    """
    for at, values in enumerate(groups):
        for name, value in values.items():
            middle = at + _offset(providers, name)
            axes.bar(middle, value, _wide(len(providers)), **INKS[name].fill)
        if (ratio := _ratio(values, times)) is not None:
            won = ratio >= 1
            axes.annotate(
                f"{ratio:.2f}",
                (at + _offset(providers, OURS), values[OURS])
                if times
                else (at, max(values.values())),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=TICK,
                color=RUST.colour if won else GREY,
                fontweight="bold" if won else "normal",
            )
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.margins(y=0.12)


def _ratio(values: dict[str, float], times: bool = False) -> float | None:
    """Our speed over the best peer's; None where there is only one of both."""
    peers = [value for name, value in values.items() if name != OURS]
    if OURS not in values or not peers:
        return None
    return min(peers) / values[OURS] if times else values[OURS] / max(peers)


def _offset(providers: Sequence[str], name: str) -> float:
    """Where a provider's bar stands in a group."""
    return (providers.index(name) + 0.5) * BAR / len(providers) - BAR / 2


def _wide(providers: int) -> float:
    return 0.92 * BAR / providers


def _line_across(axes: Axes, middle: float, value: float, providers: int) -> None:
    half = _wide(providers) / 2
    axes.hlines(value, middle - half, middle + half, color="black", linewidth=1.2, zorder=3)


def _finish(drawing: Figure, record: Record, providers: Sequence[str], title: str) -> None:
    """The title, what each colour is, and where the numbers come from."""
    from matplotlib.patches import Patch

    meta = record.meta
    peers = meta.get("peers", {})
    handles = [
        Patch(**INKS[name].fill, label=f"{name} {peers[name]}" if name in peers else name)
        for name in providers
    ]
    drawing.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    drawing.suptitle(title, fontsize=TITLE, x=0.01, ha="left")
    drawing.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles),
        fontsize=LABEL,
        frameon=False,
        handlelength=1.2,
    )
    drawing.supxlabel(
        f"{meta['device']}, driver {meta['driver']}, {meta['date'][:10]}, "
        f"commit {meta['commit'][:10]}; median of bursts",
        fontsize=TICK,
        color=GREY,
        x=0.99,
        ha="right",
    )
