"""Which compiler this package accepts, and which one is running.

Nothing here imports cutlass until it is asked to, so `import cutedsl_fa3` works where the DSL is
absent or of another version; the first use that needs it calls `require_dsl()`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass

TESTED_DSL = "4.8.1"
ACCEPTED_DSL = f"=={TESTED_DSL}"
PIP_COMMAND = f'pip install "nvidia-cutlass-dsl[cu13]=={TESTED_DSL}"'


class VersionError(ImportError):
    """nvidia-cutlass-dsl is absent or of a version that this package was not tested with."""


@dataclass(frozen=True)
class Toolchain:
    """What turns a kernel into machine code here: part of every cache key and benchmark record.

    `flavour` is the CUDA major version of the DSL's libraries ("cu12", "cu13") and `ptxas` the
    release they embed: with a driver the DSL loads the newest flavour that it supports, and the
    two flavours allocate registers differently.
    """

    cutlass: str
    flavour: str
    ptxas: str
    torch: str

    @property
    def compiler(self) -> str:
        """The parts that decide machine code (torch does not)."""
        return f"cutlass {self.cutlass} {self.flavour} ptxas {self.ptxas}"

    def __str__(self) -> str:
        return f"{self.compiler} torch {self.torch}"


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def require_dsl() -> None:
    """Check that the accepted DSL is what `import cutlass` gives.

    Raises: VersionError naming the version found, the accepted range and the pip command.
    """
    try:
        cutlass = importlib.import_module("cutlass")
        found = str(getattr(cutlass, "__version__", "of unknown version"))
        cause = None
    except Exception as error:  # a broken or foreign `cutlass` can raise anything at import
        installed = _installed("nvidia-cutlass-dsl")
        found = f"{installed} (import cutlass: {type(error).__name__}: {error})"
        cause = error
    if found != TESTED_DSL:
        raise VersionError(
            f"nvidia-cutlass-dsl is {found}; accepted: {ACCEPTED_DSL}. Install it: {PIP_COMMAND}"
        ) from cause


@functools.cache
def toolchain() -> Toolchain:
    """The versions in this process.

    Raises: VersionError where the DSL is absent or not accepted.
    """
    require_dsl()
    from cutlass import CUDA_VERSION

    return Toolchain(
        cutlass=TESTED_DSL,
        flavour=f"cu{CUDA_VERSION.major}",
        ptxas=f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        torch=_installed("torch"),
    )
