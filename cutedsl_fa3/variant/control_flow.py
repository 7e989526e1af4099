"""Names the Python construct that asked a traced value for one number.

A traced value stands for a whole tile of scores, so `if`, `and`, `max()` or `int()` on it cannot
work; the error names what was written, where, and what to write instead.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from pathlib import Path
from types import FrameType

import torch

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))

_CALLS = {
    "max": "torch.maximum(a, b)",
    "min": "torch.minimum(a, b)",
    "int": ".int()",
    "float": ".float()",
    "bool": ".bool()",
    "any": "`|`",
    "all": "`&`",
    "range": "a Python number known before tracing; a loop over a traced value does not exist",
    "round": "torch.floor(x + 0.5)",
    "sorted": "torch.minimum and torch.maximum",
    "len": "torch operations; a traced value is one number of each (b, h, q, k)",
}


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor the tracer's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return frame


def location() -> str:
    """The user's file and line, as `file:line`."""
    frame = user_frame()
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def construct(asked_for: str) -> tuple[str, str]:
    """What was written, and what to write instead.

    `asked_for` is the conversion that Python called: "bool", "int", "float", "index", "iter", ...
    """
    frame = user_frame()
    if frame is None:
        return _by_conversion(asked_for)
    found = _in_source(frame)
    return found or _in_bytecode(frame) or _by_conversion(asked_for)


def _in_source(frame: FrameType) -> tuple[str, str] | None:
    """The construct by the source text at the running instruction, where there is a source."""
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    positions = list(code.co_positions())[frame.f_lasti // 2]
    if not lines or None in positions:
        return None
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return None
    parents: dict[ast.AST, ast.AST] = {}
    found: ast.AST | None = None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            parents[child] = node
        if isinstance(node, ast.expr) and positions == (
            node.lineno,
            node.end_lineno,
            node.col_offset,
            node.end_col_offset,
        ):
            found = node
    return None if found is None else _named(found, parents)


def _named(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[str, str] | None:
    match node:
        case ast.BoolOp():
            return ("`and`", "`&`") if isinstance(node.op, ast.And) else ("`or`", "`|`")
        case ast.UnaryOp(op=ast.Not()):
            return "`not`", "`~`"
        case ast.Compare() if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            return "`in`", "`==` joined by `|`"
        case ast.Compare() if len(node.ops) > 1:
            return "a chained comparison", "`(a <= x) & (x < b)`"
        case ast.Call():
            return _call(ast.unparse(node.func))
    match parents.get(node):
        case ast.BoolOp(op=ast.And()):
            return "`and`", "`&`"
        case ast.BoolOp():
            return "`or`", "`|`"
        case ast.UnaryOp(op=ast.Not()):
            return "`not`", "`~`"
        case ast.If():
            return "`if`", "torch.where(condition, a, b)"
        case ast.IfExp():
            return "a conditional expression (`a if c else b`)", "torch.where(condition, a, b)"
        case ast.While():
            return "`while`", "torch operations; a loop must not depend on a traced value"
        case ast.Assert():
            return "`assert`", "a check outside the function"
        case ast.comprehension() | ast.For():
            return "`for`", "a loop over Python numbers"
        case ast.Call(func=function):
            return _call(ast.unparse(function))
    return None


def _call(name: str) -> tuple[str, str]:
    last = name.rsplit(".", 1)[-1]
    if name in _CALLS:
        return f"`{name}()`", _CALLS[name]
    return f"`{name}()`", f"torch.{last}" if hasattr(torch, last) else "a torch function"


def _in_bytecode(frame: FrameType) -> tuple[str, str] | None:
    """The construct by its instruction, for functions without a source."""
    instructions = list(dis.get_instructions(frame.f_code))
    at = next((i for i, ins in enumerate(instructions) if ins.offset == frame.f_lasti), None)
    if at is None:
        return None
    name = instructions[at].opname
    if name == "UNARY_NOT":
        return "`not`", "`~`"
    if name == "CONTAINS_OP":
        return "`in`", "`==` joined by `|`"
    if "JUMP" in name or name == "TO_BOOL":
        return (
            "`if`, `and`, `or` or a chained comparison",
            "torch.where for `if`, `&` for `and`, `|` for `or`, "
            "`(a <= x) & (x < b)` for `a <= x < b`",
        )
    if name.startswith("CALL"):
        names = {
            ins.argval for ins in instructions[:at] if ins.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
        called = sorted(names & set(_CALLS))
        if len(called) == 1:
            return _call(called[0])
    return None


def _by_conversion(asked_for: str) -> tuple[str, str]:
    return {
        "bool": (
            "a Python truth test (`if`, `and`, `or`, `not`, `max()`)",
            "torch.where for `if`, `&` for `and`, `|` for `or`, `~` for `not`, "
            "torch.maximum for `max`",
        ),
        "int": ("`int()`", ".int()"),
        "float": ("`float()` or a function of `math`", "the torch function, such as torch.exp"),
        "index": ("`range()` or a Python index", "a captured tensor, indexed as tensor[index]"),
        "hash": ("a dict or set lookup", "a captured tensor, indexed as tensor[index]"),
        "iter": ("a loop or unpacking", "torch operations on the value"),
    }.get(asked_for, (f"`{asked_for}()`", "a torch function"))
