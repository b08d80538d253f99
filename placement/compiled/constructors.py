"""Writes out the constructors of a module's dataclasses, so that mypyc compiles them too.

The decorator makes `__init__` when the module is imported, which is after the compiler has seen it: it stays
interpreted, and one of a frozen class sets each field through `object.__setattr__`. Made by mypyc 2.4, such an object
costs 1.0 us (0.4 us where the class is not frozen), and 0.04 us with its constructor in the source; a simulated request
makes about a dozen. The live policies are 1.6 times as fast for it (24,000 requests a CPU-second instead of 15,000 on
one pair of workers, 3,700 uncompiled), the papers' rules 1.25 times. So the copies that are compiled are rewritten,
and the sources stay dataclasses. The copies are not frozen, which only means that nobody tells who changes one; the
sources tell.
"""

from __future__ import annotations

import ast


def with_constructors(source: str) -> str:
    """The same module, its dataclasses built by constructors of their own, not frozen, and hashable if they were."""
    module = ast.parse(source)
    for kind in module.body:
        call = kind.decorator_list[0] if isinstance(kind, ast.ClassDef) and kind.decorator_list else None
        if isinstance(kind, ast.ClassDef) and isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclass":
            is_kw_only = any(option.arg == "kw_only" for option in call.keywords)
            for option in call.keywords:
                if option.arg == "frozen":
                    option.arg = "unsafe_hash"  # values stay hashable
            kind.body.append(_constructor(kind, is_kw_only))
    return ast.unparse(ast.fix_missing_locations(module))


def _constructor(kind: ast.ClassDef, is_kw_only: bool) -> ast.stmt:
    given, body = [], []
    for line in kind.body:
        if not isinstance(line, ast.AnnAssign):
            continue
        name, type_name = ast.unparse(line.target), ast.unparse(line.annotation)
        line.value = _default(line.value)
        default = "" if line.value is None else f" = {ast.unparse(line.value)}"
        if "default_factory=" in default:
            assert isinstance(line.value, ast.Call)
            make = ast.unparse(line.value.keywords[0].value)
            type_name, default = f"{type_name} | None", " = None"
            body.append(f"self.{name} = ({make})() if {name} is None else {name}")
        else:
            body.append(f"self.{name} = {name}")
        given.append(f"{name}: {type_name}{default}")
    if any(isinstance(line, ast.FunctionDef) and line.name == "__post_init__" for line in kind.body):
        body.append("self.__post_init__()")
    star = "*, " if is_kw_only else ""
    return ast.parse(f"def __init__(self, {star}{', '.join(given)}) -> None:\n    " + "\n    ".join(body)).body[0]


def _default(value: ast.expr | None) -> ast.expr | None:
    """Of `knob(64, "...")` the first argument. The sources have checked the value where it was made; a compiled class
    could not, because mypyc keeps no more than `type` of the annotation `int | None`."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "knob":
        return value.args[0]
    return value
