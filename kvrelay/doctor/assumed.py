"""What workers are held against: what a spec carries of its plan, or what a profile says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cluster.spec.assumed import Assumed
from cluster.spec.model import ClusterSpec
from kvrelay.plan.assumptions import PROMPT_TOKENS, assumed_of
from placement.latency.profile import Profile
from placement.latency.profile_latency import ProfileLatency
from worker.roles import ROLES


def of_spec(spec: ClusterSpec) -> Mapping[str, Assumed]:
    """By pool. Empty where it was written by hand."""
    return {pool.label: pool.assumed for pool in spec.pools if pool.assumed is not None}


def of_profile(profile: Profile) -> Mapping[str, Assumed]:
    """By role: as probes found it, which look at one worker at a time, too."""
    latency, options = ProfileLatency(replace(profile, load=None)), profile.prefill_pool.options
    longest = int(profile.model.get("max_model_len", PROMPT_TOKENS)) // 2
    tokens = max(1, min(PROMPT_TOKENS, longest, int(options.get("max_batch_tokens", PROMPT_TOKENS))))
    error = max(profile.error.prefill, profile.error.decode)
    return {role: Assumed(**assumed_of(latency, role, tokens, error)) for role in ROLES}
