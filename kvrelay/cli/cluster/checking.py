"""`up --check`: what the doctor says before anything is started, and of the cluster when it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.cli.connection import Entrance
from kvrelay.cli.console import FAILURE, CliError, note
from kvrelay.cli.doctor import measured

if TYPE_CHECKING:
    from cluster.spec.model import ClusterSpec
    from kvrelay.doctor.finding import Finding

AT_MOST_S = 30.0


def before(spec: ClusterSpec, address: str | None) -> list[Finding]:
    """Raises CliError with a sentence for each that is bad."""
    from kvrelay.doctor.static import static_checks

    note("checking this machine; kernels are built at first use, which takes a minute")
    findings = static_checks(spec, address=address)
    if bad := [finding.sentence for finding in findings if finding.verdict == "bad"]:
        raise CliError("\n".join(bad), FAILURE)
    return findings


def after(spec: ClusterSpec, endpoint: str) -> list[Finding]:
    from kvrelay.doctor.assumed import of_spec

    return measured(Entrance(), endpoint, spec, of_spec(spec), AT_MOST_S, show=False)
