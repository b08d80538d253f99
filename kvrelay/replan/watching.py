"""ReplanThread has a replanner look at a cluster every now and then, beside what this process does else."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from kvrelay.client.client import Client
from kvrelay.client.types import KvrelayError
from kvrelay.replan.journal import Entry, journal_at
from kvrelay.replan.options import EVERY_S, NICE, REFUSED, Asked
from kvrelay.replan.replanner import NotYet, Replanner, begin
from placement.simulator.cluster import SetupError

log = logging.getLogger(__name__)


class ReplanThread:
    def __init__(
        self,
        endpoints: Sequence[str],
        asked: Asked,
        on_entry: Callable[[Entry], object],
    ) -> None:
        """Clients find their tokens as any client of this user does. `on_entry`: told of each look, in the thread."""
        self._endpoints = endpoints
        self._asked = asked
        self._on_entry = on_entry
        self._refusal = ""  # the last, as it was told
        self._has_other = False  # somebody else has the workers change
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replan", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once: what it does just now ends with the cluster."""
        self._is_over.set()

    def _run(self) -> None:
        os.nice(NICE)  # of this thread alone
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(endpoint)) for endpoint in self._endpoints]
            replanner: Replanner | None = None
            while not self._is_over.wait(EVERY_S):
                try:
                    replanner = replanner or begin(clients, self._asked)
                    if replanner is None:
                        self._note_other()
                        continue
                    self._has_other = False
                    self._on_entry(replanner.look())
                except KvrelayError as error:
                    self._note_failure(error, clients)
                except (NotYet, SetupError) as error:
                    log.info("at the next look: %s", error)
                except Exception:
                    log.exception("a look at the cluster failed: roles stay as they are")

    def _note_other(self) -> None:
        if not self._has_other:
            log.error("another `kvrelay replan --act` has the workers change: this one does nothing while it does")
        self._has_other = True

    def _note_failure(self, error: KvrelayError, clients: Sequence[Client]) -> None:
        """What will be refused at the next look, too, is told once, for somebody must mend it."""
        if error.code not in REFUSED or error.message == self._refusal:
            log.info("at the next look: %s", error)
            return
        self._refusal = error.message
        reason = f"nothing can be looked at: {error.message}"
        log.error("replan is %s, and %s", self._asked.mode, reason)
        with suppress(KvrelayError):
            journal_at(clients).add(Entry(reason=reason, mode=self._asked.mode))
