"""sampled_tokens() turns the logits of a step into one token for each row. It keeps no state.

Order of application: logit bias, penalties (repetition, frequency, presence), what may not be drawn (by
allowed_token_ids, by the answer's form, by bans), temperature, top-n-sigma, top-k, top-p, min-p, typical-p, draw.
Temperature 0 takes the likeliest token that is left; the lowest id wins a tie.

Every row is worked alone, by numpy in one thread, so its token does not depend on the other rows, their number or
order, or the number of threads: the same logits give the same token, bit for bit. The draw is the inverse of the
cumulative distribution over the kept ids, in the order of ids, at a number keyed by (seed, position): see rng.py.
numpy is also the faster: on a CPU its argmax took a seventh to a thirtieth of torch's time, its sort a thirtieth.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.rng import uniform
from engine.types import SampledToken, SampleSpec, SamplingParams, TokenLogprob

Sampled = tuple[int, TokenLogprob | None, tuple[TokenLogprob, ...]]
_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.intp]

_BLOCK = 512  # ids in one block of the two-level cumulative sum
TOP_P_SLACK = 1e-6  # relative; float32 logits of 0.5, 0.3, 0.2 must reach a top_p of 0.8 with two tokens


class NonFiniteLogits(ArithmeticError):
    """The logits of `rows` hold NaN or +inf, or leave no token to draw. Other rows are not to blame."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(
            f"logits of row {', '.join(map(str, rows))} hold NaN or +inf, or no finite value that may be drawn; "
            "the model overflowed: load it in bfloat16 or float32"
        )
        self.rows = tuple(rows)


def sampled_tokens(
    logits_RV: torch.Tensor, request_ids: Sequence[str], specs: Sequence[SampleSpec]
) -> list[SampledToken]:
    """A token for each row; an error for each row that is not finite, of which the others know nothing."""
    try:
        drawn = sample(logits_RV, specs)
    except NonFiniteLogits as error:
        good = [row for row in range(len(specs)) if row not in error.rows]
        rest = sampled_tokens(logits_RV[good], [request_ids[row] for row in good], [specs[row] for row in good])
        tokens = dict(zip(good, rest, strict=True))
        failed = {row: failed_token(request_ids[row], specs[row], str(error)) for row in error.rows}
        return [(tokens | failed)[row] for row in range(len(specs))]
    return [
        SampledToken(
            request_id=request_id,
            token_id=token_id,
            logprob=logprob,
            top_logprobs=top,
            is_given=spec.given_id is not None,
        )
        for request_id, spec, (token_id, logprob, top) in zip(request_ids, specs, drawn, strict=True)
    ]


def failed_token(request_id: str, spec: SampleSpec, error: str) -> SampledToken:
    """`error`: of the logits; where a form leaves nothing to draw, that is told."""
    own = spec.form.error if spec.form is not None else ""
    if not own and spec.form is not None and spec.params.allowed_token_ids:
        bits = spec.form.bits()
        if not any(bits[i >> 3] >> (i & 7) & 1 for i in spec.params.allowed_token_ids):
            own = "allowed_token_ids has none that keeps the answer's form"
    return SampledToken(request_id=request_id, token_id=-1, error=own or error, is_own_fault=bool(own))


