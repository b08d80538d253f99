"""What was looked at on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, cell, slashed, table


def gpu_env(result: Mapping[str, Any]) -> str:
    columns = ("name", "capability", "multiprocessors", "memory_gib")
    return table(("GPU", *columns[1:]), [[gpu[key] for key in columns] for gpu in result["gpus"]])


def gpu_engine(result: Mapping[str, Any]) -> str:
    columns = ("what", "found", "wanted")
    return table(columns, [[row[key] for key in columns] for row in result["summary"]])


def gpu_peers(result: Mapping[str, Any]) -> str:
    return table(
        ("transformers", "", "ms"), [[r["peer"], f"{r['kind']} {r['size']}", f"{r['ms']:.1f}"] for r in result["rows"]]
    )


def gpu_transports(result: Mapping[str, Any]) -> str:
    columns = ("devices", "transport", "prompt_tokens", "pages", "gbytes_per_s", "share_of_plain_copy")
    rows = [[cell(row[key]) for key in columns] for row in result["bytes"]]
    return table([key.replace("_", " ") for key in columns], rows)


def gpu_cluster(result: Mapping[str, Any]) -> str:
    tokens, handed = result["tokens"], result["handoff"]
    rows = [
        ["greedy tokens of a request equal", f"{tokens['equal']} of {tokens['requests']}"],
        ["at a tie, wrong", f"{len(tokens['ties'])}, {len(tokens['wrong'])}"],
        [f"exposed of {handed['prompt_tokens']} tokens, ms", f"{handed['exposed_ms']:.2f}"],
        ["wanted, ms", f"{handed['wanted_exposed_ms']:g}"],
    ]
    return table(["two processes beside one engine", ""], rows)


def gpu_one_gpu(result: Mapping[str, Any]) -> str:
    rows = [
        [row["serving"], f"{row['rate']:g}", *(slashed(row[f"{key}_ms"]) for key in ("ttft", "tpot", "itl"))]
        for row in result["rows"]
    ]
    return table(["serving", "requests/s", *(f"{key} P50/P90/P99 ms" for key in ("TTFT", "TPOT", "ITL"))], rows)


TABLES: Tables = {
    "gpu_cluster": gpu_cluster,
    "gpu_engine": gpu_engine,
    "gpu_env": gpu_env,
    "gpu_one_gpu": gpu_one_gpu,
    "gpu_peers": gpu_peers,
    "gpu_transports": gpu_transports,
}
