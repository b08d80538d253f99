"""Sampling where the logits are: the same rules, the same order and the same random numbers as engine/sampling/host.py.

    SamplingPlan.of(specs)      on the host, while the step before still runs: small arrays
    draw(logits, plan, placed)  on the device, no wait: token ids, and which rows may be believed
    sampled_tokens(...)         on the host, once the ids have come back

Uniform numbers are bit-equal to engine/sampling/rng.py. Sums are float64, as there, but in another order, so a draw
could differ from the host's only where the number falls within rounding of a boundary between two tokens.

Shapes: R rows, V vocabulary, N the most logprobs that a row asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.host import TOP_P_SLACK, NonFiniteLogits, failed_token
from engine.types import SampledToken, SampleSpec, TokenLogprob

_MASK_32 = 0xFFFFFFFF
Arrays = dict[str, npt.NDArray[np.generic]]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Philox-4x32-10 in int64: float64 in [0, 1) for each (seed, position), bit for bit what rng.uniform gives.

    A product of two 32-bit words overflows int64, but two's complement keeps all 64 bits of it.
    """
    c0, c1 = positions & _MASK_32, positions >> 32 & _MASK_32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seeds & _MASK_32, seeds >> 32 & _MASK_32
    for _ in range(10):
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product_1 >> 32 & _MASK_32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32 & _MASK_32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0, k1 = k0 + 0x9E3779B9 & _MASK_32, k1 + 0xBB67AE85 & _MASK_32
    return ((c0 >> 5).double() * 2.0**26 + (c1 >> 6).double()) / 2.0**53


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Of R rows: what the device needs (`arrays`, to be uploaded), and which parts of the work there are."""

    arrays: Arrays
    request_ids: Sequence[str]
    has_random: bool
    has_sorted: bool
    has_edits: bool
    logprobs: tuple[int | None, ...]
    is_given: tuple[bool, ...]
    specs: Sequence[SampleSpec]

    @classmethod
    def of(cls, request_ids: Sequence[str], specs: Sequence[SampleSpec]) -> SamplingPlan:
        params = [spec.params for spec in specs]
        random = [row for row, p in enumerate(params) if not p.is_greedy]
        ordered = [at for at, row in enumerate(random) if params[row].top_k > 0 or params[row].top_p < 1.0]
        arrays: Arrays = {}
        if random:
            chosen = [params[row] for row in random]
            seeds = torch.tensor([p.seed for p in chosen], dtype=torch.int64)
            positions = torch.tensor([specs[row].position for row in random], dtype=torch.int64)
            arrays |= {
                "random_rows": np.array(random, np.int64),
                "temperature": np.array([p.temperature for p in chosen], np.float64),
                "min_p": np.array([p.min_p for p in chosen], np.float64),
                "uniform": uniforms(seeds, positions).numpy(),
            }
            if any(p.top_n_sigma > 0.0 for p in chosen):
                arrays["top_n_sigma"] = np.array([p.top_n_sigma or np.inf for p in chosen], np.float64)
            if any(p.typical_p < 1.0 for p in chosen):
                arrays["typical_p"] = np.array([p.typical_p if p.typical_p < 1.0 else np.inf for p in chosen])
        if ordered:
            chosen = [params[random[at]] for at in ordered]
            arrays |= {
                "ordered": np.array(ordered, np.int64),  # among the random rows
                "top_k": np.array([p.top_k or np.iinfo(np.int64).max for p in chosen], np.int64),
                "top_p": np.array([p.top_p if p.top_p < 1.0 else np.inf for p in chosen], np.float64),
            }
        edits = _penalties(specs) | _choices(specs)
        given = [(row, spec.given_id) for row, spec in enumerate(specs) if spec.given_id is not None]
        if given:
            arrays["given"] = np.array(given, np.int64)
        if searched := [row for row, spec in enumerate(specs) if spec.num_candidates]:
            arrays["searched"] = np.array(searched, np.int64)
        return cls(
            arrays=arrays | edits,
            request_ids=request_ids,
            has_random=bool(random),
            has_sorted=bool(ordered),
            has_edits=bool(edits),
            logprobs=tuple(p.logprobs for p in params),
            is_given=tuple(spec.given_id is not None for spec in specs),
            specs=specs,
        )


def _penalties(specs: Sequence[SampleSpec]) -> Arrays:
    """(row, id) pairs, each once: those whose logits are divided or multiplied, and what is subtracted from which."""
    pairs: list[npt.NDArray[np.int64]] = []
    factors: list[npt.NDArray[np.float32]] = []
    out_pairs: list[npt.NDArray[np.int64]] = []
    subtract: list[npt.NDArray[np.float32]] = []
    for row, spec in enumerate(specs):
        params = spec.params
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.array([*spec.prompt_ids, *spec.output_ids], np.int64))
            pairs.append(np.stack([np.full_like(seen, row), seen], axis=1))
            factors.append(np.full(seen.size, params.repetition_penalty, np.float32))
        if spec.output_ids and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            seen, counts = np.unique(np.array(spec.output_ids, np.int64), return_counts=True)
            out_pairs.append(np.stack([np.full_like(seen, row), seen], axis=1))
            subtract.append((counts * params.frequency_penalty + params.presence_penalty).astype(np.float32))
    arrays: Arrays = {}
    if pairs:
        arrays |= {"repeated": np.concatenate(pairs), "factor": np.concatenate(factors)}
    if out_pairs:
        arrays |= {"produced": np.concatenate(out_pairs), "subtract": np.concatenate(subtract)}
    return arrays


def _choices(specs: Sequence[SampleSpec]) -> Arrays:
    """(row, id) pairs of what is likelier or less so, of what alone may be drawn, and of what may not."""
    biases = [(row, token, bias) for row, spec in enumerate(specs) for token, bias in spec.params.logit_bias]
    allowed = [(row, token) for row, spec in enumerate(specs) for token in spec.params.allowed_token_ids]
    formed = [(row, spec.form.bits()) for row, spec in enumerate(specs) if spec.form is not None]
    bans = [(row, token) for row, spec in enumerate(specs) for token in spec.banned_ids]
    arrays: Arrays = {}
    if biases:
        arrays["biased"] = np.array([(row, token) for row, token, _ in biases], np.int64)
        arrays["bias"] = np.array([bias for _, _, bias in biases], np.float32)
    if allowed:
        arrays["allowed"] = np.array(allowed, np.int64)
        arrays["narrowed_rows"] = np.unique(arrays["allowed"][:, 0])
    if formed:
        arrays["formed_rows"] = np.array([row for row, _ in formed], np.int64)
        arrays["form_bits"] = np.stack([np.frombuffer(bits, np.uint8) for _, bits in formed])
    if bans:
        arrays["bans"] = np.array(bans, np.int64)
    return arrays


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device. `logprob` and `top_*` are None where no row asks."""

    ids: torch.Tensor  # int64 [R]; of a row that is not finite, any id of the vocabulary
    is_finite: torch.Tensor  # bool [R]
    logprob: torch.Tensor | None = None  # float64 [R]
    top_ids: torch.Tensor | None = None  # int64 [R, N]
    top_logprobs: torch.Tensor | None = None  # float64 [R, N]
    candidate_ids: torch.Tensor | None = None  # int64 [R, the most candidates that a row asks for]
    candidate_scores: torch.Tensor | None = None  # float32, likewise

    def tensors(self) -> tuple[torch.Tensor, ...]:
        parts = (self.ids, self.is_finite, self.logprob, self.top_ids, self.top_logprobs)
        candidates = (self.candidate_ids, self.candidate_scores)
        return tuple(x for x in (*parts, *candidates) if x is not None)