def sample(logits_RV: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """One (token id, its logprob, the likeliest tokens' logprobs) for each row.

    `logits_RV` is [rows, vocab] in any float dtype, on any device; `specs[i]` belongs to row i. Logprobs are natural
    logs of the raw distribution, before penalties and temperature; None and () where they were not asked for.
    Raises NonFiniteLogits naming the rows that cannot be sampled; the caller may sample the others without them.
    """
    assert logits_RV.ndim == 2, f"logits have shape {tuple(logits_RV.shape)}, not [rows, vocab]"
    assert len(specs) == logits_RV.shape[0], f"{logits_RV.shape[0]} rows of logits for {len(specs)} specs"
    if logits_RV.device.type != "cpu" and all(_is_plain_greedy(spec) for spec in specs):
        return _argmax_on_device(logits_RV)
    rows_RV = logits_RV.detach().cpu()  # widened one by one: all at once are memory new from the kernel in each step
    widened = (row_V.to(torch.float32).numpy() for row_V in rows_RV)
    return _collect([_sample_row(row_V, spec) for row_V, spec in zip(widened, specs, strict=True)])


def is_edited(spec: SampleSpec) -> bool:
    """Whether anything is changed of the logits before the temperature."""
    params = spec.params
    return bool(params.has_penalties or params.logit_bias or params.allowed_token_ids or spec.form or spec.banned_ids)


def _is_plain_greedy(spec: SampleSpec) -> bool:
    params = spec.params
    return params.is_greedy and params.logprobs is None and not is_edited(spec) and not spec.num_candidates


def _argmax_on_device(logits_RV: torch.Tensor) -> list[Sampled]:
    """Greedy tokens without moving the logits: two numbers for each row cross the bus."""
    best_R1 = logits_RV.argmax(dim=-1, keepdim=True)
    finite = torch.isfinite(logits_RV.gather(1, best_R1)).squeeze(1).tolist()
    ids = best_R1.squeeze(1).tolist()
    return _collect([(token_id, None, ()) if ok else None for token_id, ok in zip(ids, finite, strict=True)])


def _collect(sampled: list[Sampled | None]) -> list[Sampled]:
    bad = [row for row, result in enumerate(sampled) if result is None]
    if bad:
        raise NonFiniteLogits(bad)
    return [result for result in sampled if result is not None]


def _sample_row(raw_V: _F32, spec: SampleSpec) -> Sampled | None:
    """None when no token can be drawn."""
    params = spec.params
    if spec.num_candidates:
        raw_V = torch.log_softmax(torch.from_numpy(raw_V), dim=-1).numpy()  # in float32, as transformers' beam search
    logits_V = _edited(raw_V, spec) if is_edited(spec) else raw_V
    best = int(logits_V.argmax())  # NaN counts as the largest, so one look at the winner judges the whole row
    if not np.isfinite(logits_V[best]):
        return None
    if spec.num_candidates:
        return best, None, _candidates(logits_V, spec.num_candidates)
    if spec.given_id is not None:
        token_id = spec.given_id
    else:
        token_id = best if params.is_greedy else _draw(logits_V, float(logits_V[best]), spec)
    if params.logprobs is None:
        return token_id, None, ()
    return _with_logprobs(raw_V, token_id, params.logprobs)


def _edited(raw_V: _F32, spec: SampleSpec) -> _F32:
    """A copy with bias and penalties, and -inf for what may not be drawn; bans that leave nothing do not hold."""
    params, logits_V = spec.params, raw_V.copy()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits_V[list(ids)] += np.array(biases, np.float32)
    _penalise(logits_V, spec)
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        kept = logits_V[allowed]
        logits_V.fill(-np.inf)
        logits_V[allowed] = kept
    if spec.form is not None:
        bits = np.frombuffer(spec.form.bits(), np.uint8)
        logits_V[np.unpackbits(bits, count=logits_V.size, bitorder="little") == 0] = -np.inf
    if spec.banned_ids:
        banned = list(spec.banned_ids)
        kept = logits_V[banned]
        logits_V[banned] = -np.inf
        if logits_V.max() == -np.inf:
            logits_V[banned] = kept
    return logits_V


def _penalise(logits_V: _F32, spec: SampleSpec) -> None:
    """Repetition divides positive logits and multiplies negative ones, for ids of the prompt and of the output (CTRL,
    Keskar et al., 2019, as Hugging Face and vLLM do); frequency and presence are subtracted, for ids of the output.
    """
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([_as_ids(spec.prompt_ids), _as_ids(spec.output_ids)]))
        values = logits_V[seen]
        penalty = np.float32(params.repetition_penalty)
        logits_V[seen] = np.where(values < 0, values * penalty, values / penalty)
    _subtract_output_penalties(logits_V, params, spec.output_ids)


def _subtract_output_penalties(logits_V: _F32, params: SamplingParams, output_ids: Sequence[int]) -> None:
    if not output_ids or (params.frequency_penalty == 0.0 and params.presence_penalty == 0.0):
        return
    seen, counts = np.unique(_as_ids(output_ids), return_counts=True)
    logits_V[seen] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)


def _as_ids(token_ids: Sequence[int]) -> _Ids:
    return np.asarray(token_ids, dtype=np.intp)


def _draw(logits_V: _F32, top: float, spec: SampleSpec) -> int:
    params = spec.params
    ids: _Ids | None = None  # None: every id is kept
    kept = logits_V
    if params.top_n_sigma > 0.0:
        ids = _near_the_top(kept, top, params.top_n_sigma)
        kept = kept[ids]
    if 0 < params.top_k < kept.size:
        largest = _largest(kept, params.top_k)
        ids, kept = _narrowed(ids, largest), kept[largest]
    weights = _weights(kept, top, params.temperature)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        ids, weights = _narrowed(ids, nucleus), weights[nucleus]
    if params.min_p > 0.0:  # weights are relative to the likeliest, which top-k and top-p never remove
        likely = np.flatnonzero(weights >= params.min_p)
        ids, weights = _narrowed(ids, likely), weights[likely]
    if params.typical_p < 1.0:
        typical = _typical(weights, params.typical_p)
        ids, weights = _narrowed(ids, typical), weights[typical]
    chosen = _invert_cdf(weights, uniform(params.seed, spec.position))
    return chosen if ids is None else int(ids[chosen])


