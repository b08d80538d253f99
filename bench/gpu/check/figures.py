"""The figures that the GPU check shows last: what was looked for first, found and wanted.

A figure below what is wanted is shown, and is no failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def result(folder: Path, name: str) -> dict[str, Any]:
    """What a part wrote there; empty for one that has not."""
    path = folder / f"gpu_{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def figures(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(what, found, wanted)"""
    transports, cluster = result(folder, "transports"), result(folder, "cluster")
    for row in transports.get("bytes", []):
        if row["prompt_tokens"] >= 2048 or transports["is_rehearsal"]:
            what = f"{row['transport']}, {row['prompt_tokens']} tokens, {row['pages']} pages"
            yield what, f"{row['share_of_plain_copy']:.0%} of a plain copy", f"{transports['wanted_share']:.0%}"
    if transports:
        way = transports["nccl"]["way"]
        yield "NCCL's bytes", f"right ({way})" if way else "could not run here", "right"
    if cluster:
        tokens, handoff = cluster["tokens"], cluster["handoff"]
        found = f"{tokens['equal']} equal, {len(tokens['ties'])} ties, {len(tokens['wrong'])} wrong"
        yield f"greedy tokens of {tokens['requests']} requests", found, "0 wrong"
        what = f"exposed handoff of {handoff['prompt_tokens']} tokens"
        yield what, f"{handoff['exposed_ms']:.2f} ms", f"{handoff['wanted_exposed_ms']:.0f} ms"
    for row in result(folder, "engine").get("summary", []):
        yield row["what"], row["found"], row["wanted"]
    for row in result(folder, "peers").get("rows", []):
        yield f"{row['peer']}, {row['kind']} {row['size']}", f"{row['ms']:.1f} ms", "-"
