"""Makes the picture of the server's page, in headless Chromium:

    specjax serve --port 8123 --default draft &
    python docs/browser.py http://127.0.0.1:8123 docs/plots/page.png

It needs `chromium` and `chromedriver`, and speaks the WebDriver protocol (W3C) with them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1000,720",
)  # fmt: skip
_PROGRAMS = "chromedriver", "chromium"


def missing(find: Callable[[str], str | None]) -> list[str]:
    """The programs that are not installed; `find` is `shutil.which`."""
    return [name for name in _PROGRAMS if find(name) is None]


@contextlib.contextmanager
def browser(port: int = 9515) -> Iterator[Callable[..., Any]]:
    """A function that sends a command of WebDriver and returns its value."""
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"

    def send(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if method == "GET" else json.dumps(body or {}).encode()
        asked = urllib.request.Request(base + path, content, method=method)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return json.load(answer)["value"]

    try:
        _wait(lambda: send("GET", "/status")["ready"], 30)
        with tempfile.TemporaryDirectory() as profile:
            options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"alwaysMatch": {"goog:chromeOptions": options}}
            session = f"/session/{send('POST', '/session', {'capabilities': wanted})['sessionId']}"
            yield lambda method, path, body=None: send(method, session + path, body)
            send("DELETE", session)
    finally:
        driver.terminate()
        driver.wait(30)


def write(command: Callable[..., Any], url: str) -> dict[str, Any]:
    """Open the page, press its button, and wait until both texts are written.

    Returns:
      The verdict, the texts of both sides, and the classes of the tokens of the first one.
    """

    def run(script: str) -> Any:
        return command("POST", "/execute/sync", {"script": script, "args": []})

    command("POST", "/url", {"url": url})
    run("document.getElementById('go').click()")
    _wait(lambda: run("return document.getElementById('verdict').textContent"), 120)
    return run(
        "const side = (name) => document.getElementById('text-' + name);"
        "return {verdict: document.getElementById('verdict').textContent,"
        " with: side('with').textContent, without: side('without').textContent,"
        " kinds: [...side('with').children].map((token) => token.className)}"
    )


def _wait(ready: Callable[[], Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        if time.monotonic() > until:
            raise TimeoutError(f"the page or its browser was not ready in {seconds:g} s")
        time.sleep(0.1)


def main(url: str, path: str) -> None:
    with browser() as command:
        print(write(command, url)["verdict"])
        pathlib.Path(path).write_bytes(base64.b64decode(command("GET", "/screenshot")))


if __name__ == "__main__":
    main(*sys.argv[1:])