def _narrowed(ids: _Ids | None, chosen: _Ids) -> _Ids:
    return chosen if ids is None else ids[chosen]


def _weights(logits: _F32, top: float, temperature: float) -> _F64:
    """exp((logit - top) / temperature): probabilities up to a factor, the likeliest at 1. No temperature overflows."""
    scaled = logits.astype(np.float64)
    scaled -= top
    with np.errstate(over="ignore"):
        scaled /= temperature
    return np.exp(scaled, out=scaled)


def _largest(values: npt.NDArray[Any], count: int) -> _Ids:
    """Indices, ascending, of the `count` largest values; among equals the lowest index first."""
    threshold = np.partition(values, values.size - count)[values.size - count]
    reached = np.flatnonzero(values >= threshold)
    surplus = reached.size - count
    if surplus == 0:
        return reached
    ties = np.flatnonzero(values[reached] == threshold)
    return np.delete(reached, ties[ties.size - surplus :])


def _near_the_top(logits_V: _F32, top: float, num_sigmas: float) -> _Ids:
    """Indices of logits at most so many standard deviations below the largest; any temperature gives the same. What may
    not be drawn is left out of the deviation, as in llama.cpp."""
    sigma = float(logits_V[np.isfinite(logits_V)].astype(np.float64).std())
    return np.flatnonzero(logits_V.astype(np.float64) >= top - num_sigmas * sigma)


def _typical(weights: _F64, mass: float) -> _Ids:
    """Indices of those whose surprise is nearest to the entropy and whose share of the sum reaches the mass together,
    with all that tie with the last: transformers' TypicalLogitsWarper. The likeliest need not be among them."""
    possible = np.flatnonzero(weights)
    shares = weights[possible] / weights.sum()
    surprise = -np.log(shares)
    distance = np.abs(surprise - float((shares * surprise).sum()))
    order = np.argsort(distance, kind="stable")
    reached = np.cumsum(shares[order])
    last = min(int(np.searchsorted(reached, mass * (1.0 - TOP_P_SLACK))), order.size - 1)
    kept: _Ids = possible[distance <= distance[order[last]]]
    return kept


def _nucleus(weights: _F64, top_p: float) -> _Ids:
    """Indices, ascending, of the fewest largest weights whose share of the sum reaches top_p (Holtzman et al., 2020).

    Only candidates are sorted: all weights below `floor` together hold at most half of what top_p leaves out, so
    none of them is needed.
    """
    total = float(weights.sum())
    floor = (1.0 - top_p) * total / (2 * weights.size)
    descending = np.sort(weights[weights >= floor])[::-1]
    reached = np.cumsum(descending)
    count = int(np.searchsorted(reached, top_p * total * (1.0 - TOP_P_SLACK))) + 1
    return _largest(weights, min(count, descending.size))


def _invert_cdf(weights: _F64, at: float) -> int:
    """The first index whose cumulative share of the sum is above `at`, in [0, 1). Never one of weight 0."""
    if weights.size <= _BLOCK:
        return _first_above(weights, at * float(weights.sum()))
    starts = np.arange(0, weights.size, _BLOCK)
    ends = np.cumsum(np.add.reduceat(weights, starts))
    target = at * float(ends[-1])
    block = min(int(np.searchsorted(ends, target, side="right")), ends.size - 1)
    before = float(ends[block - 1]) if block else 0.0
    start = block * _BLOCK
    return start + _first_above(weights[start : start + _BLOCK], target - before)


def _first_above(weights: _F64, target: float) -> int:
    index = int(np.searchsorted(np.cumsum(weights), target, side="right"))
    return index if index < weights.size else int(np.flatnonzero(weights)[-1])  # rounding may overshoot the last


def _candidates(scores_V: _F32, count: int) -> tuple[TokenLogprob, ...]:
    """The largest that may be drawn, the largest first; of equals the lowest id."""
    largest = _largest(scores_V, min(count, scores_V.size))
    ranked = largest[np.argsort(-scores_V[largest], kind="stable")]
    return tuple(TokenLogprob(token_id=int(i), logprob=float(scores_V[i])) for i in ranked if scores_V[i] > -np.inf)


def _with_logprobs(raw_V: _F32, token_id: int, count: int) -> Sampled:
    exact_V = raw_V.astype(np.float64)
    top = float(exact_V.max())
    log_total = top + float(np.log(np.exp(exact_V - top).sum()))

    def logprob(index: int) -> TokenLogprob:
        return TokenLogprob(token_id=index, logprob=float(exact_V[index]) - log_total)

    if count == 0:
        return token_id, logprob(token_id), ()
    likeliest = _largest(raw_V, min(count, raw_V.size))
    ranked = likeliest[np.argsort(-raw_V[likeliest], kind="stable")]
    return token_id, logprob(token_id), tuple(logprob(int(index)) for index in ranked)
