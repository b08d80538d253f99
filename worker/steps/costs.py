"""StepCosts is what a worker's steps take, as lines: told to routers in its reports, so that they can predict it.

Values and arithmetic only; worker/steps/times.py measures them. A mixed worker's share of prompts in the steps that
decode is followed by `share_after`, one step or many alike at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE_KEPT = 0.99  # of the share, by each step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step: so many for itself, for each token of prompts in it, for each request that it decodes, and for
    each token of their context; and `both_s` more where it has both prompts and requests that decode. `spread`: by how
    much steps differ from that, as a share of their time (standard deviation)."""

    fixed_s: float
    prompt_token_s: float
    request_s: float
    context_token_s: float
    both_s: float = 0.0
    spread: float = 0.0

    def step_s(self, prompt_tokens: float, requests: int, context_tokens: int, both: float) -> float:
        """`both`: 1 for a step of both kinds, 0 for another; what lies between is an average of steps."""
        prompts_s = self.prompt_token_s * prompt_tokens + self.both_s * both
        return self.fixed_s + prompts_s + self.request_s * requests + self.context_token_s * context_tokens


def share_after(share: float, prompt_tokens: int, steps: int = 1) -> float:
    """Tokens of prompts in a step that decodes, on average, after so many steps more that had `prompt_tokens` each."""
    return float(prompt_tokens + (share - prompt_tokens) * SHARE_KEPT**steps)
