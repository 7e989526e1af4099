"""Compiled kernels, found again: in this process by a dict lookup, in the next one from disk.

The key of an entry is a hash of everything that affects its code (`why.Identity`): the kernel's
printed plan, the architecture, the compiler, the source text of this package, and for a class from
outside of it what its methods trace to. An entry is a folder named by the key:

    <root>/<key>/kernel.o  kernel.cubin  meta.json     (meta.json holds checksums of all three)

Entries are written beside their place and renamed into it, so a reader never sees half of one; an
entry whose checksums do not agree is built again. meta.json holds the identity too, so that
`explain` can say what is different where a kernel has to be compiled. `root` is $CUTEDSL_FA3_CACHE,
or a folder of the user's cache directory; where it cannot be written the cache lives in memory,
after one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock

from .compile import Compiled, Kernel, Resources, compile_kernel, program
from .fingerprint import is_ours, source_fingerprint, sources
from .versions import toolchain
from .why import Identity, reason

__all__ = ["clear", "explain", "get", "identity", "key", "root", "source_fingerprint"]

ENVIRONMENT = "CUTEDSL_FA3_CACHE"
NEWEST = 200  # entries that a new kernel is compared with

_KEY = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger("cutedsl_fa3")

_memory: dict[tuple[type, str, str, str], Compiled] = {}
_origins: dict[tuple[type, str, str, str], str] = {}  # how a kernel in memory came there
_known: dict[str, Identity] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
_warned = False


def get(kernel: Kernel) -> Compiled:
    """The compiled kernel: from memory, else from disk, else compiled (and kept in both)."""
    place = (type(kernel), kernel.name, kernel.arch, kernel.key_text)
    found = _memory.get(place)
    return found if found is not None else _find_or_build(kernel, place)


def identity(kernel: Kernel) -> Identity:
    """Everything that affects the kernel's code.

    A class from outside of the package may read anything: it is known by what it traces to.
    """
    traced = b"" if is_ours(type(kernel)) else program(kernel)
    return Identity(
        name=kernel.name,
        arch=kernel.arch,
        text=kernel.key_text,
        compiler=toolchain().compiler,
        sources=sources(),
        program=hashlib.sha256(traced).hexdigest() if traced else "",
    )


def key(kernel: Kernel) -> str:
    """The name of the kernel's entry: 64 hexadecimal digits."""
    return identity(kernel).key


def explain(kernel: Kernel) -> str:
    """Where the kernel comes from, or what is to be done: "recompiled because ...", in a line."""
    place = (type(kernel), kernel.name, kernel.arch, kernel.key_text)
    if place in _memory:
        return _origins[place]
    wanted = identity(kernel)
    if (found := _from_disk(wanted.key)) is not None:
        return f"on disk, where it was compiled in {found.seconds:.1f} s"
    return f"will be {reason(wanted, _similar(wanted))}"


def clear() -> None:
    """Forget every kernel, in memory and on disk."""
    with _guard:
        for known in (_memory, _origins, _known, _locks):
            known.clear()
    folder = root()
    if folder is None or not folder.is_dir():
        return
    for entry in folder.iterdir():
        if _KEY.fullmatch(entry.name.partition(".")[0]):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def root() -> Path | None:
    """The folder of the disk cache, which need not exist yet; None without a home directory."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    if base:
        return Path(base) / "cutedsl_fa3"
    try:
        return Path.home() / ".cache" / "cutedsl_fa3"
    except RuntimeError:
        return None


def _find_or_build(kernel: Kernel, place: tuple[type, str, str, str]) -> Compiled:
    wanted = identity(kernel)
    name = wanted.key
    with _guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        compiled = _memory.get(place)
        if compiled is None:
            origin = "from disk"
            compiled = _from_disk(name)
            if compiled is None:
                compiled, origin = _build(kernel, wanted, name)
            _known[name] = wanted
            _origins[place] = f"{origin}; compiled in {compiled.seconds:.1f} s"
            _memory[place] = compiled
    return compiled


def _build(kernel: Kernel, wanted: Identity, name: str) -> tuple[Compiled, str]:
    """Compile while holding the entry's file lock, unless another process was quicker."""
    with contextlib.ExitStack() as stack:
        folder = _writable_root()
        if folder is not None:
            try:
                stack.enter_context(filelock.FileLock(folder / f"{name}.lock"))
            except (OSError, NotImplementedError) as error:
                _warn(folder, error)
                folder = None
            else:
                if (found := _from_disk(name)) is not None:
                    return found, "from disk"
        origin = reason(wanted, _similar(wanted))
        _log.info("%s is being %s", wanted.name, origin)
        compiled = compile_kernel(kernel, name=f"{kernel.name}_{name[:16]}")
        _log.info("%s was compiled in %.1f s", compiled.name, compiled.seconds)
        if folder is not None:
            try:
                _store(folder, name, compiled, wanted)
            except OSError as error:
                _warn(folder, error)
        return compiled, f"{origin}, in this process"


