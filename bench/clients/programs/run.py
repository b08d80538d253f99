"""PROGRAM URL MODEL: calls each `check_...` of a program with the two, and says how it went."""

import runpy
import sys
import traceback
from pathlib import Path

program, url, model = sys.argv[1:]
for name, check in runpy.run_path(program).items():
    if name.startswith("check_"):
        what = name.removeprefix("check_").replace("_", " ")
        try:
            check(url, Path(model))
            print(f"passed {what}", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(f"failed {what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
