"""Schedules that `tune` measured as the fastest, and for which calls they are used.

A call without `schedule=` asks here before it takes its row of the table, when its kind is met for
the first time; a call of a kind that is known asks nobody.

| equal to what was measured                                  | may differ                        |
|-------------------------------------------------------------|-----------------------------------|
| the variant's text, dtype, head sizes, query heads for each | lengths, each by a factor up to   |
| key head, name of the GPU, compiler, sources of the kernels | `REACH`; batch, number of heads   |

Lengths count because they decide how many tiles each multiprocessor gets, and how much of a tile's
time its beginning and end are: what wins for long sequences can lose for short ones. Of several
choices the one measured at the nearest lengths is used.

Choices are kept in this process and, unless `tune` was told otherwise, in `tuned.json` in the
folder of the kernel cache, which later processes read once. What cannot be used there (unreadable,
of other sources, no longer legal) is left alone with a warning, `NotUsed`, and never fails a call.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import filelock
import torch

from . import cache
from .pipelines import Schedule
from .plans import Plan
from .problem import DTYPES, Problem
from .variant import Variant
from .variant.pairs import pairs
from .versions import toolchain

__all__ = ["Choice", "NotUsed", "choices", "forget", "set_aside"]

FILE = "tuned.json"
FORMAT = 1
REACH = 4  # a choice is used for lengths from a quarter to four times those measured
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class NotUsed(UserWarning):
    """A schedule that was kept is not used; the message says why and what to do."""


@dataclass(frozen=True)
class Kind:
    """What must be equal for a choice to be used, but for what made its kernel.

    `pairs`: captured tensors of which one load reads two keys; `group`: query heads for each key
    head.
    """

    variant: str
    pairs: tuple[int, ...]
    problem: str
    group: int
    device: str


@dataclass(frozen=True)
class Choice:
    """A schedule and the measurement that chose it.

    Units: `ms` and `default_ms`, the time with the table's schedule, are milliseconds per call;
    `date` is UTC.
    """

    schedule: Schedule
    date: str
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    ms: float
    default_ms: float

    def distance(self, seqlen_q: int, seqlen_k: int) -> float:
        """By which factor the lengths differ, the larger one of both."""
        given = ((seqlen_q, self.seqlen_q), (seqlen_k, self.seqlen_k))
        return max(abs(math.log2(max(1, a) / max(1, b))) for a, b in given)

    @property
    def lengths(self) -> tuple[int, int]:
        """What tells the choices of a kind apart."""
        return self.seqlen_q, self.seqlen_k

    def __str__(self) -> str:
        return (
            f"tuned {self.date[:16].replace('T', ' ')} UTC at batch {self.batch}, {self.heads} "
            f"heads, {self.seqlen_q} x {self.seqlen_k}: {self.ms:.3f} ms, "
            f"{self.default_ms / self.ms:.2f} of the default's speed"
        )


@dataclass(frozen=True)
class Entry:
    """A choice as it is kept: what it is for, and what made the kernels that were measured."""

    kind: Kind
    made_by: str
    choice: Choice


_lock = threading.RLock()
_kept: dict[Path | None, list[Entry]] = {}  # by the file that was read
_warned: set[str] = set()
_aside = 0  # how many contexts want the table alone
# Choices for calls of a variant; a variant may be freed meanwhile, so nothing here holds one.
_found: weakref.WeakKeyDictionary[Variant, dict[tuple, tuple[Choice, ...]]] = (
    weakref.WeakKeyDictionary()
)


def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> Choice | None:
    """What was measured at the nearest lengths, if anything was for calls such as this one.

    Nothing is, on the CPU. The tensors are those of a call that was checked.
    """
    device = device_name(q.device)
    if device is None or _aside or not _entries():
        return None
    with _lock:
        known = _found.setdefault(variant, {})
        types = tuple(t.dtype for t in variant.captures)
        key = (q.dtype, q.shape[3], v.shape[3], _group(q, k), device, types, pairs(variant))
        if key not in known:
            known[key] = _usable(q, k, v, variant, device)
        found = known[key]
    lengths = q.shape[1], k.shape[1]
    near = [each for each in found if each.distance(*lengths) <= math.log2(REACH)]
    return min(near, key=lambda each: each.distance(*lengths), default=None)


def schedule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, given: Schedule | None
) -> Schedule | None:
    """The schedule that was given, else the one that was tuned, else None: that of the table."""
    if given is not None:
        return given
    found = choice(q, k, v, variant)
    return None if found is None else found.schedule


def keep(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    made: Choice,
    on_disk: bool = True,
) -> Path | None:
    """Use a choice from now on; the file that it was written to, if it was.

    It takes the place of what was measured at the same lengths.
    """
    device = device_name(q.device)
    assert device is not None
    entry = Entry(kind_of(q, k, v, variant, device), _made_by(), made)
    path = None
    with _lock:
        _replaced(_entries(), entry)
        if on_disk:
            path = _changed(lambda entries: _replaced(entries, entry))
        _met_anew()
    return path


def choices() -> list[tuple[Kind, Choice]]:
    """Everything that is kept and could be used, of any variant and device."""
    made_by = _made_by()
    return [(each.kind, each.choice) for each in _entries() if each.made_by == made_by]


def forget(variant: Variant | None = None) -> int:
    """Forget the choices for a variant, or all of them, in this process and on disk; their number.

    Calls use the table of schedules again.
    """

    def kept(entry: Entry) -> bool:
        return variant is not None and entry.kind.variant != variant.text

    with _lock:
        entries = _entries()
        before = len(entries)
        entries[:] = filter(kept, entries)
        path = _path()
        if path is not None and path.exists():
            if variant is None:
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                _changed(lambda entries: [each for each in entries if kept(each)])
        _met_anew()
    return before - len(entries)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Within, calls take the table's schedules, as if nothing had been tuned.

    For measurements and tests of the table; it applies to the whole process.
    """
    global _aside
    with _lock:
        _aside += 1
        _met_anew()
    try:
        yield
    finally:
        with _lock:
            _aside -= 1
            _met_anew()


