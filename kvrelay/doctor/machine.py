"""What the machine gives: CPU, limits, huge pages, clock, and who else takes its time. Checks only: each is given what
was read (kvrelay/doctor/reading.py), so that a test can be any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvrelay.doctor.finding import Finding

PART = "machine"
VECTORS = {"avx512f": "AVX-512", "avx512_bf16": "BF16", "amx_bf16": "AMX", "avx2": "AVX2", "asimd": "NEON"}
AMX_MODELS = {(6, 143), (6, 207), (6, 173), (6, 174)}  # Sapphire, Emerald and Granite Rapids: all have it
LEAST_FILES = 4096
FILES_OF_RAY = 65536  # to which `ray.init` raises its own limit, as far as it may
LEAST_LOCKED_BYTES = 64 << 20
STEADY_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
MUCH_STOLEN, MUCH_BUSY = 0.05, 0.25  # shares of all cores' time


def cpu(name: str, flags: Collection[str], family_model: tuple[int, int]) -> Finding:
    has = [word for flag, word in VECTORS.items() if flag in flags]
    found = f"{name}: {', '.join(has) or 'no vector instructions that are used'}"
    if family_model in AMX_MODELS and "amx_bf16" not in flags:
        mend = (
            "have the hypervisor pass AMX through, and run a kernel of 5.16 or later: bfloat16 prompts are read faster"
        )
        return Finding(part=PART, name="CPU", verdict="doubtful", found=f"{found}; its AMX is hidden", mend=mend)
    if "avx2" not in flags and "asimd" not in flags:
        mend = "take a CPU with AVX2 or later: products and attention run far slower without"
        return Finding(part=PART, name="CPU", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="CPU", verdict="good", found=found)


def open_files(soft: int, hard: int, workers: int, *, is_joined: bool = False) -> Finding:
    """`workers`: of the spec; each has a connection to every router and peer. `is_joined`: to a Ray that was started
    with what there is; a Ray of our own raises it. -1: no limit."""
    wanted = max(LEAST_FILES, 64 * workers)
    if soft >= 0 and not is_joined:
        soft = max(soft, FILES_OF_RAY if hard < 0 else min(hard, FILES_OF_RAY))
    found = "no limit" if soft < 0 else f"{soft}"
    if 0 <= soft < wanted:
        up_to = f"ulimit -n {wanted}" if hard < 0 or hard >= wanted else f"LimitNOFILE={wanted} or limits.conf, as root"
        mend = f"raise it ({up_to}): every client, peer and page file is one"
        return Finding(part=PART, name="open files", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="open files", verdict="good", found=found)


def locked_memory(limit_bytes: int, gpus: int) -> Finding:
    """KV of a CPU is never locked."""
    found = "no limit" if limit_bytes < 0 else f"{limit_bytes / (1 << 20):.0f} MiB"
    if gpus and 0 <= limit_bytes < LEAST_LOCKED_BYTES:
        mend = "ulimit -l unlimited (LimitMEMLOCK=infinity): NCCL pins memory for networks"
        return Finding(part=PART, name="locked memory", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="locked memory", verdict="good", found=found)


def huge_pages(setting: str) -> Finding:
    """`setting`: of /sys/kernel/mm/transparent_hugepage/enabled; empty: it cannot be read."""
    chosen = setting.partition("[")[2].partition("]")[0]
    if not chosen:
        return Finding(part=PART, name="huge pages", verdict="unknown", found="the kernel does not say")
    if chosen == "never":
        mend = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root: weights are read page by page"
        return Finding(part=PART, name="huge pages", verdict="doubtful", found="never", mend=mend)
    return Finding(part=PART, name="huge pages", verdict="good", found=f"transparent ones: {chosen}")


def clock(source: str, is_set: bool | None) -> Iterator[Finding]:
    """`is_set`: the kernel believes that its time of day is kept right; None: it does not say."""
    if source and source not in STEADY_CLOCKS:
        mend = "have the kernel use tsc: every token's time is read, and this clock takes a microsecond or more"
        yield Finding(part=PART, name="clock", verdict="doubtful", found=source, mend=mend)
    else:
        found = source or "the kernel does not say"
        yield Finding(part=PART, name="clock", verdict="good" if source else "unknown", found=found)
    if is_set is None:
        yield Finding(part=PART, name="time of day", verdict="unknown", found="the kernel does not say")
    elif is_set:
        yield Finding(part=PART, name="time of day", verdict="good", found="kept by NTP")
    else:
        mend = "run chrony or systemd-timesyncd: certificates and logs of several hosts go by it"
        yield Finding(part=PART, name="time of day", verdict="doubtful", found="nobody keeps it right", mend=mend)


def stolen_time(stolen: float) -> Finding:
    """A share of all cores' time, in the moment that was looked at."""
    if stolen > MUCH_STOLEN:
        mend = "take a machine of your own, or dedicated cores: no figure measured here says much"
        found = f"{stolen:.0%} of the cores' time goes to other guests"
        return Finding(part=PART, name="stolen time", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="stolen time", verdict="good", found=f"{stolen:.1%}")


def other_work(busy: float) -> Finding:
    """Likewise."""
    if busy > MUCH_BUSY:
        mend = "end it, or pin the workers (cpus) to cores that it leaves alone"
        return Finding(part=PART, name="other work", verdict="doubtful", found=f"cores are {busy:.0%} busy", mend=mend)
    return Finding(part=PART, name="other work", verdict="good", found=f"cores are {busy:.0%} busy")
