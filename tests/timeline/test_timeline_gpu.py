"""Measured timelines: every role is there, in order, and the result is the shipped kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.alone import python

from cutedsl_fa3.timeline import Timeline

SCRIPT = Path(__file__).with_name("measured_alone.py")
LIMIT = 150  # seconds: imports and two compiles
CASES = ("both", "none", "pingpong", "early", "persistent", "by tile")


def measured(name: str) -> Timeline:
    """What a process of its own measures.

    Raises: AssertionError where it takes too long or fails.
    """
    done = python(str(SCRIPT), name, limit=LIMIT)
    print(done.stderr)
    return Timeline.from_json(done.stdout)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_measured_timeline_has_every_role_in_order_and_changes_no_bit(name):
    timeline = measured(name)  # which holds that no interval overlaps another of its lane
    consumers = [lane for lane in timeline.lanes if lane.startswith("consumer")]
    assert set(timeline.lanes) == {"producer", *consumers} and consumers
    assert timeline.origin == "measured" and timeline.dropped == 0
    # Of a short CTA only roughly: nanoseconds come in steps of a microsecond on some devices.
    assert timeline.ghz is not None and 0.5 < timeline.ghz < 4.0
    waits = {e.what for e in timeline.intervals if e.kind == "wait"}
    assert {"k empty", "k full", "v full", "QK", "PV"} <= waits
    assert ("turn" in waits) == (name in ("both", "pingpong"))
    assert any(e.what == "softmax" for e in timeline.of(consumers[-1]))
    for lane in consumers:
        tiles = [e.tile for e in timeline.of(lane) if e.what == "QK"]
        assert tiles == sorted(tiles)
    # A tile's products alone take longer than this; a wait of seconds is a broken clock.
    tile = timeline.clocks_a_tile()
    assert tile is None or 200 < tile < 100_000
    assert timeline.clocks < 100_000_000