def draw(logits_RV: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
    """Queue the whole draw; `placed` holds the plan's arrays on the logits' device."""
    raw_RV = logits_RV.float()
    if "searched" in placed:
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
    if "searched" in placed:
        most = max(spec.num_candidates for spec in plan.specs)
        ordered_RV, sorted_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
        drawn = replace(drawn, candidate_ids=sorted_RV[:, :most], candidate_scores=ordered_RV[:, :most])
    asked = [count for count in plan.logprobs if count is not None]
    return drawn if not asked else _with_logprobs(raw_RV, drawn, max(asked))


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
    weights_RV = torch.exp((scores_RV.double() - top_R1) / temperature_R1)
    if "ordered" in placed:
        rows = placed["ordered"]
        kept = _kept(scores_RV[rows], top_R1[rows], temperature_R1[rows], placed["top_k"], placed["top_p"])
        weights_RV = weights_RV.index_copy(0, rows, kept)
    weights_RV = weights_RV.masked_fill(weights_RV < placed["min_p"][:, None], 0.0)
    if "typical_p" in placed:
        weights_RV = _typical(weights_RV, placed["typical_p"][:, None])
        best_R = weights_RV.argmax(dim=-1)
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


def _typical(weights_RV: torch.Tensor, mass_R1: torch.Tensor) -> torch.Tensor:
    """The weights with those outside the mass nearest to the entropy at 0; rows of an infinite mass stay."""
    shares_RV = weights_RV / weights_RV.sum(dim=-1, keepdim=True)
    surprise_RV = -shares_RV.log()
    entropy_R1 = torch.where(shares_RV > 0.0, shares_RV * surprise_RV, 0.0).sum(dim=-1, keepdim=True)
    distance_RV = (surprise_RV - entropy_R1).abs()
    ordered_RV, ids_RV = distance_RV.sort(dim=-1, stable=True)
    reached_RV = shares_RV.gather(1, ids_RV).cumsum(dim=-1)
    wanted_R1 = mass_R1 * (1.0 - TOP_P_SLACK)
    last_R1 = (reached_RV < wanted_R1).sum(dim=-1, keepdim=True).clamp_(max=weights_RV.shape[1] - 1)
    return weights_RV.masked_fill(distance_RV > ordered_RV.gather(1, last_R1), 0.0)


def _kept(
    scores_RV: torch.Tensor,
    top_R1: torch.Tensor,
    temperature_R1: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """The weights with those outside top-k, then outside the nucleus of what is left, at 0."""
    ordered_RV, ids_RV = scores_RV.sort(dim=-1, descending=True, stable=True)  # among equals the lowest id first
    weights_RV = torch.exp((ordered_RV.double() - top_R1) / temperature_R1)
    rank_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    weights_RV = weights_RV.masked_fill(rank_V >= top_k[:, None], 0.0)
    reached_RV = weights_RV.cumsum(dim=-1)
    before_RV = torch.cat([torch.zeros_like(top_R1), reached_RV[:, :-1]], dim=-1)
    wanted_R1 = top_p[:, None] * reached_RV[:, -1:] * (1.0 - TOP_P_SLACK)
    weights_RV = weights_RV.masked_fill(before_RV >= wanted_R1, 0.0)
    return torch.zeros_like(weights_RV).scatter_(1, ids_RV, weights_RV)


def _with_logprobs(raw_RV: torch.Tensor, drawn: Drawn, count: int) -> Drawn:
    exact_RV = raw_RV.double()
    total_R1 = torch.logsumexp(exact_RV, dim=-1, keepdim=True)
    logprob_R = (exact_RV.gather(1, drawn.ids[:, None]) - total_R1).squeeze(1)
    if count == 0:
        return replace(drawn, logprob=logprob_R)
    ordered_RV, ids_RV = raw_RV.sort(dim=-1, descending=True, stable=True)
    top_logprobs = ordered_RV[:, :count].double() - total_R1
    return replace(drawn, logprob=logprob_R, top_ids=ids_RV[:, :count], top_logprobs=top_logprobs)


def sampled_tokens(plan: SamplingPlan, host: Sequence[torch.Tensor]) -> list[SampledToken]:
    """A token for each row from the copies of `Drawn.tensors()`; an error for each row that is not finite."""
    ids, is_finite = host[0].tolist(), host[1].tolist()
    bad = [row for row, finite in enumerate(is_finite) if not finite]
    error = str(NonFiniteLogits(bad)) if bad else ""
    return [
        failed_token(request_id, plan.specs[row], error)
        if not is_finite[row]
        else _token(request_id, ids[row], row, plan, host)
        for row, request_id in enumerate(plan.request_ids)
    ]


def _token(request_id: str, token_id: int, row: int, plan: SamplingPlan, host: Sequence[torch.Tensor]) -> SampledToken:
    if wanted := plan.specs[row].num_candidates:
        pairs = zip(host[-2][row, :wanted].tolist(), host[-1][row, :wanted].tolist(), strict=True)
        found = tuple(TokenLogprob(token_id=i, logprob=p) for i, p in pairs if p > -np.inf)
        return SampledToken(request_id=request_id, token_id=token_id, top_logprobs=found)
    if (count := plan.logprobs[row]) is None:
        return SampledToken(request_id=request_id, token_id=token_id)
    top: tuple[TokenLogprob, ...] = ()
    if count:
        pairs = zip(host[3][row, :count].tolist(), host[4][row, :count].tolist(), strict=True)
        top = tuple(TokenLogprob(token_id=i, logprob=p) for i, p in pairs)
    chosen = TokenLogprob(token_id=token_id, logprob=float(host[2][row]))
    return SampledToken(
        request_id=request_id, token_id=token_id, logprob=chosen, top_logprobs=top, is_given=plan.is_given[row]
    )