def _similar(wanted: Identity) -> Iterator[Identity]:
    """Kernels of this name that are known, newest first: those of this process, then on disk."""
    yield from reversed([each for each in _known.values() if each.name == wanted.name])
    folder = root()
    if folder is None or not folder.is_dir():
        return
    entries = []
    for entry in os.scandir(folder):
        if _KEY.fullmatch(entry.name) and entry.name not in _known:
            with contextlib.suppress(OSError):
                entries.append((entry.stat().st_mtime, entry.path))
    for _, path in sorted(entries, reverse=True)[:NEWEST]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = Identity(
                **json.loads(Path(path, "meta.json").read_bytes())["entry"]["identity"]
            )
            if found.name == wanted.name:
                yield found


def _writable_root() -> Path | None:
    folder = root()
    if folder is None:
        _warn(Path("~/.cache"), OSError("no home directory"))
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _warn(folder, error)
        return None
    return folder


def _warn(folder: Path, error: BaseException) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"kernels are kept in memory only: the cache folder {folder} cannot be written "
            f"({error}); set {ENVIRONMENT} to a writable folder",
            stacklevel=2,
        )


def _store(folder: Path, name: str, compiled: Compiled, wanted: Identity) -> None:
    """Write an entry beside its place, then rename it into it."""
    files = {"kernel.o": compiled.object_code, "kernel.cubin": compiled.cubin}
    meta = {
        "name": compiled.name,
        "arch": compiled.arch,
        "symbols": compiled.symbols,
        "resources": asdict(compiled.resources),
        "seconds": compiled.seconds,
        "identity": asdict(wanted),
        "sha256": {file: hashlib.sha256(content).hexdigest() for file, content in files.items()},
    }
    with _scratch(folder, name) as scratch:
        fresh, old = scratch / "fresh", scratch / "old"
        fresh.mkdir()
        for file, content in files.items():
            _write(fresh / file, content)
        _write(fresh / "meta.json", _sealed(meta))
        with contextlib.suppress(FileNotFoundError):  # a corrupt entry moves out of the way
            os.replace(folder / name, old)
        try:
            os.replace(fresh, folder / name)
        except OSError:
            # Lock files can be cleared while held; then another writer may have come first.
            if _from_disk(name) is None:
                raise


@contextlib.contextmanager
def _scratch(folder: Path, name: str) -> Iterator[Path]:
    """A folder beside the entries, gone afterwards; `clear` removes what a killed process left."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}.{uuid.uuid4().hex[:8]}.", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Write through to the device, so that a crash cannot keep the rename and lose the bytes."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sealed(meta: dict[str, Any]) -> bytes:
    return json.dumps({"checksum": _checksum(meta), "entry": meta}, indent=1).encode()


def _unsealed(content: bytes) -> dict[str, Any]:
    sealed = json.loads(content)
    if _checksum(sealed["entry"]) != sealed["checksum"]:
        raise ValueError("meta.json does not match its checksum")
    return sealed["entry"]


def _checksum(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _from_disk(name: str) -> Compiled | None:
    """The entry, or None where it is absent, unreadable, truncated or altered."""
    folder = root()
    if folder is None:
        return None
    entry = folder / name
    try:
        meta = _unsealed((entry / "meta.json").read_bytes())
        files = {file: (entry / file).read_bytes() for file in meta["sha256"]}
        for file, content in files.items():
            if hashlib.sha256(content).hexdigest() != meta["sha256"][file]:
                raise ValueError(f"{file} does not match its checksum")
        resources = meta["resources"]
        resources["advisories"] = tuple(resources["advisories"])
        return Compiled(
            name=meta["name"],
            arch=meta["arch"],
            symbols=tuple(meta["symbols"]),
            cubin=files["kernel.cubin"],
            object_code=files["kernel.o"],
            resources=Resources(**resources),
            seconds=meta["seconds"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