def kind_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, device: str
) -> Kind:
    """The kind of a call on this device."""
    together, problem = tuple(sorted(pairs(variant))), f"{NAMES[q.dtype]} {q.shape[3]} {v.shape[3]}"
    return Kind(variant.text, together, problem, _group(q, k), device)


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None where kernels do not run."""
    return _name(device.index) if device.type == "cuda" else None


@functools.cache
def _name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)


def _group(q: torch.Tensor, k: torch.Tensor) -> int:
    return q.shape[2] // max(1, k.shape[2])


def _made_by() -> str:
    return f"{toolchain().compiler}, sources {cache.source_fingerprint()}"


def _usable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, device: str
) -> tuple[Choice, ...]:
    """The choices for a kind of call, of today's kernels and within today's rules."""
    kind = kind_of(q, k, v, variant, device)
    of_kind = [each for each in _entries() if each.kind == kind]
    if not of_kind:
        return ()
    made_by, problem = _made_by(), Problem(NAMES[q.dtype], q.shape[3], v.shape[3])
    found = []
    for entry in of_kind:
        if entry.made_by != made_by:
            _warn(
                f"a schedule tuned {entry.choice.date[:10]} for {problem} is of other sources or "
                "another compiler and is not used: tune again, or forget it with "
                "cutedsl_fa3.tuned.forget()"
            )
            continue
        try:
            Plan(variant, problem, entry.choice.schedule).check()
        except ValueError as error:
            _warn(f"a schedule tuned {entry.choice.date[:10]} is not used: {error}")
        else:
            found.append(entry.choice)
    return tuple(found)


def _entries() -> list[Entry]:
    """Everything that is kept; the file is read once."""
    path = _path()
    with _lock:
        if path not in _kept:
            _kept[path] = list(_read(path))
        return _kept[path]


def _path() -> Path | None:
    folder = cache.root()
    return None if folder is None else folder / FILE


def _replaced(entries: list[Entry], entry: Entry) -> list[Entry]:
    """`entries`, changed in place: this one instead of that of the same kind and lengths."""
    same = (entry.kind, entry.choice.lengths)
    entries[:] = [each for each in entries if (each.kind, each.choice.lengths) != same]
    entries.append(entry)
    return entries


def _met_anew() -> None:
    """Forget what was found for calls, and the calls themselves."""
    from . import interface

    _found.clear()
    interface._calls.clear()


def _read(path: Path | None) -> Iterator[Entry]:
    """The entries of a file that can be understood; a warning for the others."""
    if path is None:
        return
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, {FORMAT} is read here")
        written = list(content["choices"])
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn(f"{path} is not used: {type(error).__name__}: {error}; the next tune replaces it")
        return
    for one in written:
        try:
            yield _entry(one)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _warn(f"an entry of {path} is not used: {type(error).__name__}: {error}")


def _entry(written: Any) -> Entry:
    """An entry as `_changed` writes it.

    Raises: ValueError, KeyError, TypeError, AttributeError for what is none.
    """
    kind, made = Kind(**_tuples(written["kind"])), dict(written["choice"])
    schedule = Schedule(**_tuples(made.pop("schedule")))
    entry = Entry(kind, written["made_by"], Choice(schedule, **made))
    for part in (kind, entry.choice):
        for field in fields(part):
            value, wanted = getattr(part, field.name), field.type
            if not isinstance(value, _TYPES[wanted]) or isinstance(value, bool):
                raise TypeError(f"{field.name} = {value!r}: {wanted} is needed")
    if not (entry.choice.ms > 0 and entry.choice.default_ms > 0):
        raise ValueError(f"ms = {entry.choice.ms!r}: a time is more than 0")
    return entry


_TYPES = {
    "int": int,
    "float": int | float,
    "str": str,
    "tuple[int, ...]": tuple,
    "Schedule": Schedule,
}


def _tuples(written: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where these have tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in written.items()}


def _changed(change: Callable[[list[Entry]], list[Entry]]) -> Path | None:
    """Read the file anew, change its entries and put it back in one step; None where that fails.

    Other processes may tune meanwhile: a lock makes one wait for the other.
    """
    path = _path()
    try:
        if path is None:
            raise OSError("there is no home directory")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            entries = change(list(_read(path)))
            beside = path.with_suffix(".tmp")
            written = {"format": FORMAT, "choices": [asdict(entry) for entry in entries]}
            beside.write_text(json.dumps(written, indent=1) + "\n")
            return beside.replace(path)
    except (OSError, NotImplementedError) as error:
        _warn(
            f"a tuned schedule is kept in this process only: {path} cannot be written ({error}); "
            f"set {cache.ENVIRONMENT} to a writable folder"
        )
        return None


def _warn(text: str) -> None:
    """Say it once in a process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, NotUsed, stacklevel=2)
