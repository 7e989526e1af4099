"""Compiled kernels, found again: in this process by a dict lookup, in the next one from disk.

The key of an entry is a hash of everything that affects its code: the kernel's printed plan, the
architecture, the compiler, and the source text of this package and of the kernel's class. An entry
is a folder named by the key:

    <root>/<key>/kernel.o  kernel.cubin  meta.json     (meta.json holds checksums of all three)

Entries are written beside their place and renamed into it, so a reader never sees half of one; an
entry whose checksums do not agree is built again. `root` is $CUTEDSL_FA3_CACHE, or a folder of the
user's cache directory; where it cannot be written the cache lives in memory, after one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import json
import linecache
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock

from .compile import Compiled, Kernel, Resources, compile_kernel
from .versions import toolchain

ENVIRONMENT = "CUTEDSL_FA3_CACHE"
FORMAT = 1  # of an entry; part of the key

_PACKAGES = ("cutedsl_fa3", "cutedsl_fa3.layouts", "cutedsl_fa3.pipelines")
# These read, check or report: what they choose reaches a kernel through its key text only, and
# nothing of theirs runs while one is traced.
_WITHOUT_CODE = frozenset(
    {
        "__main__.py",
        "audit.py",
        "bench.py",
        "bench_gemm.py",
        "cache.py",
        "calls.py",
        "cli.py",
        "configs.py",
        "demo.py",
        "emulate.py",
        "gemm.py",
        "inputs.py",
        "interface.py",
        "named.py",
        "peers.py",
        "record.py",
        "reference.py",
        "schedules.py",
        "tables.py",
        "tune.py",
    }
)
_KEY = re.compile(r"[0-9a-f]{64}")
_LOADED_AT = time.time()

_memory: dict[tuple[type, str, str, str], Compiled] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
_class_sources: dict[type, str] = {}
_warned = False


def get(kernel: Kernel) -> Compiled:
    """The compiled kernel: from memory, else from disk, else compiled (and kept in both)."""
    identity = (type(kernel), kernel.name, kernel.arch, kernel.key_text)
    found = _memory.get(identity)
    return found if found is not None else _find_or_build(kernel, identity)


def key(kernel: Kernel) -> str:
    """The name of the kernel's entry: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    parts = (
        f"format {FORMAT}",
        kernel.name,
        kernel.arch,
        kernel.key_text,
        toolchain().compiler,
        source_fingerprint(),
        _class_source(type(kernel)),
    )
    for part in parts:  # the length keeps two parts from sharing a boundary
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()


def clear() -> None:
    """Forget every kernel, in memory and on disk."""
    with _guard:
        _memory.clear()
        _locks.clear()
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


def source_fingerprint() -> str:
    """Hash of the package's sources that can affect code.

    They are read anew for each kernel that is not in memory: a few milliseconds beside a load from
    disk, and a package reloaded in a notebook is not given its older self's kernels.
    """
    return fingerprint_of(_package_folders())


def fingerprint_of(folders: dict[str, Path]) -> str:
    """Hash of every .py file below `folders` (import name to place) that can affect code.

    A file edited since this process started may not be what the process has imported. Its text
    would then vouch for code made from the older text, so such a fingerprint is good for this
    process alone.
    """
    digest = hashlib.sha256()
    for name, folder in sorted(folders.items()):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder).as_posix()
            if name == "cutedsl_fa3" and relative in _WITHOUT_CODE:
                continue
            text = path.read_bytes()
            digest.update(f"{name}/{relative} {len(text)}\n".encode() + text)
            if path.stat().st_mtime > _LOADED_AT:
                digest.update(_this_process())
    return digest.hexdigest()


def _package_folders() -> dict[str, Path]:
    folders = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(next(iter(spec.submodule_search_locations)))
    return folders


def _this_process() -> bytes:
    return f"edited after import, process {os.getpid()} {_LOADED_AT!r}".encode()


def _class_source(kernel_class: type) -> str:
    """Hash of the files and cells that define the classes of a kernel from outside the package."""
    found = _class_sources.get(kernel_class)
    if found is None:
        files = {
            function.__code__.co_filename
            for base in kernel_class.__mro__
            if base.__module__.partition(".")[0] not in ("cutedsl_fa3", "cutlass", "builtins")
            for member in vars(base).values()
            if inspect.isfunction(function := inspect.unwrap(_getter(member)))
        }
        digest = hashlib.sha256()
        for file in sorted(files):
            linecache.checkcache(file)
            lines = "".join(linecache.getlines(file))
            digest.update(lines.encode() if lines else _this_process())
            with contextlib.suppress(OSError):  # a notebook cell is no file
                if os.stat(file).st_mtime > _LOADED_AT:
                    digest.update(_this_process())
        found = _class_sources[kernel_class] = digest.hexdigest()
    return found


def _getter(member: Any) -> Any:
    """The function behind a property, static or class method; anything else as it is."""
    return getattr(member, "fget", None) or getattr(member, "__func__", None) or member


def _find_or_build(kernel: Kernel, identity: tuple[type, str, str, str]) -> Compiled:
    name = key(kernel)
    with _guard:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        compiled = _memory.get(identity)
        if compiled is None:
            compiled = _from_disk(name) or _build(kernel, name)
            _memory[identity] = compiled
    return compiled


def _build(kernel: Kernel, name: str) -> Compiled:
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
                    return found
        compiled = compile_kernel(kernel, name=f"{kernel.name}_{name[:16]}")
        if folder is not None:
            try:
                _store(folder, name, compiled)
            except OSError as error:
                _warn(folder, error)
        return compiled


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


def _store(folder: Path, name: str, compiled: Compiled) -> None:
    """Write an entry beside its place, then rename it into it."""
    files = {"kernel.o": compiled.object_code, "kernel.cubin": compiled.cubin}
    meta = {
        "name": compiled.name,
        "arch": compiled.arch,
        "symbols": compiled.symbols,
        "resources": asdict(compiled.resources),
        "seconds": compiled.seconds,
        "toolchain": toolchain().compiler,
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
