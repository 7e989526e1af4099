"""Why a kernel has to be compiled: what is different from the nearest one that is known."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .fingerprint import EDITED, combined

FORMAT = 2  # of an entry on disk; part of the key
SHOWN = 3  # files that are named
LONGEST = 80  # characters of an expression that are shown

_NODE = re.compile(r"\s*(%\d+) = (\w+)\((.*)\): \w+$")
_FIELDS = re.compile(r"(\w+)=(\((?:[^()]*)\)|'[^']*'|[^,()]+)")


@dataclass(frozen=True)
class Identity:
    """Everything that affects a kernel's code: `key` names its entry in the cache.

    `text` is the kernel's own key text, `sources` has a fingerprint of each file of the package,
    and `program` is one of what the kernel traces to, if its class is not of the package.
    """

    name: str
    arch: str
    text: str
    compiler: str
    sources: Mapping[str, str]
    program: str

    @property
    def key(self) -> str:
        """64 hexadecimal digits."""
        digest = hashlib.sha256()
        parts = (
            f"format {FORMAT}",
            self.name,
            self.arch,
            self.text,
            self.compiler,
            combined(self.sources),
            self.program,
        )
        for part in parts:  # the length keeps two parts from sharing a boundary
            encoded = part.encode()
            digest.update(f"{len(encoded)}:".encode() + encoded)
        return digest.hexdigest()


def reason(wanted: Identity, known: Iterable[Identity]) -> str:
    """What makes the compiler run: what is different from the nearest kernel of the same name."""
    near = min(
        (each for each in known if each.name == wanted.name),
        key=lambda each: _distance(each, wanted),
        default=None,
    )
    if near is None:
        return f"compiled as the first {wanted.name} that is known here"
    changes = differences(near, wanted) or ["its entry on disk was damaged or removed"]
    return f"recompiled because {'; '.join(changes)}"


def differences(old: Identity, new: Identity) -> list[str]:
    """What changed from one kernel to another."""
    found = []
    if old.arch != new.arch:
        found.append(f"arch {old.arch} -> {new.arch}")
    found += text_changes(old.text, new.text)
    if old.compiler != new.compiler:
        found.append(_words(old.compiler, new.compiler))
    if changed := _files(old.sources, new.sources):
        found.append(f"sources changed: {changed}")
    if old.program != new.program and not found:  # else what was found may be the cause
        found.append("the kernel's class, which is not of this package, traces to other code")
    return found


def _distance(old: Identity, new: Identity) -> tuple[int, int]:
    """How many parts differ, then how many lines of the key text."""
    was, now = _parts(old.text), _parts(new.text)
    parts = sum(was.get(label) != now.get(label) for label in {**was, **now})
    others = ("name", "arch", "compiler", "sources", "program")
    parts += sum(getattr(old, name) != getattr(new, name) for name in others)
    return parts, len(set(old.text.splitlines()) ^ set(new.text.splitlines()))


def text_changes(old: str, new: str) -> list[str]:
    """The differences of two key texts by part, as was -> is."""
    was, now = _parts(old), _parts(new)
    changed = [label for label in {**now, **was} if was.get(label) != now.get(label)]
    return [_change(label, was.get(label), now.get(label)) for label in changed]


def _parts(text: str) -> dict[str, str]:
    """A key text by label: a heading and the lines below it, `name: value`, `Name(field=value)`.

    What has neither form is its own label.
    """
    found: dict[str, str] = {}
    label = ""
    for line in text.splitlines():
        if line.startswith(" "):
            found[label] += f"\n{line}"
        elif fields := re.fullmatch(r"(\w+)\(.*=.*\)", line):
            label = fields[1].lower()
            found[label] = line
        elif pair := re.fullmatch(r"(\w+): (.*)", line):
            label = pair[1]
            found[label] = pair[2]
        elif heading := re.fullmatch(r"(\w+)\(.*\)", line):
            label = heading[1]
            found[label] = ""
        elif line != "plain attention":
            label = "" if not found else line
            found[label] = line
    return found


def _change(label: str, was: str | None, now: str | None) -> str:
    if now == label or was == label:
        return f"now {label}" if now else f"no longer {label}"
    if was and now and _FIELDS.search(was) and _FIELDS.search(now):
        before, after = dict(_FIELDS.findall(was)), dict(_FIELDS.findall(now))
        changed = [name for name in {**after, **before} if before.get(name) != after.get(name)]
        pairs = [f"{name} {before.get(name, '-')} -> {after.get(name, '-')}" for name in changed]
        return f"{label}: {', '.join(pairs)}"
    if not label:
        return _words(was or "", now or "")
    before, after = (_shown(each) for each in (was, now))
    if before == after:  # as far as they are shown
        lines = set((was or "").splitlines()) ^ set((now or "").splitlines())
        return f"{label}: {after}, in {len(lines)} lines of its text"
    return f"{label}: {before} -> {after}"


def _shown(value: str | None) -> str:
    """A value in one line: for the lines of a graph, the expression that they stand for."""
    if value is None:
        return "none"
    if "\n" not in value:
        return value
    values: dict[str, str] = {}
    result = value
    for line in value.splitlines():
        if node := _NODE.match(line):
            name, op, inside = node.groups()
            arguments = [values.get(each, each) for each in inside.split(", ")] if inside else []
            values[name] = _short(_spelled(op, arguments))
        elif output := re.match(r"\s*return (%\d+)", line):
            result = values.get(output[1], value)
    return _short(result)


def _spelled(op: str, arguments: list[str]) -> str:
    if op in ("input", "const"):
        return arguments[0]
    if op == "load":
        return f"{arguments[0]}[{', '.join(arguments[1:])}]"
    return f"{op}({', '.join(arguments)})"


def _words(was: str, now: str) -> str:
    """The words that differ, each run of them with the word before where that is a name."""
    before, after = was.split(), now.split()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    found = []
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        name = f"{after[j - 1]} " if j and after[j - 1].isidentifier() else ""
        gone, come = (" ".join(words).rstrip(",;") for words in (before[i:i_end], after[j:j_end]))
        found.append(f"{name}{gone or '-'} -> {come or '-'}")
    return ", ".join(found)


def _files(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The files whose fingerprints differ."""
    changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    said = []
    for name in changed:
        note = " (new)" if name not in old else " (gone)" if name not in new else ""
        if new.get(name, "").startswith(EDITED):
            note = " (edited since this process started, so the kernel is good for it alone)"
        said.append(f"{name}{note}")
    more = f" and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return ", ".join(said[:SHOWN]) + more


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
