"""Our verdict beside the driver's on thousands of tensor maps, and on every change we propose.

    python tests/layouts/compare_driver.py     # needs an SM90 GPU, seconds; writes a record

`cuTensorMapEncodeTiled` says for each map of `geometries` whether it encodes it. A map that the
rules accept and the driver refuses is an error, and so is one that we refuse and the driver accepts
unless a rule says who else asks for it: the driver's manual, or the copy instruction.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import geometries
import torch

from cutedsl_fa3 import bench, record
from cutedsl_fa3.layouts import Rule, TensorMap
from cutedsl_fa3.tma_probe import encode

Encode = Callable[[TensorMap], bytes | None]


@dataclass(frozen=True)
class RuleRow:
    """What the driver says of the maps that break one rule.

    `broken` maps break it and perhaps others, `alone` break it alone; `accepted` of `alone` pass
    the driver. `source` and `reason` say who asks for the rule, and what for.
    """

    rule: str
    source: str
    broken: int
    alone: int
    accepted: int
    reason: str


@dataclass
class Comparison:
    """Verdicts side by side; `verdicts` has a bit for each map, 1 where the driver accepts it."""

    verdicts: list[bool] = field(default_factory=list)
    broken: Counter = field(default_factory=Counter)
    alone: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)
    rules: dict[str, Rule] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)
    ours: int = 0
    beyond: int = 0
    missed: list[TensorMap] = field(default_factory=list)
    unexplained: list[TensorMap] = field(default_factory=list)

    def add(self, tmap: TensorMap, accepted: bool) -> None:
        """Count one map."""
        bad = [rule for rule in tmap.rules() if not rule.ok]
        self.verdicts.append(accepted)
        for rule in bad:
            self.rules[rule.name] = rule
            self.sources.setdefault(rule.name, set()).add(rule.source)
            self.broken[rule.name] += 1
        if len(bad) == 1:
            self.alone[bad[0].name] += 1
            self.accepted[bad[0].name] += accepted
        self.ours += not bad
        self.beyond += bool(bad) and accepted
        if not bad and not accepted:
            self.missed.append(tmap)
        if accepted and bad and all(rule.source == "driver" for rule in bad):
            self.unexplained.append(tmap)

    @property
    def rows(self) -> tuple[RuleRow, ...]:
        """One row a rule, those that most maps break first."""
        return tuple(
            RuleRow(
                name,
                " or ".join(sorted(self.sources[name])),
                count,
                self.alone[name],
                self.accepted[name],
                self.rules[name].limit,
            )
            for name, count in self.broken.most_common()
        )

    @property
    def bits(self) -> str:
        """The driver's verdicts, four to a hexadecimal digit."""
        text = "".join("1" if one else "0" for one in self.verdicts)
        return f"{int('1' + text, 2):x}"


def bits(text: str) -> list[bool]:
    """The verdicts that `Comparison.bits` was made from."""
    return [digit == "1" for digit in bin(int(text, 16))[3:]]


def compared(maps: Iterable[TensorMap], verdicts: Iterable[bool]) -> Comparison:
    """Our rules beside the driver's verdicts."""
    found = Comparison()
    for tmap, accepted in zip(maps, verdicts, strict=True):
        found.add(tmap, accepted)
    return found


def proposed(seed: int, count: int) -> list[TensorMap]:
    """The map after each change that the doctor proposes for an illegal one."""
    afters = [r.after for one in geometries.diagnoses(seed, count) for r in one.remedies]
    # A copy that is not made yet lies at an address as every allocation has.
    return [replace(a.map, address=a.map.address or geometries.BASE) for a in afters if a]


def meta_of(found: Comparison, changes: list[bool], seed: int) -> dict[str, Any]:
    """What the record says of the whole."""
    return {
        "what": "verdicts of cuTensorMapEncodeTiled beside those of the rules",
        "seed": seed,
        "maps": len(found.verdicts),
        "accepted_by_us": found.ours,
        "accepted_by_the_driver": sum(found.verdicts),
        "accepted_by_us_and_refused_by_the_driver": len(found.missed),
        "refused_by_us_beyond_the_driver": found.beyond,
        "of_these_without_a_reason": len(found.unexplained),
        "proposed_changes": len(changes),
        "proposed_changes_refused_by_the_driver": changes.count(False),
        "verdicts": found.bits,
    }


def compare(encoded: Encode, seed: int, count: int) -> tuple[Comparison, list[bool], list[str]]:
    """The verdicts on maps and on proposed changes, and what is wrong in words."""
    maps = geometries.maps(seed, count)
    found = compared(maps, (encoded(tmap) is not None for tmap in maps))
    afters = proposed(seed, count // 2)
    changes = [encoded(tmap) is not None for tmap in afters]
    refused = [tmap for tmap, ok in zip(afters, changes, strict=True) if not ok]
    wrong = [f"accepted here, refused by the driver:\n{tmap}" for tmap in found.missed[:5]]
    wrong += [f"refused here without a reason:\n{tmap}" for tmap in found.unexplained[:5]]
    wrong += [f"a proposed change that the driver refuses:\n{tmap}" for tmap in refused[:5]]
    return found, changes, wrong


def ready() -> None:
    """Check that there is a GPU, and make the context in which the driver encodes.

    Raises: NoDevice.
    """
    bench.require_gpu()
    torch.zeros(1, device="cuda")


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, write a record; 0 if all agree, 1 if not or no GPU, 2 if refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=geometries.SEED)
    parser.add_argument("--count", type=int, default=geometries.COUNT, help="maps asked for")
    parser.add_argument("--out", type=Path, help="folder or .json file of the record")
    parser.add_argument("--commit", help="the commit of these sources, where .git is absent")
    parser.add_argument("--allow-dirty", action="store_true", help="record uncommitted changes")
    options = parser.parse_args(arguments)
    try:
        ready()
        meta = record.collect(options.commit, options.allow_dirty)
    except record.RecordError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except bench.NoDevice as error:
        print(f"compare_driver: {error}", file=sys.stderr)
        return 1
    found, changes, wrong = compare(encode, options.seed, options.count)
    meta |= meta_of(found, changes, options.seed) | {"count": options.count}
    written = record.Record(meta, found.rows).write(record.place(meta, options.out, "doctor"))
    for name in list(meta_of(found, changes, 0))[2:-1]:
        print(f"{name.replace('_', ' ')}: {meta[name]}")
    print(f"{'rule':<34} {'source':<12} {'broken':>7} {'alone':>6} {'accepted':>9}")
    for row in found.rows:
        print(f"{row.rule:<34} {row.source:<12} {row.broken:7} {row.alone:6} {row.accepted:9}")
    print(*wrong, sep="\n\n")
    print(f"record: {written}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
