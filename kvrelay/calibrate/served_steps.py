"""Courses say when each request of a load was where; steps are read from them, beside what a profile's tables say.

    GetLoad's requests -> Course -> prefill_steps, decode_steps; busy_s, gaps_s, idle_s

Prefill's steps are those of one prompt, or of prompts that begin and end together; others, whose parts cannot be told
apart, are left out. Decode's are counted by request: so many steps fit into its time, by what all that ran with it had
in their contexts. Nothing is fitted here: kvrelay/calibrate/contention.py does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cluster.router.live.timeline import PHASES
from kvrelay.client.types import EndedRequest
from placement.latency.base import LatencyModel
from placement.workload.requests import Floats

TOGETHER_S = 0.0005  # prompts whose steps begin and end so near each other were in one
OVERLAP = 0.1  # of a step: what clocks and messages make of two that follow each other
LEAST_STEPS = 8  # of an answer, to be counted
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """When a request was where, on one clock; seconds."""

    prompt: int
    cached: int
    output: int
    came_s: float
    prefill: Span
    decode: Span
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What a profile says without any load. `beside`: of a step beside the other phase, as probes found it."""

    latency: LatencyModel
    overhead_s: float  # in each of its prefill steps
    message_s: float
    max_batch_tokens: int
    prefill_beside: float = 1.0
    decode_beside: float = 1.0


def courses_of(requests: Iterable[EndedRequest]) -> list[Course]:
    return [_course(each) for each in requests if not each.failed and each.decode_worker]


def _course(ended: EndedRequest) -> Course:
    spent = [a + b for a, b in zip(ended.before_first_s, ended.after_first_s, strict=True)]
    ends = np.cumsum([-ended.age_s, *spent]).tolist()
    prefill, decode = PHASES.index("prefill"), PHASES.index("decode")
    return Course(
        prompt=ended.prompt_tokens,
        cached=ended.cached_tokens,
        output=ended.output_tokens,
        came_s=-ended.age_s,
        prefill=(ends[prefill], ends[prefill + 1]),
        decode=(ends[decode], ends[decode + 1]),
        prefill_worker=ended.prefill_worker,
        decode_worker=ended.decode_worker,
    )


# Prefill


def _by_prefill_worker(courses: Iterable[Course]) -> dict[str, list[Course]]:
    """In the order of their steps."""
    by_worker: dict[str, list[Course]] = defaultdict(list)
    for course in sorted(courses, key=lambda course: course.prefill):
        by_worker[course.prefill_worker].append(course)
    return by_worker


def _computing(courses: Iterable[Course]) -> dict[str, list[Span]]:
    """When each prefill worker did."""
    return {name: _union(each.prefill for each in row) for name, row in _by_prefill_worker(courses).items()}


def prefill_steps(courses: Sequence[Course], tables: Tables, others: Sequence[Course] = ()) -> Floats:
    """Rows of (seconds, seconds by the tables, of those beside decode, seconds of one by the tables). `others` were
    there, too, and have no rows."""
    every, own = [*courses, *others], set(courses)
    decoding = _union([course.decode for course in every])
    rows = []
    for group in _apart(every):
        if group[0] not in own:
            continue
        begin_s, end_s = group[0].prefill
        tables_s = _tables_s(group, tables)
        if tables_s and end_s > begin_s:
            rows.append((end_s - begin_s, tables_s, tables_s * _share((begin_s, end_s), decoding), tables_s))
    return np.array(rows).reshape(-1, 4)


def _apart(courses: Sequence[Course]) -> list[list[Course]]:
    """Prompts by the step that they shared, where they shared none with a part of others."""
    return [group for row in _by_prefill_worker(courses).values() for group in _groups(row)]


def _groups(row: Sequence[Course]) -> list[list[Course]]:
    groups: list[list[Course]] = []
    for course in row:
        if groups and _near(groups[-1][0].prefill, course.prefill):
            groups[-1].append(course)
        else:
            groups.append([course])
    spans = [group[0].prefill for group in groups]
    return [group for i, group in enumerate(groups) if not any(_overlap(spans[i], s) for s in _around(spans, i))]


def _near(a: Span, b: Span) -> bool:
    return abs(a[0] - b[0]) < TOGETHER_S and abs(a[1] - b[1]) < TOGETHER_S


def _around(spans: Sequence[Span], i: int) -> list[Span]:
    """By begin: one that reaches into the i-th is not far before it."""
    return [span for j, span in enumerate(spans[max(0, i - 8) : i + 8], max(0, i - 8)) if j != i]


def _overlap(a: Span, b: Span) -> bool:
    shared_s = min(a[1], b[1]) - max(a[0], b[0])
    return shared_s > OVERLAP * min(a[1] - a[0], b[1] - b[0])


