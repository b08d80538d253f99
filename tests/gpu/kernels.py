"""Builds every FlashInfer kernel that the GPU check asks for, before anything is timed: `python -m tests.gpu.kernels`.

Once on a machine it takes minutes; after that it finds them built. The exit code is 1 when one of them is missing.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable

import torch

from engine.attention.flashinfer import build as flashinfer_build
from engine.attention.flashinfer.shapes import Shape
from engine.device import why_no_flashinfer
from tests.gpu.test_attention import all_shapes

HOPPER = (9, 0)


def not_built(shapes: Iterable[Shape], capability: tuple[int, int]) -> list[str]:
    """What has no library on this machine, neither built here nor beforehand, and why where that is known."""
    missing: list[str] = []
    for name, arguments in flashinfer_build.wanted(shapes, capability):
        try:
            spec = flashinfer_build.generator(name)(*arguments)
        except Exception as error:
            missing.append(f"{name}: {' '.join(str(error).split())[:200]}")
            continue
        if not spec.is_compiled:
            missing.append(str(spec.name))
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: only name them, as for a Hopper GPU")
    if parser.parse_args().rehearse:
        names = [name for name, _ in flashinfer_build.wanted(all_shapes(), HOPPER)]
        print(f"{len(names)} modules: {', '.join(f'{names.count(name)} {name}' for name in dict.fromkeys(names))}")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if missing := why_no_flashinfer(torch.device("cuda", 0)):
        sys.exit(f"WRONG: {missing}")
    shapes, capability = all_shapes(), torch.cuda.get_device_capability(0)
    flashinfer_build.build(shapes, capability)
    if left := not_built(shapes, capability):
        sys.exit(f"WRONG: {len(left)} of FlashInfer's modules are not built: {'; '.join(left)}")
    print("all built")


if __name__ == "__main__":
    main()
