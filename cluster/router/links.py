"""Fleet is the set of links a router holds: to every worker of the cluster, and to nothing else.

It opens and closes links as the membership changes, refuses a worker that does not fit the others, and keeps each
worker's last report for those who ask. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cluster.router.worker_link import LinkHost, LinkState, Member, WorkerLink, WorkerRefused
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb


class Fleet:
    def __init__(self, host: LinkHost, *, router_id: str, secret: str, dead_after_s: float) -> None:
        self.model: generate_pb2.GetModelInfoResponse | None = None  # of the worker that came up last
        self.page_size = 0  # tokens; the same for all; 0 before the first worker came up
        self._host = host
        self._router_id = router_id
        self._secret = secret
        self._dead_after_s = dead_after_s
        self._links: dict[str, WorkerLink] = {}
        self._reports: dict[str, tuple[pb.WorkerReport, float]] = {}  # the last one, and when it came
        self._closing: set[asyncio.Task[None]] = set()

    def __getitem__(self, name: str) -> WorkerLink:
        return self._links[name]

    def get(self, name: str) -> WorkerLink | None:
        return self._links.get(name)

    def set_members(self, members: Iterable[Member]) -> None:
        wanted = {member.name: member for member in members}
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.member:
                self._send_away(link)
        for name, member in wanted.items():
            if name not in self._links:
                self._links[name] = self._open(member)

    async def close(self) -> None:
        for link in list(self._links.values()):
            self._send_away(link)
        await asyncio.gather(*self._closing)

    def _open(self, member: Member) -> WorkerLink:
        link = WorkerLink(
            member, self._host, router_id=self._router_id, secret=self._secret, dead_after_s=self._dead_after_s
        )
        link.start()
        return link

    def _send_away(self, link: WorkerLink) -> None:
        """Lost at once, so that another worker may take the name; the stream ends in the background."""
        del self._links[link.name]
        link.leave()
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def welcome(self, link: WorkerLink) -> pb.WorkerHello:
        """Take in a worker that has said hello; returns what it said. Raises WorkerRefused if it does not fit.

        All workers of a router serve one model from pages of one size.
        """
        hello = link.hello
        assert hello is not None, f"{link.name} is ready without a hello"
        for other in self._links.values():
            if other is link or other.state is not LinkState.READY or other.hello is None:
                continue
            theirs = other.hello
            if hello.model.fingerprint != theirs.model.fingerprint:
                mine, named = f"{hello.model.name} ({hello.model.fingerprint})", theirs.model
                raise WorkerRefused(f"it serves {mine}; {other.name} serves {named.name} ({named.fingerprint})")
            if hello.page_size != theirs.page_size:
                raise WorkerRefused(
                    f"its pages hold {hello.page_size} tokens; those of {other.name} {theirs.page_size}"
                )
        self.model, self.page_size = hello.model, hello.page_size
        return hello

    def note_report(self, link: WorkerLink, report: pb.WorkerReport, now: float) -> None:
        self._reports[link.name] = (report, now)

    def forget_report(self, link: WorkerLink) -> None:
        self._reports.pop(link.name, None)

    def workers(self, now: float) -> list[tuple[WorkerLink, pb.WorkerReport | None, float]]:
        links = sorted(self._links.values(), key=lambda link: (link.member.role != "prefill", link.name))
        known = ((link, *self._reports.get(link.name, (None, now))) for link in links)
        return [(link, report, now - came_s) for link, report, came_s in known]
