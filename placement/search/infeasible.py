"""Why nothing can be planned, in a sentence with the figure that forbids it. Nothing is simulated here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from placement.catalogs.base import Offer, PlanError
from placement.goodput.bounds import floor_share, floors_s, relaxed
from placement.search.placements import Alone, Market, PhaseRole, Spent, floor_sentence, ms


def raise_if_nothing_fits(market: Market, offers: Sequence[Offer], spent: Spent, num_gpus: int) -> None:
    """A model that no degree holds, requests that no worker holds, targets that no degree meets when idle."""
    model, hardware = market.catalog.model, market.hardware
    if not offers:
        reason = next(iter(spent.refused.values()), f"no degree takes {num_gpus} or fewer GPUs")
        raise PlanError(f"{model} fits nowhere on {num_gpus} x {hardware}: {reason}")
    _raise_if_too_long(market, offers)
    for role in ("prefill", "decode"):
        _raise_if_too_slow(market, role, offers)


def _raise_if_too_long(market: Market, offers: Sequence[Offer]) -> None:
    source = market.traffic.source
    roomiest = max(offers, key=lambda offer: offer.kv_tokens)
    total = source.prompt_len + source.output_len
    over = float((total > roomiest.kv_tokens).mean())
    if over > 1 - market.targets.slo.attainment:
        row = int(np.argmax(total))
        raise PlanError(
            f"{source.name}: request {row} has {total[row]:,} tokens, and the roomiest worker ({roomiest.degrees}) "
            f"holds {roomiest.kv_tokens:,}; {over:.0%} of the requests are too long, so cut them or give "
            f"a worker more GPUs"
        )


def _raise_if_too_slow(market: Market, role: PhaseRole, offers: Sequence[Offer]) -> None:
    """TPOT 5 ms: one decode step of this model at batch 1 takes 9.1 ms on this GPU even at TP 8."""
    is_prefill = role == "prefill"
    only = relaxed(market.targets, tpot=is_prefill, ttft=not is_prefill)
    source = market.traffic.source
    pairs = [(offer if is_prefill else None, None if is_prefill else offer) for offer in offers]
    if any(floor_share(prefill, decode, source, only) >= 0 for prefill, decode in pairs):
        return
    floors = [floors_s(prefill, decode, source) for prefill, decode in pairs]
    times = [float((ttft if is_prefill else tpot).mean()) for ttft, tpot in floors]
    fastest = offers[int(np.argmin(times))]
    slos = [one.slo for one in market.targets.classes] or [market.targets.slo]
    target_s = min(slo.ttft_s if is_prefill else slo.tpot_s for slo in slos)
    sentence = floor_sentence(market, role, fastest, target_s).replace(" at TP", " even at TP")
    raise PlanError(f"{sentence}; ask for a longer {'TTFT' if is_prefill else 'TPOT'} or faster hardware")


def why_nothing(
    market: Market,
    offers: Sequence[Offer],
    spent: Spent,
    num_gpus: int,
    prefills: Sequence[Alone],
    decodes: Sequence[Alone],
    colocated: Sequence[Alone],
) -> str:
    """Each phase could keep its target when idle, and yet no cluster was found."""
    slo = market.targets.slo
    if prefills and decodes:
        least = min(one.gpus for one in prefills) + min(one.gpus for one in decodes)
        if least > num_gpus and not colocated:
            return (
                f"num_gpus is {num_gpus}: the smallest prefill and decode workers that keep the targets take {least}; "
                f"give {least} or more"
            )
    if prefills and decodes:
        return (
            f"no placement keeps TTFT {ms(slo.ttft_s)} and TPOT {ms(slo.tpot_s)} for {slo.attainment:.0%} of requests "
            f"at any rate that was tried; ask for longer targets or a smaller share"
        )
    role = "decode" if prefills else "prefill"
    target = f"TPOT {ms(slo.tpot_s)}" if prefills else f"TTFT {ms(slo.ttft_s)}"
    return (
        f"{target}: no {role} worker of up to {max(offer.degrees.gpus for offer in offers)} GPUs keeps it for "
        f"{slo.attainment:.0%} of requests but when idle; ask for a longer one or allow more GPUs to a worker"
    )
