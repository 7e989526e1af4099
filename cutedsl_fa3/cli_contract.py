"""The command that holds the machine code of every shipped kernel against its contract."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer

from .cli_bench import need_compiler


def run_contract(
    accept: Annotated[bool, typer.Option(help="Store what the code is now.")] = False,
    only: Annotated[
        str, typer.Option(help="Kernels whose name holds this, as in d64- or gemm_sm90.")
    ] = "",
    jobs: Annotated[int, typer.Option(help="Kernels compiled side by side.")] = 2,
) -> None:
    """Compile every shipped kernel and print how its machine code differs from what was accepted.

    Exit 1 on a difference that is not accepted, 2 where the contracts are another compiler's.
    """
    need_compiler()
    from . import contract

    stored, here = contract.Contracts.read(), contract.tools()
    shipped = contract.shipped()
    names = [name for name in shipped if only in name]
    if not names:
        typer.echo(f"refused: no kernel's name holds {only!r}", err=True)
        raise typer.Exit(2)
    same = stored.compiler == here
    if not same and not (accept and len(names) == len(shipped)):
        typer.echo(
            f"refused: contracts are of {stored.compiler or 'no compiler'} and this is {here}; "
            "--accept for all kernels makes them its own",
            err=True,
        )
        raise typer.Exit(2)
    found, changed = {}, [name for name in stored.kernels if name not in shipped]
    for name in changed:
        print(f"{name}: not shipped any more")
    for name, made in _compiled(names, jobs):
        found[name] = made
        if name not in stored.kernels:
            lines = ["no contract is stored"]
        else:
            lines = contract.differences(stored.kernels[name], made)
        if lines:
            changed.append(name)
            print("\n  ".join([name, *lines]), flush=True)
    print(f"{len(changed)} of {len(names)} kernels differ from their contracts")
    if accept:
        kept = {name: stored.kernels[name] for name in stored.kernels if name in shipped}
        path = contract.Contracts(here, {**kept, **found}).write()
        print(f"written to {path}")
    elif changed:
        raise typer.Exit(1)


def _compiled(names: list[str], jobs: int) -> Iterator[tuple[str, object]]:
    """The contract of each kernel, in processes of their own: the compiler takes one at a time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=max(1, jobs), mp_context=context) as pool:
        yield from zip(names, pool.map(_contract, names), strict=True)


def _contract(name: str) -> object:
    from . import contract
    from .compile import compile_kernel

    return contract.contract_of(compile_kernel(contract.shipped()[name]))
