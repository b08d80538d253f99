"""Drives the system's Chromium by its DevTools protocol: what a person at the page sees and does."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
START_S = 60.0
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Browser:
    """`errors`: of the console, and what was thrown. `urls`: of all that was asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session = ""

    async def read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                if told["params"].get("entry", {}).get("level", "error") == "error":
                    self.errors.append(str(told["params"]))
            elif told["method"] == "Network.requestWillBeSent":
                self.urls.append(told["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        asked = {"id": number, "method": method, "params": params}
        await self._socket.send_json(asked | ({"sessionId": self._session} if self._session else {}))
        told = await asyncio.wait_for(answer, START_S)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    async def open_tab(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def look_as(self, width: int, height: int, scheme: str) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Of an expression, or of what it promises."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        async with asyncio.timeout(START_S):
            while not await self.value(script):
                await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        code, text = KEYS[key]
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def picture(self) -> bytes:
        """Of the whole page, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with aiohttp.ClientSession() as session:
                url = await _address(Path(folder) / "DevToolsActivePort")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    browser = Browser(socket)
                    reading = asyncio.create_task(browser.read())
                    await browser.open_tab()
                    yield browser
                    await socket.close()
                    await reading
        finally:
            process.terminate()
            await process.wait()


async def _address(told: Path) -> str:
    async with asyncio.timeout(START_S):
        while len(lines := _lines(told)) < 2:
            await asyncio.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
