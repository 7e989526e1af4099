"""Figures: inks that a print without colours keeps apart, and a figure that a notebook shows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cutedsl_fa3 import figures
from cutedsl_fa3.figures import INKS, luminance


def test_inks_stay_apart_in_grey() -> None:
    levels = [luminance(ink.colour) for ink in INKS]
    assert all(b - a >= 35 for a, b in pairwise(levels)), levels
    assert 255 - levels[-1] >= 20


def test_lines_differ_in_more_than_their_colour() -> None:
    lines = [ink for ink in INKS if luminance(ink.colour) < 200]
    assert len({str(ink.dashes) for ink in lines}) == len(lines)
    assert len({ink.marker for ink in INKS}) == len(INKS)


@pytest.mark.jupyter
def test_a_pattern_can_be_seen_on_its_ink() -> None:
    for ink in INKS:
        shades = []
        for each in (ink, ink.hatched()):
            drawing = figures.figure(2, 2)
            axes = drawing.subplots()
            axes.set_axis_off()
            axes.bar([0], [1], **each.fill)
            pixels = figures.in_grey(drawing)
            middle = pixels[90:110, 60:140]
            shades.append(int(middle.max()) - int(middle.min()))
        assert shades[0] <= 2 and shades[1] >= 60, (ink, shades)


@pytest.mark.jupyter
def test_a_notebook_is_given_the_picture() -> None:
    drawing = figures.figure(3, 2, dpi=50)
    axes = drawing.subplots()
    axes.plot([0, 1], [0, 1], **figures.NAVY.line)
    figures.tidy(axes, grid="both")
    assert drawing._repr_png_().startswith(b"\x89PNG")
    assert figures.in_grey(drawing).shape == (100, 150)
    assert not axes.spines["left"].get_visible()
