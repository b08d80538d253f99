"""Builds every FlashInfer kernel that the GPU check asks for, before anything is timed: `python -m tests.gpu.kernels`.

Once on a machine it takes minutes; after that it finds them built. The exit code is 1 when one of them is missing.
`python -m bench.gpu.prebuild --model tests` builds the same on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import logging
import sys

import torch

from engine.attention.flashinfer.build import provide
from engine.attention.flashinfer.modules import wanted
from engine.device import why_no_flashinfer
from tests.gpu.test_attention import all_shapes

HOPPER = (9, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: only name them, as for a Hopper GPU")
    if parser.parse_args().rehearse:
        names = [name for name, _ in wanted(all_shapes(), HOPPER)]
        print(f"{len(names)} modules: {', '.join(f'{names.count(name)} {name}' for name in dict.fromkeys(names))}")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if missing := why_no_flashinfer(torch.device("cuda", 0)):
        sys.exit(f"WRONG: {missing}")
    if failed := provide(wanted(all_shapes(), torch.cuda.get_device_capability(0))):
        for (name, arguments), why in failed.items():
            print(f"{name}{arguments}: {why}")
        sys.exit(f"WRONG: {len(failed)} of FlashInfer's modules are not built")
    print("all built")


if __name__ == "__main__":
    main()