def _tables_s(group: Sequence[Course], tables: Tables) -> float:
    """0 where it is not known which steps they had."""
    chunks = [(course.prompt - course.cached, course.cached) for course in group]
    most = tables.max_batch_tokens
    if sum(length for length, _ in chunks) <= most:
        return tables.latency.prefill_s(chunks) - tables.overhead_s
    if len(chunks) > 1:
        return 0.0
    length, start = chunks[0]
    steps = [(min(most, length - done), start + done) for done in range(0, length, most)]
    return sum(tables.latency.prefill_s([step]) for step in steps) - tables.overhead_s


def busy_s(courses: Sequence[Course]) -> float:
    """That prefill workers computed, all added up."""
    return sum(end_s - begin_s for union in _computing(courses).values() for begin_s, end_s in union)


def span_s(courses: Sequence[Course]) -> float:
    """From the first that came to the last."""
    came_s = [course.came_s for course in courses]
    return max(max(came_s) - min(came_s), 1e-3)


def gaps_s(courses: Sequence[Course]) -> list[float]:
    """Between the end of a worker's step and the next one's begin, where a prompt had waited for that."""
    gaps = []
    for row in _by_prefill_worker(courses).values():
        for before, after in pairwise(row):
            if after.came_s < before.prefill[0] and before.prefill[1] <= after.prefill[0]:
                gaps.append(after.prefill[0] - before.prefill[1])
    return gaps


# Decode


def decode_steps(courses: Sequence[Course], tables: Tables, others: Sequence[Course] = ()) -> Floats:
    """Rows of (steps, steps by the tables in its time, of those while prefill computed, seconds of one by the tables),
    for each answer. `others` ran, too, and have no rows."""
    own = set(courses)
    reading: dict[str, list[Span]] = defaultdict(list)
    by_worker: dict[str, list[Course]] = defaultdict(list)
    for course in (*courses, *others):
        reading[course.prefill_worker].append(course.prefill)
        if course.output > 1:
            by_worker[course.decode_worker].append(course)
    unions = [_union(spans) for spans in reading.values()]
    return np.concatenate([_steps_of(row, own, unions, tables) for row in by_worker.values()] or [np.zeros((0, 4))])


def _steps_of(row: Sequence[Course], own: Set[Course], reading: Sequence[Sequence[Span]], tables: Tables) -> Floats:
    """Between two events at the worker the batch stays; its step is that of the middle."""
    at = sorted({at for course in row for at in course.decode} | {at for u in reading for span in u for at in span})
    steps, beside = np.zeros(len(at)), np.zeros(len(at))  # until each event
    for i, (begin_s, end_s) in enumerate(pairwise(at)):
        middle_s = (begin_s + end_s) / 2
        running = [course for course in row if course.decode[0] <= begin_s and end_s <= course.decode[1]]
        if running:
            context = sum(_context(course, middle_s) for course in running)
            fit = (end_s - begin_s) / tables.latency.decode_line(len(running), round(context)).step_s
            steps[i + 1] = fit
            beside[i + 1] = fit * sum(_is_in(middle_s, union) for union in reading) / len(reading)
    steps, beside = np.cumsum(steps), np.cumsum(beside)
    rows = []
    for course in row:
        lasted_s = course.decode[1] - course.decode[0]
        if course in own and course.output - 1 >= LEAST_STEPS and lasted_s > 0:
            begin, end = (bisect_left(at, edge) for edge in course.decode)
            fit = steps[end] - steps[begin]
            rows.append((course.output - 1, fit, beside[end] - beside[begin], lasted_s / fit))
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def _context(course: Course, at_s: float) -> float:
    begin_s, end_s = course.decode
    return course.prompt + course.output * (at_s - begin_s) / max(end_s - begin_s, 1e-9)


def _union(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if joined and begin_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((begin_s, end_s))
    return joined


def _is_in(at_s: float, union: Sequence[Span]) -> bool:
    return any(begin_s <= at_s < end_s for begin_s, end_s in union)


def _share(span: Span, union: Sequence[Span]) -> float:
    shared = [min(span[1], end_s) - max(span[0], begin_s) for begin_s, end_s in union]
    return sum(each for each in shared if each > 0) / (span[1] - span[0])


def idle_s(courses: Sequence[Course]) -> list[float]:
    """From coming to its first step, of prompts that waited for no other."""
    unions = _computing(courses)
    return [
        course.prefill[0] - course.came_s
        for course in courses
        if not any(begin < course.prefill[0] and end > course.came_s for begin, end in unions[course.prefill_worker])
    ]
