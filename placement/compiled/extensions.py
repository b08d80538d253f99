"""Makes extension modules of Python modules by mypyc, beside them; build.py runs it in their folder.

    python placement/compiled/extensions.py MODULE.py ...

mypyc's own command has all its C in one file, on which a compiler spends half a minute with one core. Here each module
has a file, and the compiler runs on every core.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

FLAGS = ("--config-file", "", "--follow-imports=silent", "--ignore-missing-imports")  # of mypy
OPT_LEVEL, DEBUG_LEVEL = "1", "0"  # a third of the compiler's time, and the code is as fast as at level 3
QUIET = "-w"  # warnings take as long as all the rest


def main(modules: Sequence[str]) -> None:
    mypyc = import_module("mypyc.build")  # which has setuptools put a distutils in place, that Python 3.12 lacks
    ccompiler, sysconfig = import_module("distutils.ccompiler"), import_module("distutils.sysconfig")
    levels = {"opt_level": OPT_LEVEL, "debug_level": DEBUG_LEVEL}
    extensions = mypyc.mypycify([*FLAGS, *modules], **levels, multi_file=len(modules) > 1)  # one alone lacks a header
    compiler: Any = ccompiler.new_compiler()
    sysconfig.customize_compiler(compiler)
    headers = sysconfig.get_python_inc()

    def compiled(extension: Any, source: str) -> str:
        flags = [*extension.extra_compile_args, QUIET]
        (made,) = compiler.compile(
            [source], include_dirs=[headers, *extension.include_dirs], extra_postargs=flags, depends=extension.depends
        )
        return str(made)

    def linked(extension: Any, objects: Sequence[str]) -> None:
        target = extension.name.replace(".", os.sep) + sysconfig.get_config_var("EXT_SUFFIX")
        compiler.link_shared_object(list(objects), target, extra_postargs=extension.extra_link_args)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pairs = [(extension, source) for extension in extensions for source in extension.sources]
        pairs.sort(key=lambda pair: Path(pair[1]).stat().st_size, reverse=True)  # the longest first
        objects = dict(zip([source for _, source in pairs], pool.map(compiled, *zip(*pairs, strict=True)), strict=True))
        list(pool.map(linked, extensions, [[objects[source] for source in each.sources] for each in extensions]))


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # in order it takes five seconds, for what mypyc has read
