"""Certificates as a spec names them: paths of PEM files, which each process reads on its own node and follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from cluster.spec.knobs import Spec, setting
from worker.wire.tls import MEMBER_NAME, TlsFiles


def full_path(path: str) -> str:
    """A relative one is meant from where `kvrelay up` runs: the processes stand elsewhere."""
    return str(Path(path).expanduser().absolute()) if path else ""


FilePath = Annotated[str, Field(min_length=1), AfterValidator(full_path)]
MaybePath = Annotated[str, AfterValidator(full_path)]


class RouterTls(Spec):
    cert: FilePath = setting(..., "the router's certificate and what leads to its authority")
    key: FilePath = setting(..., "its key")
    client_ca: MaybePath = setting("", "authorities of clients' certificates, which are asked for then")
    ca: MaybePath = setting("", "the router's authority, for clients that find the cluster by themselves")

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(cert=self.cert, key=self.key, ca=self.client_ca)


class MemberTls(Spec):
    cert: FilePath = setting(..., "a member's certificate")
    key: FilePath = setting(..., "its key")
    ca: FilePath = setting(..., "the authority of all members, and of nobody else")

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(cert=self.cert, key=self.key, ca=self.ca, server_name=MEMBER_NAME)
