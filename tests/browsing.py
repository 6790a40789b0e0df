"""A headless Chromium for tests of pages, driven over its debugging protocol; no driver and no package beside aiohttp.

It notes every error on the console and every address that a page asks for.
"""

import asyncio
import itertools
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian's package is called chromium")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-port=0", "--force-color-profile=srgb",
)  # fmt: skip


class Tab:
    """A page that is open."""

    def __init__(self, socket):
        self.socket, self.numbers, self.answers = socket, itertools.count(1), {}
        self.errors, self.requests = [], {}

    @property
    def asked(self):
        """Every address that was asked for and not held back by the page's policy."""
        return list(self.requests.values())

    async def listen(self):
        async for message in self.socket:
            told = message.json()
            if "id" in told:
                self.answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] in ("error", "warning"):
                self.errors.append(told["params"]["entry"]["text"])
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.errors.append(str(told["params"]["args"]))
            elif told["method"] == "Network.requestWillBeSent":
                self.requests[told["params"]["requestId"]] = told["params"]["request"]["url"]
            elif told["method"] == "Network.loadingFailed" and told["params"].get("blockedReason") == "csp":
                self.requests.pop(told["params"]["requestId"])

    async def call(self, method, **parameters):
        number = next(self.numbers)
        self.answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self.answers[number], 30)
        assert "error" not in answer, answer
        return answer["result"]

    async def value(self, expression):
        """What an expression comes to in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression):
        """Waits until an expression is true."""
        for _ in range(200):
            if await self.value(expression):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}; errors: {self.errors}")

    async def open(self, path):
        await self.call("Page.navigate", url=Path(path).resolve().as_uri())
        await self.until("document.documentElement?.dataset.drawn === 'yes'")

    async def mouse(self, kind, x, y, **more):
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    async def click(self, x, y):
        await self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.mouse(kind, x, y, button="left", clickCount=1)

    async def place(self, selector, across=0.5, down=0.5):
        """A place within an element, which is scrolled into sight."""
        return await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            f"const b = e.getBoundingClientRect(); return [b.x + b.width * {across}, b.y + b.height * {down}]; }})()"
        )


@asynccontextmanager
async def chromium(*, width=1360, height=900):
    """An open tab; the browser and its folder are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="stretto-chromium-", ignore_cleanup_errors=True) as folder:
        size = f"--window-size={width},{height}"
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, size, f"--user-data-dir={folder}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port(Path(folder))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    address = next(t for t in await answer.json() if t["type"] == "page")["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    listening = asyncio.create_task(tab.listen())
                    for domain in ("Runtime", "Log", "Network", "Page"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    listening.cancel()
        finally:
            browser.kill()
            await browser.wait()


async def _port(folder):
    for _ in range(600):
        lines = (folder / "DevToolsActivePort").read_text().split() if (folder / "DevToolsActivePort").exists() else []
        if lines:
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not start within 30 s")
