"""WorkerLinks are the links that a router holds: to every worker of the cluster, and to nothing else.

They are opened and closed as the deployment says who the workers are, and each worker's last report is kept for those
who ask. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from cluster.router.links.worker_link import LinkHost, LinkState, WorkerEndpoint, WorkerLink
from kvrelay.v1 import worker_pb2 as pb
from worker.awake import AwakeClock
from worker.wire.tls import TlsFiles


class WorkerLinks:
    def __init__(
        self,
        host: LinkHost,
        awake: AwakeClock,
        *,
        router_id: str,
        secret: str,
        tls: TlsFiles | None,
        dead_after_s: float,
    ) -> None:
        self._host = host
        self._awake = awake
        self._router_id = router_id
        self._secret = secret
        self._tls = tls
        self._dead_after_s = dead_after_s
        self._links: dict[str, WorkerLink] = {}
        self._reports: dict[str, tuple[pb.WorkerReport, float]] = {}  # the last one, and when it came
        self._closing: set[asyncio.Task[None]] = set()

    def __getitem__(self, name: str) -> WorkerLink:
        return self._links[name]

    def __len__(self) -> int:
        return len(self._links)

    def get(self, name: str) -> WorkerLink | None:
        return self._links.get(name)

    def cancel(self, name: str, wire_id: str, reason: str, last_move: int | None = None) -> None:
        """Have the worker end a request, if it is there."""
        if link := self._links.get(name):
            link.cancel(wire_id, reason, last_move)

    def set_dead_after(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        for link in self._links.values():
            link.dead_after_s = dead_after_s

    def set_workers(self, workers: Iterable[WorkerEndpoint]) -> None:
        wanted = {worker.name: worker for worker in workers}
        losses = {name: link.losses for name, link in self._links.items()}  # of a name: who comes back has another port
        for name, link in list(self._links.items()):
            if wanted.get(name) != link.worker:
                self._send_away(link)
        for name, worker in wanted.items():
            if name not in self._links:
                self._links[name] = self._open(worker)
                self._links[name].losses = losses.get(name, 0)
            self._links[name].worker = worker

    async def close(self) -> None:
        for link in list(self._links.values()):
            self._send_away(link)
        await asyncio.gather(*self._closing)

    def _open(self, worker: WorkerEndpoint) -> WorkerLink:
        link = WorkerLink(
            worker,
            self._host,
            self._awake,
            router_id=self._router_id,
            secret=self._secret,
            tls=self._tls,
            dead_after_s=self._dead_after_s,
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

    def ready_beside(self, link: WorkerLink) -> list[pb.WorkerHello]:
        """What the other workers that are ready said when they came up."""
        ready = (other for other in self._links.values() if other is not link and other.state is LinkState.READY)
        return [other.hello for other in ready if other.hello is not None]

    @property
    def leaving(self) -> set[str]:
        """Workers that are about to take nothing new."""
        return {name for name, link in self._links.items() if link.is_leaving}

    def is_incarnation(self, name: str, incarnation: str) -> bool:
        """Whether that is the process which answers under the name."""
        link = self._links.get(name)
        return link is not None and link.hello is not None and link.hello.worker.incarnation == incarnation

    def note_report(self, link: WorkerLink, report: pb.WorkerReport, now: float) -> None:
        self._reports[link.name] = (report, now)

    def forget_report(self, link: WorkerLink) -> None:
        self._reports.pop(link.name, None)

    def with_reports(self, now: float) -> list[tuple[WorkerLink, pb.WorkerReport | None, float]]:
        """Each link, prefill first, by name, with the worker's last report and its age in seconds."""
        links = sorted(self._links.values(), key=lambda link: ("prefill" not in link.phases, link.name))
        known = ((link, *self._reports.get(link.name, (None, now))) for link in links)
        return [(link, report, now - came_s) for link, report, came_s in known]
