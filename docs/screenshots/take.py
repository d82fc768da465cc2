"""Takes the pictures of the page that the README shows: `.venv/bin/python -m docs.screenshots.take` on a quiet machine.

A real server with the embedded Gemma 3 270M, ten clients, and the system's Chromium in both themes.
"""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.server.browser import CHROMIUM_FLAGS, ServerProcess, chromium_path, serving

HERE = Path(__file__).parent
TEXT = (HERE.parent / "architecture.md").read_text()
SIZE = {"width": 1280, "height": 1240}
CLIENTS = 10
WARM_UP_MS = 25_000
FLAGS = ["--kv-cache-memory-bytes", "120MiB", "--max-model-len", "4096", "--max-num-seqs", "8"]
FLAGS += ["--max-num-batched-tokens", "128"]  # short steps, so that prompts come in while others answer


def main() -> None:
    server = ServerProcess("gemma-3-270m", *FLAGS)
    left = threading.Event()
    clients = [threading.Thread(target=_keep_asking, args=(server, number, left)) for number in range(CLIENTS)]
    with serving(server), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport=SIZE)
        page.goto(server.url)
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tokens", exact=True).fill("80")
        page.get_by_label("Text to continue").fill("The capital of France is")
        page.get_by_label("Text to continue").press("Enter")
        page.locator(".said").wait_for(timeout=120_000)
        for client in clients:
            client.start()
        page.wait_for_timeout(WARM_UP_MS)
        page.get_by_label("Text to continue").fill("A window pane is")
        page.get_by_role("button", name="Send").click()
        page.locator("#map-canvas").hover(position={"x": 300, "y": 40})
        page.wait_for_timeout(WARM_UP_MS / 5)
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            page.wait_for_timeout(500)
            page.screenshot(path=HERE / f"page-{theme}.png")
        left.set()
        for client in clients:
            client.join()
        browser.close()


def _keep_asking(server: ServerProcess, number: int, left: threading.Event) -> None:
    """One client: prompts of several lengths, one after the other."""
    for turn in count():
        start = 400 * number + 50 * turn
        prompt = TEXT[start : start + 200 + 180 * (number % 7)]
        body = {"prompt": prompt, "max_tokens": 120 + 40 * (number % 5), "ignore_eos": True, "stream": True}
        for _ in server.lines("/v1/completions", body):
            if left.is_set():
                return


if __name__ == "__main__":
    main()
