"""Models come to a router's process and go while it serves others.

wanted:         tokenizer read -> a Router of its own, which meets its workers -> asked for
wanted no more: asked for no more -> its last call has ended -> its workers have left -> forgotten
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from cluster.front.models.catalog import Catalog, Served
from cluster.front.tokenizer import TextCodec, TokenizerError
from cluster.router.driver import Router

log = logging.getLogger(__name__)

LOOK_S = 0.2  # between two looks at whether one that goes is gone


class Models:
    def __init__(
        self, catalog: Catalog, make_router: Callable[[str], Router], load: Callable[[str], Awaitable[TextCodec]]
    ) -> None:
        """`make_router`: of a model by its name; `load`: its tokenizer, by its directory; raises TokenizerError."""
        self._catalog = catalog
        self._make_router = make_router
        self._load = load
        self._taking = asyncio.Lock()
        self._letting_go: set[asyncio.Task[None]] = set()

    async def take(self, wanted: Mapping[str, str]) -> None:
        """These are served beside the cluster's own from now on: directories or hub names by what requests call them.
        One whose tokenizer cannot be read takes token ids only; one call after another."""
        async with self._taking:
            there = {served.key: served for served in self._catalog if served.key}
            for name in there.keys() - wanted.keys():
                self._let_go(self._catalog.remove(name))
            for name in wanted.keys() - there.keys():
                await self._add(name, wanted[name])

    async def _add(self, name: str, path: str) -> None:
        leaving = self._catalog.leaving(name)
        if leaving is not None and leaving.path == path:
            self._catalog.take_back(leaving)
            return
        try:
            codec = await self._load(path)
        except TokenizerError as error:
            log.warning("%s is served without a tokenizer: %s", name, error)
            codec = None
        served = Served(key=name, given_name=name, path=path, codec=codec, router=self._make_router(name))
        self._catalog.add(served)
        log.info("%s is served, too", name)

    def _let_go(self, served: Served) -> None:
        log.info("%s is served no more, once its last request has ended", served.key)
        task = asyncio.get_running_loop().create_task(self._until_gone(served))
        self._letting_go.add(task)
        task.add_done_callback(self._letting_go.discard)

    async def _until_gone(self, served: Served) -> None:
        while served.calls or served.router.workers():
            await asyncio.sleep(LOOK_S)
            if self._catalog.leaving(served.key) is not served:
                return  # it is wanted again
        self._catalog.forget(served)
        await close(served)

    async def why_not(self, wanted: Mapping[str, str]) -> str:
        """Why these could not be served; empty if they could."""
        there = {served.key for served in self._catalog.all}
        for name, path in wanted.items():
            leaving = self._catalog.leaving(name)
            if leaving is not None and leaving.path != path:
                return f"models has {name} from {path}, and the last {name} is not gone yet; ask again in a while"
            if name not in there:
                try:
                    (await self._load(path)).close()
                except TokenizerError as error:
                    return str(error)
        return ""

    async def close(self) -> None:
        for task in self._letting_go:
            task.cancel()
        for served in self._catalog.all:
            await close(served)


async def close(served: Served) -> None:
    await served.router.close()
    if served.codec is not None:
        served.codec.close()
