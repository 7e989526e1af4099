"""The gallery: every shipped function is in it, its pictures and numbers are those of the code."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cutedsl_fa3 import Elementwise, figures, gallery, gallery_page, masks, packing, scores
from cutedsl_fa3.cli import app
from cutedsl_fa3.errors import VariantError
from cutedsl_fa3.gallery import MISSED, Change, Curve, Pairs
from cutedsl_fa3.gallery_page import DRAWN, DRAWN_TILE, EXAMPLES, FOLDER, WRITTEN_OUT
from cutedsl_fa3.variant import Variant

PAGE = FOLDER / "README.md"
# Visited / needed; 1.0 for those that are not here.
MOST = {
    "masks.and_masks(masks.causal, masks.documents(ids))": 1.1,
    "masks.neighborhood((side, side), side // 4 | 1)": 1.05,
    **{row.code.splitlines()[-1]: most for row, most in zip(WRITTEN_OUT, (1.1, 1.5), strict=True)},
}


def public(module: ModuleType) -> dict[str, object]:
    functions = inspect.getmembers(module, inspect.isfunction)
    return {n: f for n, f in functions if f.__module__ == module.__name__ and n[0] != "_"}


def drawn(example: gallery_page.Example) -> list[gallery.Picture]:
    return gallery.pictures(example.variant(DRAWN), DRAWN, DRAWN, tile=DRAWN_TILE)


# The page


@pytest.mark.parametrize("module", [masks, scores], ids=["masks", "scores"])
def test_every_shipped_mask_and_score_has_its_picture(module):
    makers = {n for n in public(module) if n != "alibi_slopes"}  # makes slopes, not a score
    shown = {e.name for e in EXAMPLES if e.kind == module.__name__.split(".")[-1][:-1]}
    assert shown == makers
    for name in makers:
        assert f"![{name}]({name}.png)" in PAGE.read_text()


def test_what_makes_their_tensors_is_shown_in_use():
    code = "\n".join([gallery_page.SETUP, *(example.code for example in EXAMPLES)])
    for name in (*public(packing), "alibi_slopes"):
        assert f"{name}(" in code


def test_the_page_is_what_the_code_says_apart_from_its_table():
    made, stored = gallery_page.page([]).strip(), PAGE.read_text()
    assert stored.startswith(made), f"run `{gallery_page.COMMAND}`"


@pytest.fixture(scope="module")
def rows() -> list[gallery_page.Visits]:
    return gallery_page.table_rows()


@pytest.mark.slow
def test_the_table_of_visited_tiles_is_that_of_this_code(rows):
    assert PAGE.read_text() == gallery_page.page(rows), f"run `{gallery_page.COMMAND}`"


@pytest.mark.slow
def test_shipped_masks_visit_what_they_need(rows):
    for row in rows:
        assert row.visited >= row.needed, row.code
        assert row.ratio <= MOST.get(row.code, 1.0), row.code


# The pictures


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_a_stored_picture_carries_what_the_code_draws(example):
    parts = drawn(example)
    stored = gallery.stored(FOLDER / f"{example.name}.png")
    levels = torch.cat([part.levels.flatten() for part in parts])
    assert stored.shape == levels.shape, f"run `{gallery_page.COMMAND}`"
    exact = all(isinstance(part, Pairs) for part in parts)  # elsewhere floats are rounded
    difference = (stored.int() - levels.int()).abs().max()
    assert difference <= (0 if exact else 1), f"run `{gallery_page.COMMAND}`"


def test_the_stored_sheet_has_all_masks():
    masks = [example for example in EXAMPLES if example.kind == "mask"]
    shown = gallery_page.drawn(masks)
    assert list(shown) == [example.name for example in masks]
    levels = torch.cat([part.levels.flatten() for part in shown.values()])
    stored = gallery.stored(FOLDER / gallery_page.SHEET)
    assert torch.equal(stored, levels), f"run `{gallery_page.COMMAND}`"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_no_pair_that_is_seen_lies_in_a_tile_that_is_skipped(example):
    for part in drawn(example):
        if isinstance(part, Pairs):
            assert not (part.states == MISSED).any()


def test_the_pictures_are_small_and_all_in_use():
    names = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    pages = {"README.md", "legend.png", gallery_page.SHEET}
    assert set(names) == {*pages, *(f"{e.name}.png" for e in EXAMPLES)}
    assert names.pop(gallery_page.SHEET) < 60_000
    assert max(names.values()) < 30_000 and sum(names.values()) < 400_000


def test_a_picture_without_data_is_refused(tmp_path):
    path = tmp_path / "other.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0IEND" + b"\0\0\0\0")
    with pytest.raises(ValueError, match=r"other\.png carries no data; write it with"):
        gallery.stored(path)


# What is drawn


def test_a_pair_has_the_state_of_its_tile():
    (part,) = gallery.pictures(Variant(mask=masks.causal), 4, 6, tile=(2, 2))
    assert part.states.tolist() == [
        [3, 3, 2, 1, 0, 0],
        [3, 3, 2, 2, 0, 0],
        [3, 3, 3, 3, 2, 1],
        [3, 3, 3, 3, 2, 2],
    ]


def test_the_default_tile_is_that_of_the_plan():
    assert gallery.default_tile(Variant(mask=masks.causal)) == (128, 128)


def test_heads_and_batch_entries_have_pictures_of_their_own():
    lengths = torch.tensor([1, 3])
    first, second = (
        gallery.pictures(Variant(mask=masks.prefix(lengths)), 2, 4, b=b, tile=(2, 2))[0].states
        for b in (0, 1)
    )
    assert (first[0].tolist(), second[0].tolist()) == ([2, 1, 0, 0], [3, 3, 2, 1])
    slopes = torch.tensor([1.0, 2.0])
    (change,) = gallery.pictures(Variant(score=scores.alibi(slopes)), 1, 3, h=1)
    assert change.values.tolist() == [[-4.0, -2.0, 0.0]]


def test_the_change_of_a_score_is_blank_where_the_key_is_hidden():
    variant = Variant(score=scores.alibi(torch.ones(1)), mask=masks.causal)
    pairs, change = gallery.pictures(variant, 2, 2, tile=(2, 2))
    assert isinstance(pairs, Pairs) and isinstance(change, Change)
    assert change.values.isnan().tolist() == [[False, True], [False, False]]
    assert change.levels.tolist() == [[255, 0], [1, 255]]


def test_scores_and_weights_of_the_score_alone_are_curves():
    (curve,) = gallery.pictures(Variant(score=scores.softcap(5.0)), 9, 9)
    (weight,) = gallery.pictures(Variant(softmax=Elementwise(torch.relu)), 9, 9)
    assert isinstance(curve, Curve) and isinstance(weight, Curve)
    assert (curve.name, weight.name) == ("score", "weight")
    assert weight.values[0] == 0 and weight.values[-1] == gallery.CURVE_TO
    assert curve.values.abs().max() < 5


def test_long_sequences_are_drawn_by_a_few_of_their_pairs():
    (part,) = gallery.pictures(Variant(mask=masks.causal), 1500, 3000, tile=(128, 128))
    assert part.states.shape == (500, 500)
    assert part.states[0, 0] == 3 and part.states[-1, -1] == 2 and part.states[0, -1] == 0


def loops(mask, seqlen_q, seqlen_k, tile) -> list[list[tuple[bool, bool]]]:
    found = []
    for q0 in range(0, seqlen_q, tile[0]):
        found.append([])
        for k0 in range(0, seqlen_k, tile[1]):
            keys = range(k0, k0 + tile[1])
            queries = range(q0, min(q0 + tile[0], seqlen_q))
            seen = [k < seqlen_k and mask(0, 0, q, k) for q in queries for k in keys]
            found[-1].append((any(seen), all(seen)))
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 5), st.integers(1, 5))
def test_needed_tiles_are_those_with_a_pair_that_is_seen(seqlen_q, seqlen_k, tile_m, tile_n):
    def mask(b, h, q, k):
        return (q - k) % 4 == 0

    tile = (tile_m, tile_n)
    some, every = gallery_page.needed_tiles(Variant(mask=mask), seqlen_q, seqlen_k, tile)
    expected = loops(mask, seqlen_q, seqlen_k, tile)
    assert some.tolist() == [[s for s, _ in row] for row in expected]
    assert every.tolist() == [[e for _, e in row] for row in expected]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 12))
def test_causal_documents_visit_exactly_what_they_need(lengths, half):
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    total, tile = int(offsets[-1]), (half, 2 * half)
    ids = packing.document_ids(offsets, total)
    for mask in (
        masks.documents(ids),
        masks.and_masks(masks.documents(ids), masks.causal),
        masks.packed(masks.window(half, 0), ids, offsets),
    ):
        variant = Variant(mask=mask)
        visited, _ = gallery.visited_tiles(variant, total, total, tile)
        needed, _ = gallery_page.needed_tiles(variant, total, total, tile)
        assert torch.equal(visited, needed)


# Drawing


@pytest.mark.jupyter
def test_a_figure_shows_itself_in_a_notebook():
    variant = Variant(score=scores.alibi(torch.ones(1)), mask=masks.causal)
    figure = gallery.draw(variant, 40, 60, tile=(8, 8))
    assert len(figure.axes) == 2 and len(figure.legends) == 1
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.jupyter
def test_a_saved_picture_carries_its_levels(tmp_path):
    variant = Variant(score=scores.softcap(2.0), mask=masks.window(3, 1))
    parts = gallery.pictures(variant, 20, 30, tile=(8, 8))
    gallery.save(gallery.figure(parts), parts, tmp_path / "both.png")
    levels = torch.cat([part.levels.flatten() for part in parts])
    assert torch.equal(gallery.stored(tmp_path / "both.png"), levels)


@pytest.mark.jupyter
def test_the_command_writes_page_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery_page, "COUNTED", 256)
    result = CliRunner().invoke(app, ["gallery", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in FOLDER.iterdir()}
    assert str(tmp_path / "causal.png") in result.output.replace("\n", "")


def test_drawing_without_matplotlib_names_the_extra(monkeypatch):
    import sys

    figures.figure_class.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib: .*cutedsl-fa3\[plot\]"):
        gallery.draw(Variant(mask=masks.causal), 8, 8, tile=(4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((masks.causal, 8, 8), "valid is a Variant; make one of a function"),
        ((Variant(), 0, 8), "seqlen_q is 0; valid are ints from 1"),
        ((Variant(), 8, -1), "seqlen_k is -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(arguments, message):
    with pytest.raises(VariantError, match=message):
        gallery.draw(*arguments)
    for wrong in ({"b": -1}, {"h": 1.5}, {"tile": (0, 5)}, {"tile": 8}):
        with pytest.raises(VariantError, match=next(iter(wrong))):
            gallery.draw(Variant(), 8, 8, **wrong)
