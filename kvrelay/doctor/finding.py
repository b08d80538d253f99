"""A finding is what one check says: a verdict, what was found, and the mend in one sentence.

good       nothing to do
doubtful   it serves, but worse than it could, or than was planned
bad        it does not serve, or far worse than was planned
unknown    it could not be told, or there is nothing to hold it against
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["good", "doubtful", "bad", "unknown"]
VERDICTS: tuple[Verdict, ...] = ("bad", "doubtful", "unknown", "good")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`part`: of what it is said, such as software or links."""

    part: str
    name: str
    verdict: Verdict
    found: str
    mend: str = ""  # of what is not good

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.found}{f'; {self.mend}' if self.mend else ''}"


def is_failed(findings: Iterable[Finding], *, strict: bool = False) -> bool:
    """Something is bad; with `strict`, doubtful."""
    return any(finding.verdict == "bad" or (strict and finding.verdict == "doubtful") for finding in findings)


def plain(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For a program."""
    return [asdict(finding) for finding in findings]


def from_plain(checks: Iterable[Mapping[str, Any]]) -> list[Finding]:
    return [Finding(**check) for check in checks]
