"""Sampling where the logits are: the same rules, the same order and the same random numbers as engine/sampling/host.py.

    SamplingPlan.of(specs)      on the host, while the step before still runs: small arrays (plan.py)
    draw(logits, plan, placed)  on the device, no wait: token ids, and which rows may be believed
    sampled_tokens(...)         on the host, once the ids have come back

Sums are float64, as there, but in another order, so a draw could differ from the host's only where the number falls
within rounding of a boundary between two tokens. What few rows want, or what needs many times a row's memory, is worked
a block of rows at a time; `largest_draw` is a plan of all that may stand at once, by which memory is kept for it.

Shapes: R rows, V vocabulary, A rows that ask for logprobs or candidates, N and C the most of them that one asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.sampling.host import TOP_P_SLACK, NonFiniteLogits, failed_token
from engine.sampling.plan import SamplingPlan
from engine.sampling.ranking import largest
from engine.sampling.selection import keep_largest
from engine.types import SampledToken, SampleSpec, SamplingParams, TokenLogprob

BLOCK_ROWS = 16  # of rows whose work takes many times their own memory


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device. What no row asks for is None; the rows that ask stand in the plan, in order."""

    ids: torch.Tensor  # int64 [R]; of a row that is not finite, any id of the vocabulary
    is_finite: torch.Tensor  # bool [R]
    logprob: torch.Tensor | None = None  # float64 [A], of plan.scored
    top_ids: torch.Tensor | None = None  # int64 [A, N]
    top_logprobs: torch.Tensor | None = None  # float64 [A, N]
    candidate_ids: torch.Tensor | None = None  # int64 [A, C], of plan.searched
    candidate_scores: torch.Tensor | None = None  # float32 [A, C]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        parts = (self.ids, self.is_finite, self.logprob, self.top_ids, self.top_logprobs)
        candidates = (self.candidate_ids, self.candidate_scores)
        return tuple(x for x in (*parts, *candidates) if x is not None)


