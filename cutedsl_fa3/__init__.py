"""Attention kernels composed from readable CuTe DSL pieces."""

from pathlib import Path

# In a checkout, layouts/ and pipelines/ lie beside this package; a wheel holds them inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "layouts" / "__init__.py").is_file():
    __path__.append(str(_checkout))
