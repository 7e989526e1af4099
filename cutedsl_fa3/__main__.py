"""`python -m cutedsl_fa3`."""

from .cli import app

app(prog_name="cutedsl-fa3")