def draw(logits_RV: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
    """Queue the whole draw; `placed` holds the plan's arrays on the logits' device."""
    raw_RV = logits_RV.float()
    if plan.searched:
        rows = placed["searched"]
        raw_RV = raw_RV.index_copy(0, rows, torch.log_softmax(raw_RV[rows], dim=-1))
    scores_RV = _edited(raw_RV, placed) if plan.has_edits else raw_RV
    best_R = scores_RV.argmax(dim=-1)  # NaN counts as the largest, the lowest id wins a tie
    top_R = scores_RV.gather(1, best_R[:, None]).squeeze(1)
    ids_R = best_R
    if plan.has_random:
        rows = placed["random_rows"]
        everyone = rows.shape[0] == logits_RV.shape[0]
        chosen = _random(scores_RV if everyone else scores_RV[rows], top_R[rows], best_R[rows], placed)
        ids_R = chosen if everyone else best_R.index_copy(0, rows, chosen)
    if "given" in placed:
        rows, given = placed["given"].unbind(1)
        ids_R = ids_R.index_copy(0, rows, given)
    drawn = Drawn(ids_R, torch.isfinite(top_R))
    if plan.searched:
        most = max(spec.num_candidates for spec in plan.specs)
        candidates = [largest(scores_RV[rows], most) for rows in placed["searched"].split(BLOCK_ROWS)]
        scores, ids = (torch.cat(parts) for parts in zip(*candidates, strict=True))
        drawn = replace(drawn, candidate_ids=ids, candidate_scores=scores)
    return _with_logprobs(raw_RV, drawn, plan, placed) if plan.scored else drawn


def _edited(raw_RV: torch.Tensor, placed: Mapping[str, torch.Tensor]) -> torch.Tensor:
    scores_RV = raw_RV.clone()
    if "biased" in placed:
        scores_RV.index_put_(placed["biased"].unbind(1), placed["bias"], accumulate=True)
    if "repeated" in placed:
        at = placed["repeated"].unbind(1)
        values, factor = scores_RV[at], placed["factor"]
        scores_RV.index_put_(at, torch.where(values < 0, values * factor, values / factor))
    if "produced" in placed:
        scores_RV.index_put_(placed["produced"].unbind(1), -placed["subtract"], accumulate=True)
    if "allowed" in placed:
        at = placed["allowed"].unbind(1)
        kept = scores_RV[at]
        scores_RV.index_fill_(0, placed["narrowed_rows"], float("-inf"))
        scores_RV.index_put_(at, kept)
    if "formed_rows" in placed:
        rows, ids_V = placed["formed_rows"], torch.arange(scores_RV.shape[1], device=scores_RV.device)
        keeps = placed["form_bits"][:, ids_V >> 3] >> (ids_V & 7).to(torch.uint8) & 1
        scores_RV.index_copy_(0, rows, scores_RV[rows].masked_fill(keeps == 0, float("-inf")))
    if "bans" in placed:
        at = placed["bans"].unbind(1)
        kept = scores_RV[at]
        scores_RV.index_put_(at, scores_RV.new_full((), float("-inf")))
        has_none_R = scores_RV.amax(dim=-1) == float("-inf")
        scores_RV.index_put_(at, torch.where(has_none_R[at[0]], kept, float("-inf")))
    return scores_RV


def _random(
    scores_RV: torch.Tensor, top_R: torch.Tensor, best_R: torch.Tensor, placed: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Invert each row's cumulative distribution over the kept ids, in the order of ids."""
    top_R1, temperature_R1 = top_R.double()[:, None], placed["temperature"][:, None]
    if "top_n_sigma" in placed:
        scores_RV = _near_the_top(scores_RV, top_R1, placed["top_n_sigma"][:, None])
    weights_RV = scores_RV.double().sub_(top_R1).div_(temperature_R1).exp_()
    if "ordered" in placed:
        keep_largest(scores_RV, weights_RV, placed["ordered"], placed["top_k"], placed["top_p"])
    weights_RV.masked_fill_(weights_RV < placed["min_p"][:, None], 0.0)
    if "typical" in placed:
        best_R = _keep_typical(weights_RV, best_R, placed)
    reached_RV = weights_RV.cumsum(dim=-1)
    target_R1 = placed["uniform"][:, None] * reached_RV[:, -1:]
    reached_id_R1 = torch.searchsorted(reached_RV, target_R1, right=True).clamp_(max=scores_RV.shape[1] - 1)
    has_weight = weights_RV.gather(1, reached_id_R1) > 0.0  # rounding may overshoot the last
    return torch.where(has_weight, reached_id_R1, best_R[:, None]).squeeze(1)


def _near_the_top(scores_RV: torch.Tensor, top_R1: torch.Tensor, num_sigmas_R1: torch.Tensor) -> torch.Tensor:
    """Those more standard deviations below the largest at -inf; rows of inf deviations stay."""
    is_finite_RV = torch.isfinite(scores_RV)
    count_R1 = is_finite_RV.sum(dim=-1, keepdim=True)
    mean_R1 = scores_RV.double().masked_fill(~is_finite_RV, 0.0).sum(dim=-1, keepdim=True) / count_R1
    off_RV = (scores_RV.double() - mean_R1).masked_fill(~is_finite_RV, 0.0)
    sigma_R1 = (off_RV.square().sum(dim=-1, keepdim=True) / count_R1).sqrt()
    is_far_RV = scores_RV.double() < top_R1 - num_sigmas_R1 * sigma_R1
    return scores_RV.masked_fill(is_far_RV, float("-inf"))


def _keep_typical(weights_RV: torch.Tensor, best_R: torch.Tensor, placed: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Put the weights of untypical ids at 0, in place; the likeliest of each row that are left."""
    best_R = best_R.clone()
    blocks = (placed[name].split(BLOCK_ROWS) for name in ("typical", "typical_p"))
    for rows, mass in zip(*blocks, strict=True):
        weights_BV = _typical(weights_RV[rows], mass[:, None])
        weights_RV.index_copy_(0, rows, weights_BV)
        best_R.index_copy_(0, rows, weights_BV.argmax(dim=-1))
    return best_R


def _typical(weights_RV: torch.Tensor, mass_R1: torch.Tensor) -> torch.Tensor:
    """The weights with those outside the mass nearest to the entropy at 0."""
    shares_RV = weights_RV / weights_RV.sum(dim=-1, keepdim=True)
    surprise_RV = -shares_RV.log()
    entropy_R1 = torch.where(shares_RV > 0.0, shares_RV * surprise_RV, 0.0).sum(dim=-1, keepdim=True)
    distance_RV = (surprise_RV - entropy_R1).abs()
    ordered_RV, ids_RV = distance_RV.sort(dim=-1, stable=True)
    reached_RV = shares_RV.gather(1, ids_RV).cumsum(dim=-1)
    wanted_R1 = mass_R1 * (1.0 - TOP_P_SLACK)
    last_R1 = (reached_RV < wanted_R1).sum(dim=-1, keepdim=True).clamp_(max=weights_RV.shape[1] - 1)
    return weights_RV.masked_fill(distance_RV > ordered_RV.gather(1, last_R1), 0.0)


def _with_logprobs(raw_RV: torch.Tensor, drawn: Drawn, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
    count = max(plan.logprobs[row] or 0 for row in plan.scored)
    logprobs, top_ids, top_logprobs = [], [], []
    for rows in placed["scored"].split(BLOCK_ROWS):
        raw_AV = raw_RV[rows]
        total_A1 = torch.logsumexp(raw_AV.double(), dim=-1, keepdim=True)
        logprobs.append((raw_AV.gather(1, drawn.ids[rows, None]).double() - total_A1).squeeze(1))
        if count:
            values, ids = largest(raw_AV, count)
            top_ids.append(ids)
            top_logprobs.append(values.double() - total_A1)
    drawn = replace(drawn, logprob=torch.cat(logprobs))
    return replace(drawn, top_ids=torch.cat(top_ids), top_logprobs=torch.cat(top_logprobs)) if count else drawn


def largest_draw(rows: int) -> SamplingPlan:
    """Of so many rows: all that takes memory in a draw at once. One is greedy, so that the others are copied."""
    params = SamplingParams(
        top_k=50, top_p=0.9, min_p=0.01, top_n_sigma=4.0, typical_p=0.9, logprobs=20, logit_bias=((0, 1.0),)
    )
    specs = [SampleSpec(params=params, position=1) for _ in range(rows)]
    specs[0] = SampleSpec(params=SamplingParams(temperature=0.0), position=1, num_candidates=2)
    return SamplingPlan.of([str(row) for row in range(rows)], specs)


def sampled_tokens(plan: SamplingPlan, host: Sequence[torch.Tensor]) -> list[SampledToken]:
    """A token for each row from the copies of `Drawn.tensors()`; an error for each row that is not finite."""
    ids, is_finite = host[0].tolist(), host[1].tolist()
    bad = [row for row, finite in enumerate(is_finite) if not finite]
    error = str(NonFiniteLogits(bad)) if bad else ""
    at_scored, at_searched = ({row: at for at, row in enumerate(rows)} for rows in (plan.scored, plan.searched))
    tokens = []
    for row, request_id in enumerate(plan.request_ids):
        if not is_finite[row]:
            tokens.append(failed_token(request_id, plan.specs[row], error))
        elif row in at_searched:
            found = _candidates(host, at_searched[row], plan.specs[row].num_candidates)
            tokens.append(SampledToken(request_id=request_id, token_id=ids[row], top_logprobs=found))
        elif row in at_scored:
            tokens.append(_scored(request_id, ids[row], row, at_scored[row], plan, host))
        else:
            tokens.append(SampledToken(request_id=request_id, token_id=ids[row]))
    return tokens


def _candidates(host: Sequence[torch.Tensor], at: int, count: int) -> tuple[TokenLogprob, ...]:
    pairs = zip(host[-2][at, :count].tolist(), host[-1][at, :count].tolist(), strict=True)
    return tuple(TokenLogprob(token_id=i, logprob=p) for i, p in pairs if p > -np.inf)


def _scored(
    request_id: str, token_id: int, row: int, at: int, plan: SamplingPlan, host: Sequence[torch.Tensor]
) -> SampledToken:
    top: tuple[TokenLogprob, ...] = ()
    if count := plan.logprobs[row]:
        pairs = zip(host[3][at, :count].tolist(), host[4][at, :count].tolist(), strict=True)
        top = tuple(TokenLogprob(token_id=i, logprob=p) for i, p in pairs)
    chosen = TokenLogprob(token_id=token_id, logprob=float(host[2][at]))
    is_given = plan.specs[row].given_id is not None
    return SampledToken(request_id=request_id, token_id=token_id, logprob=chosen, top_logprobs=top, is_given=is_given)
