"""A headless Chromium, driven through its debugging protocol."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page that is shown; `evaluate` runs JavaScript in it, and waits for what it promises."""

    def __init__(self, address: str):
        self._address = address

    def evaluate(self, *scripts: str) -> list:
        return asyncio.run(self._evaluate(scripts))

    async def _evaluate(self, scripts):
        given = {"awaitPromise": True, "returnByValue": True}
        found = await self._send([("Runtime.evaluate", {"expression": each, **given}) for each in scripts])
        for each in found:
            assert "exceptionDetails" not in each, each
        return [each["result"].get("value") for each in found]

    async def _send(self, calls):
        import aiohttp

        results = []
        async with aiohttp.ClientSession() as session, session.ws_connect(self._address, max_msg_size=0) as socket:
            for number, (method, params) in enumerate(calls):
                await socket.send_json({"id": number, "method": method, "params": params})
                while (said := await socket.receive_json(timeout=60)).get("id") != number:
                    pass
                results.append(said["result"])
        return results


@contextlib.contextmanager
def shown(url: str) -> Iterator[Page]:
    """Shows a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--remote-allow-origins=*", url]
        browser = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            line = next(line for line in browser.stderr if "DevTools listening on" in line)
            host = line.split("ws://")[1].split("/")[0]
            yield asyncio.run(_page(host, url))
        finally:
            browser.kill()
            browser.wait()


async def _page(host: str, url: str) -> Page:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            async with session.get(f"http://{host}/json") as answer:
                pages = [each for each in json.loads(await answer.text()) if each["url"].startswith(url)]
            if pages:
                page = Page(pages[0]["webSocketDebuggerUrl"])
                # Before the page there is an empty one, which is complete, too.
                if await page._evaluate(["location.href", "document.readyState"]) == [url, "complete"]:
                    return page
            await asyncio.sleep(0.1)
    raise TimeoutError(url)
