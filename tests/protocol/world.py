"""World is a small cluster with its clients, whose every step is a choice.

choices()  what may happen now: a message arrives, half a step is done, half a segment is written, a client comes
faults()   what may break now
do(choice) lets it happen, and checks what must always hold
finish()   lets everything happen that will, time included, and checks what must hold in the end
"""

from __future__ import annotations

from grpc import StatusCode

from cluster.router.live.requests import NewRequest, RequestFailed, Submission
from engine.types import SamplingParams
from tests.protocol import checks, faults
from tests.protocol.cluster import Cluster
from tests.protocol.commuting import skip
from tests.protocol.fingerprint import fingerprint
from tests.protocol.loop import owner
from tests.protocol.process import Process
from tests.protocol.setting import DEADLINE_S, Setting
from worker.convert import sampling_to_proto

MAX_CHOICES = 4_000
SETTLED_S = 400.0  # of the model's time, after which nothing may be left


class Client:
    """Of one request: what it was told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.submission: Submission | None = None
        self.refused: RequestFailed | None = None
        self.given_up = ""  # the fault by which it went away
        self.tokens: list[int] = []

    @property
    def error(self) -> RequestFailed | None:
        return self.refused or (self.submission.error if self.submission is not None else None)

    @property
    def is_over(self) -> bool:
        return self.refused is not None or (self.submission is not None and self.submission.is_over)

    def take(self) -> None:
        if self.submission is not None:
            self.tokens += [token_id for update in self.submission.take() for token_id in update.ids]


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.faults_left = setting.num_faults
        self.faults_done: list[str] = []
        self.num_choices = 0
        self.num_ticks = 0
        self.cluster = Cluster(setting)
        self.clients = [Client(i) for i in range(len(setting.prompts))]
        with self.cluster.loop.entered():
            self.cluster.start()
            owner.set(self.cluster.router)
            for client in self.clients[: 1 if setting.arrivals else None]:
                self._submit(client)
            self._settle()

    def _submit(self, client: Client) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=self.setting.max_tokens, ignore_eos=True)
        request = NewRequest(
            id=str(client.number),
            prompt_ids=self.setting.prompt(client.number),
            sampling=[sampling_to_proto(sampling)],
            arrived_s=self.cluster.loop.now_s,
            deadline_s=DEADLINE_S,
        )
        try:
            client.submission = self.cluster.router.submit(request)
        except RequestFailed as error:
            client.refused = error

    def hear_of_restart(self) -> None:
        """The router is gone, and its clients have been told so: they send again, or go away."""
        owner.set(self.cluster.router)
        for client in self.waiting:
            if self.setting.sends_again:
                client.tokens = []
                self._submit(client)
            else:
                client.submission, client.given_up = None, "router"
                client.refused = RequestFailed(StatusCode.UNAVAILABLE, "the router has died")

    # what may happen

    @property
    def waiting(self) -> list[Client]:
        return [client for client in self.clients if client.submission is not None and not client.is_over]

    @property
    def is_over(self) -> bool:
        alive = [p for p in self.cluster.processes.values() if p.is_alive]
        is_idle = not any(p.role.requests or p.pool.usage.held for p in alive)
        return is_idle and all(client.is_over for client in self.clients)

    @property
    def waits_for_time(self) -> bool:
        """When nothing else can happen."""
        loop = self.cluster.loop
        return not self.is_over and loop.now_s <= SETTLED_S and bool(loop.timers)

    def choices(self) -> list[str]:
        found = list(self.cluster.queues)
        for process in self.cluster.processes.values():
            if process.is_alive and process.batch is not None:
                found.append(f"end {process.name}")
            elif process.is_alive and process.is_awake:
                found.append(f"begin {process.name}")
            if self.setting.reports and process.is_alive and self._can_report(process):
                found.append(f"report {process.name}")
        found += [f"write {name}" for name, sender in self.cluster.moving.items() if sender.can_move]
        if any(client.submission is None and client.refused is None for client in self.clients):
            found.append("arrive")
        return found

    def _can_report(self, process: Process) -> bool:
        with self.cluster.loop.entered():
            return process.streams.can_report

    def and_reports(self, choice: str) -> list[str]:
        """Whoever lives has reported, when time has passed."""
        alive = [process.name for process in self.cluster.processes.values() if process.is_alive]
        return [choice, *(f"report {name}" for name in alive if choice == "tick")]

    def faults(self) -> list[str]:
        return list(faults.places(self.setting.faults, self.cluster, self)) if self.faults_left else []

    def do(self, choice: str, *, is_new: bool = True) -> None:
        verb, _, what = choice.partition(" ")
        self.num_choices += 1
        with self.cluster.loop.entered():
            if ">" in verb:
                self.cluster.deliver(verb)
            elif verb in faults.KINDS:
                self.faults_left -= 1
                self.faults_done.append(verb)
                faults.places((verb,), self.cluster, self)[choice]()
            else:
                getattr(self, f"_do_{verb}")(what)
            self._settle()
        if is_new:
            checks.always(self)

    def _do_begin(self, name: str) -> None:
        self.cluster.act(self.cluster.processes[name]).begin_step()

    def _do_end(self, name: str) -> None:
        process = self.cluster.act(self.cluster.processes[name])
        if self._is_poisoned(process):
            self.cluster.kill(process)
        else:
            process.end_step()

    def _is_poisoned(self, process: Process) -> bool:
        if self.setting.poison is None or process.options.role != self.setting.poison[1]:
            return False
        submission = self.clients[self.setting.poison[0]].submission
        return submission is not None and any(process.computes(live.wire_id) for live in submission.choices)

    def _do_write(self, name: str) -> None:
        sender = self.cluster.senders[name]
        self.cluster.act(sender.owner)
        sender.move()

    def _do_arrive(self, _: str) -> None:
        owner.set(self.cluster.router)
        self._submit(next(client for client in self.clients if client.submission is None and client.refused is None))

    def _do_report(self, name: str) -> None:
        self.cluster.processes[name].streams.report()

    def _do_tick(self, _: str) -> None:
        """Time passes until the next timer."""
        self.num_ticks += 1
        self.cluster.loop.fire_next()

    def _settle(self) -> None:
        self.cluster.loop.settle()
        skip(self.cluster)
        for client in self.clients:
            client.take()

    def finish(self) -> None:
        """Whatever comes, and all timers, workers reporting meanwhile: then nothing is held, each request has ended."""
        self._rest()
        while self.waits_for_time:
            for choice in self.and_reports("tick"):
                self.do(choice)
            self._rest()
            checks.no_lease_is_overdue(self)
        checks.in_the_end(self)

    def _rest(self) -> None:
        for _ in range(MAX_CHOICES):
            if not (choices := self.choices()):
                return
            self.do(choices[0])
        raise AssertionError("it never comes to rest")

    @property
    def key(self) -> bytes:
        """Names its state: what may still happen, and all that it may happen to."""
        cluster = self.cluster
        alive = [process for process in cluster.processes.values() if process.is_alive]
        calls = [call for way, call in sorted(cluster.calls.items()) if call.stands or way in cluster.queues]
        senders = [(name, sender) for name, sender in cluster.moving.items()]
        loop = cluster.loop
        timers = [(timer.when(), timer._callback) for timer in loop.timers]  # type: ignore[attr-defined]
        state = (cluster.router, sorted(cluster.queues.items()), alive, senders, calls, self.clients)
        more = (self.faults_left, cluster.kills, self.num_ticks, loop.now_s, loop.waiting, timers)
        return fingerprint((state, more))
