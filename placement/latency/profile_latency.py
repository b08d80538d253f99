"""ProfileLatency is a LatencyModel made of what was measured: straight lines through a Profile's points.

    prefill    steps of chunks, each (tokens computed, tokens before them). The axes are their sum and the tokens that
               each token attends to on average: for each sum a line in those; between sums, straight. Each prompt
               beyond a step's first adds the same.
    decode     steps of a batch: for each batch size a line in the context of a request; between sizes, straight.
    mixed      a decode step, and a share of what the chunks would take beyond a step of one token: the share that was
               measured, or all of it.
    transfer   a line in the tokens.

The lines are least squares and never fall with the context. Beyond the outermost measured sums and sizes the last two
lines go on. Points that say `held_out` are in no line: `error` comes from them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from placement.latency.base import DecodeLine
from placement.latency.profile import MixedPoint, PrefillPoint, Profile
from placement.latency.under_load import PhaseUnderLoad


class Lines:
    """Seconds over (x, y): for each measured x a line in y, between them straight, beyond them the last two go on."""

    def __init__(self, points: Sequence[tuple[float, float, float]]) -> None:
        """Points are (x, y, seconds). A line's slope is never negative; an x with one y has the slope of all others,
        per unit of x where `x` multiplies the work."""
        by_x: dict[float, list[tuple[float, float]]] = {}
        for x, y, seconds in points:
            by_x.setdefault(x, []).append((y, seconds))
        self.xs = sorted(by_x)
        shared = _shared_slope(by_x)
        self._lines: list[tuple[float, float]] = []  # seconds at y = 0, slope
        for x in self.xs:
            slope = _slope(by_x[x])
            slope = shared * x if slope is None else slope
            mean_y, mean_s = _means(by_x[x])
            self._lines.append((mean_s - slope * mean_y, slope))

    def at(self, x: float) -> tuple[float, float]:
        """The line at x: seconds at y = 0, seconds for each unit of y."""
        xs, lines = self.xs, self._lines
        if len(xs) == 1 or x <= xs[0]:
            return lines[0]
        i = min(bisect_right(xs, x) - 1, len(xs) - 2)
        share = (x - xs[i]) / (xs[i + 1] - xs[i])
        (base, slope), (next_base, next_slope) = lines[i], lines[i + 1]
        return base + share * (next_base - base), max(0.0, slope + share * (next_slope - slope))


def _means(row: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(y for y, _ in row) / len(row), sum(s for _, s in row) / len(row)


def _slope(row: Sequence[tuple[float, float]]) -> float | None:
    """Of the least squares' line, at least 0; None for fewer than two ys."""
    mean_y, mean_s = _means(row)
    spread = sum((y - mean_y) ** 2 for y, _ in row)
    if not spread:
        return None
    return max(0.0, sum((y - mean_y) * (s - mean_s) for y, s in row) / spread)


def _shared_slope(by_x: Mapping[float, Sequence[tuple[float, float]]]) -> float:
    """Seconds for each y and each x, over all rows that have a slope: attention's work is their product."""
    slopes = [(x, slope) for x, row in by_x.items() if (slope := _slope(row)) is not None]
    return sum([x * slope for x, slope in slopes]) / sum([x * x for x, _ in slopes]) if slopes else 0.0


class ProfileLatency:
    """One worker as it was measured; a step's time holds what lies between it and the next one.

    `prompt_share`: what chunks of prompts take in a step that decodes, of what they would take by themselves beyond a
    step of one token. None: as was measured, 1 where it was not.
    """

    def __init__(self, profile: Profile, prompt_share: float | None = None) -> None:
        self.profile = profile
        load = profile.load
        self._prefill, self._decode = (load.prefill, load.decode) if load else (PhaseUnderLoad(), PhaseUnderLoad())
        self._overhead_s = load.gap_s if load else profile.prefill_overhead_s
        fit = [point for point in profile.prefill if not point.held_out]
        alone = [point for point in fit if len(point.chunks) == 1] or fit
        self._prefill_lines = Lines([(point.tokens, point.attended, point.seconds) for point in alone])
        self._chunk_s = self._for_each_more([point for point in fit if len(point.chunks) > 1])
        fit_decode = [point for point in profile.decode if not point.held_out]
        self._decode_lines = Lines([(p.batch_size, p.context_tokens / p.batch_size, p.seconds) for p in fit_decode])
        self._least_s = min([*(p.seconds for p in fit), *(p.seconds for p in fit_decode)]) / 2
        self.prompt_share = self._measured_share() if prompt_share is None else prompt_share
        self._transfer = _line([(p.tokens, p.seconds) for p in profile.transfer if not p.held_out])

    @property
    def source(self) -> str:
        profile = self.profile
        cpu = profile.machine.get("cpu", "this machine")
        return f"measured by kvrelay calibrate on {cpu}, {profile.date[:10]} ({profile.name})"

    @property
    def stages(self) -> int:
        return self.profile.pp

    def _for_each_more(self, points: Sequence[PrefillPoint]) -> float:
        """What each prompt beyond the first adds to a step, beside its tokens."""
        more = [(p.seconds - self._step_s(p.tokens, p.attended)) / (len(p.chunks) - 1) for p in points]
        return max(0.0, sum(more) / len(more)) if more else 0.0

    def _measured_share(self) -> float:
        """Of the least squares, over the steps of both that were measured."""
        pairs = [
            (self._beyond_s(p.chunks), p.seconds + self.profile.prefill_overhead_s - self._decode_s(p))
            for p in self.profile.mixed
            if not p.held_out
        ]
        whole = sum([beyond_s * beyond_s for beyond_s, _ in pairs])
        return max(0.0, sum([beyond_s * added_s for beyond_s, added_s in pairs]) / whole) if whole else 1.0

    def _decode_s(self, point: MixedPoint) -> float:
        return self.decode_line(point.batch_size, point.context_tokens).step_s

    def _beyond_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.prefill_s(chunks) - self.prefill_s([(1, 0)])

    def _step_s(self, tokens: int, attended: float) -> float:
        base_s, slope_s = self._prefill_lines.at(tokens)
        return base_s + slope_s * attended

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        tokens = 0
        pairs = 0.0
        for length, start in chunks:
            tokens += length
            pairs += length * (start + (length + 1) / 2)
        if not tokens:
            return 0.0
        step_s = self._step_s(tokens, pairs / tokens) + (len(chunks) - 1) * self._chunk_s
        return self._prefill.alone * max(self._least_s, step_s) + self._prefill.more_s + self._overhead_s

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        base_s, slope_s = self._decode_lines.at(batch_size)
        per_token_s = slope_s / batch_size
        step_s = max(self._least_s, base_s + per_token_s * context_tokens)
        return DecodeLine(self._decode.alone * step_s + self._decode.more_s, self._decode.alone * per_token_s)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        if not batch_size:
            return self.prefill_s(chunks)
        decode_s = self.decode_line(batch_size, context_tokens).step_s
        if not chunks:
            return decode_s
        return max(decode_s, decode_s + self.prompt_share * self._beyond_s(chunks))

    def transfer_s(self, num_tokens: int) -> float:
        base_s, slope_s = self._transfer
        return max(0.0, base_s + slope_s * num_tokens) if num_tokens > 0 else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares, never falling, never below 0 at 0."""
    if not points:
        return 0.0, 0.0
    slope = _slope(points)
    mean_x, mean_s = _means(points)
    if slope is None:
        return (0.0, mean_s / mean_x) if mean_x else (mean_s, 0.0)
    base = mean_s - slope * mean_x
    return (base, slope) if base >= 0 else (0.0, sum(x * s for x, s in points) / sum(x * x for x, _ in points))
