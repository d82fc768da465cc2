"""The page at `/`, in a real browser before a real server: what it shows, chat, keys, keyboard, themes, phones."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests.server.browser import CHROMIUM_FLAGS, ServerProcess, chromium_path, serving
from tests.tiny_model import make_model

pytestmark = pytest.mark.xdist_group("page")  # one browser and two servers, not as many as there are workers
expect.set_options(timeout=20_000)  # a browser beside other tests may take its time

KEY = "a key for the tests"
FLAGS = ["--load-format", "dummy", "--device", "cpu", "--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "4"]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
LONG = {"prompt": "once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 1, "stream": True}

# The contrast of an element's text against what is painted behind it (WCAG 2).
CONTRAST = """element => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    return paint.getImageData(0, 0, 1, 1).data;
  };
  const light = (colour) => {
    const [r, g, b] = [...rgba(colour)].slice(0, 3).map((v) => v / 255).map(
      (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let behind = element;
  while (behind && rgba(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
  const back = light(getComputedStyle(behind ?? document.documentElement).backgroundColor);
  const front = light(getComputedStyle(element).color);
  return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
}"""
AXES = """() => [...document.querySelectorAll(".chart")].map((chart) => [
  chart.getBoundingClientRect().x,
  ...[...chart.querySelectorAll("text")].map((text) => text.getBoundingClientRect()),
])"""
MAP_PIXELS = "() => document.getElementById('map-canvas').toDataURL()"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One that chats and keeps what it computed in host memory and on disk, and one without a chat template, behind a
    key.
    """
    models = tmp_path_factory.mktemp("models")
    tiers = ["--kv-offloading-size", "8MiB", "--kv-disk-path", str(models / "kept")]
    chatting = ServerProcess(make_model(models / "tiny"), *FLAGS, *tiers)
    guarded = ServerProcess(make_model(models / "base", chat_template=None), *FLAGS, "--api-key", KEY)
    with serving(chatting, guarded):
        yield chatting, guarded


@pytest.fixture(scope="module")
def server(servers: tuple[ServerProcess, ServerProcess]) -> ServerProcess:
    return servers[0]


@pytest.fixture(scope="module")
def guarded(servers: tuple[ServerProcess, ServerProcess]) -> ServerProcess:
    return servers[1]


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    with playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS) as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    """A fresh tab. Errors of scripts, and anything loaded from elsewhere, fail the test."""
    with browser.new_context(viewport=DESKTOP) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith("http://127.0.0.1:") else wrong.append(r.url))
        page.on("console", lambda m: wrong.append(m.text) if "Content Security Policy" in m.text else None)
        yield page
        assert wrong == []


@pytest.fixture
def page(tab: Page, server: ServerProcess) -> Page:
    return opened(tab, server)


def opened(tab: Page, server: ServerProcess) -> Page:
    tab.goto(server.url)
    expect(tab.get_by_role("status")).to_have_text("Live")
    return tab


class Load:
    """So many requests at any moment, until it is left. They end early then, as those of clients that go away."""

    def __init__(self, server: ServerProcess, requests: int) -> None:
        self._server = server
        self._left = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(requests)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._left.is_set():
            for _ in self._server.lines("/v1/completions", LONG):
                if self._left.is_set():
                    break


def idle(server: ServerProcess) -> bool:
    return bool(server.ask("/stats")["arena"]["live_bytes"] == 0)


class TestTiers:
    def test_host_memory_and_disk_stand_beside_the_arena(self, page: Page, server: ServerProcess) -> None:
        server.ask("/v1/completions", {"prompt": "a prompt that is kept: " * 4, "max_tokens": 4})
        expect(page.get_by_role("heading", name="Host memory")).to_be_visible()
        expect(page.locator("#host-note")).to_have_text(re.compile(r"^[1-9].* of \S+ MiB, [1-9]\d* restore points?$"))
        expect(page.get_by_role("img", name=re.compile("KiB cached"))).not_to_have_count(0)
        expect(page.locator("#disk-note")).to_have_text(re.compile(r"of 16\.00 GiB, [1-9]\d* restore points?$"))
        expect(page.locator("#disk-copies")).to_contain_text("written")
        tiers = server.ask("/stats")["tiers"]
        host = tiers["host"]
        parts = [host[f"{state}_bytes"] for state in ("live", "cached", "stranded", "free")]
        assert sum(parts) == host["total_bytes"]

    def test_are_not_shown_where_there_are_none(self, tab: Page, guarded: ServerProcess) -> None:
        tab.goto(guarded.url)
        expect(tab.locator("#tiers")).to_be_hidden()


class TestMemory:
    def test_is_shown_by_group_and_in_sum(self, page: Page, server: ServerProcess) -> None:
        arena = server.ask("/stats")["arena"]
        assert page.title() == "tiny · Windowpane"
        table = page.get_by_role("table", name="Memory by group")
        for group in arena["groups"]:
            expect(table.get_by_role("row", name=re.compile(f"^{group['name']}"))).to_be_visible()
        free = re.compile(r"(9\d\d\.\d\d KiB|1\.00 MiB) free")  # what other tests have left of 1 MiB
        expect(table.get_by_role("row", name=re.compile("^All"))).to_contain_text(free)
        expect(page.locator("#arena-note")).to_have_text(f"1.00 MiB in {arena['slabs']} slabs")
        expect(page.locator("#use")).to_have_text("0 %")

    def test_map_and_sequences_move_while_requests_run(self, page: Page, server: ServerProcess) -> None:
        page.wait_for_function("() => document.getElementById('map-canvas').height > 100")
        empty = page.evaluate(MAP_PIXELS)
        expect(page.get_by_text("Nobody is asking.")).to_be_visible()
        with Load(server, 6):
            rows = page.locator("#sequences tr")
            expect(rows).to_have_count(6)
            expect(page.locator("#sequences-note")).to_have_text(re.compile("^4 running · 2 waiting"))
            expect(rows.filter(has_text="decode")).to_have_count(4)
            expect(rows.filter(has_text="waiting")).to_have_count(2)
            expect(rows.first.locator("td.pages")).to_contain_text(re.compile(r"[1-9]\d* of window-8"))
            page.wait_for_function(f"empty => ({MAP_PIXELS})() !== empty", arg=empty)
            page.wait_for_function(f"seen => ({MAP_PIXELS})() !== seen", arg=page.evaluate(MAP_PIXELS))
            expect(page.locator("#speed")).not_to_have_text("0")
            expect(page.locator("#use")).not_to_have_text("0 %")
            page.locator("#map-canvas").hover(position={"x": 5, "y": 5})
            expect(page.locator("#slab")).to_have_text(re.compile(r"^Slab 1 of \d+: (full|window-8), "))
        expect(rows).to_have_count(0)
        page.mouse.move(0, 0)
        expect(page.locator("#use")).to_have_text("0 %")
        # What they computed stays as restore points, in a shade of its own.
        assert server.ask("/stats")["arena"]["cached_bytes"] > 0
        page.wait_for_function(f"empty => ({MAP_PIXELS})() !== empty", arg=empty)
        expect(page.locator("#ttft")).to_have_text(re.compile(r"\d m?s$"))
        expect(page.locator("#speed-history")).to_have_attribute("aria-label", re.compile(r"at most \d"))

    def test_is_drawn_at_once_for_who_wants_no_motion(self, tab: Page, server: ServerProcess) -> None:
        tab.emulate_media(reduced_motion="reduce")
        page = opened(tab, server)
        page.evaluate("() => { window.frames_asked = 0; window.requestAnimationFrame = () => ++window.frames_asked; }")
        empty = page.evaluate(MAP_PIXELS)
        with Load(server, 1):
            page.wait_for_function(f"empty => ({MAP_PIXELS})() !== empty", arg=empty, polling=50)
        assert page.evaluate("window.frames_asked") == 0


class TestChat:
    def test_answers_as_the_api_does(self, page: Page, server: ServerProcess) -> None:
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tokens", exact=True).fill("24")
        page.get_by_label("Message").fill("Hello <b>there</b>")
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_label("Message")).to_have_value("")
        log = page.get_by_role("log", name="Conversation")
        expect(log.locator(".said")).to_contain_text(re.compile(r"^\d+ tokens? · .*first after"))
        messages = [{"role": "user", "content": "Hello <b>there</b>"}]
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24}
        first = server.ask("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert log.locator(".turn.model > span").text_content() == first
        expect(log.locator(".turn.you")).to_contain_text("Hello <b>there</b>")

        page.get_by_label("Message").fill("And now?")
        page.get_by_role("button", name="Send").click()
        expect(log.locator(".said")).to_have_count(2)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
        second = server.ask("/v1/chat/completions", {**body, "messages": messages})["choices"][0]["message"]["content"]
        assert log.locator(".turn.model > span").last.text_content() == second

        page.get_by_role("button", name="Clear").click()
        expect(log.locator(".turn")).to_have_count(0)
        expect(page.get_by_label("Message")).to_be_focused()

    def test_stop_ends_the_answer_and_frees_its_memory(self, page: Page, server: ServerProcess) -> None:
        # A random model may end its answer at any token, before a busy machine's browser gets round to stopping it. On
        # one that is busier still the longest answer may have ended, too: then there is another.
        page.route(
            "**/v1/chat/completions",
            lambda route: route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})),
        )
        page.get_by_label("Tokens", exact=True).fill("480")
        log, send = page.get_by_role("log"), page.get_by_role("button", name="Send")
        for _ in range(5):
            page.get_by_label("Message").fill("Go on")
            page.get_by_label("Message").press("Enter")
            with suppress(PlaywrightTimeout):
                page.locator("#sequences tr").wait_for(timeout=5_000)
                page.get_by_role("button", name="Stop").click(timeout=5_000)
            expect(send).to_be_visible()
            if "Stopped." in log.inner_text():
                break
            page.get_by_role("button", name="Clear").click()
        expect(log).to_contain_text("Stopped.")
        expect(page.locator("#sequences tr")).to_have_count(0)
        assert idle(server)

    def test_what_the_server_refuses_is_said_and_nothing_typed_is_lost(self, page: Page) -> None:
        page.get_by_label("Tokens", exact=True).fill("100000")
        page.get_by_label("Message").fill("Too much")
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_role("log").get_by_role("alert")).to_contain_text("maximum context length is 512 tokens")
        expect(page.get_by_label("Message")).to_have_value("Too much")


class TestKey:
    def test_is_asked_for_and_text_is_completed_without_a_template(self, tab: Page, guarded: ServerProcess) -> None:
        tab.goto(guarded.url)
        dialog = tab.get_by_role("dialog", name="This server asks for a key")
        expect(dialog.get_by_label("API key")).to_be_focused()
        dialog.get_by_label("API key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog).to_contain_text("refused the key")
        expect(tab.get_by_role("status", include_hidden=True)).to_have_text("Key needed")
        dialog.get_by_label("API key").fill(KEY)
        dialog.get_by_label("API key").press("Enter")
        expect(tab.get_by_role("status")).to_have_text("Live")
        expect(dialog).to_be_hidden()

        expect(tab.get_by_text("This model has no chat template")).to_be_visible()
        tab.get_by_label("Temperature").fill("0")
        tab.get_by_label("Tokens", exact=True).fill("20")
        tab.get_by_label("Text to continue").fill("Once upon")
        tab.get_by_label("Text to continue").press("Enter")
        expect(tab.locator(".said")).to_contain_text(re.compile(r"^\d+ tokens? · "))
        body = {"model": "base", "prompt": "Once upon", "temperature": 0, "max_tokens": 20}
        answer = guarded.ask("/v1/completions", body, KEY)["choices"][0]["text"]
        assert tab.locator(".turn > span").all_text_contents() == ["Once upon", answer]

        tab.reload()  # the tab keeps the key
        expect(tab.get_by_role("status")).to_have_text("Live")

    def test_guards_the_numbers_but_not_the_page(self, tab: Page, guarded: ServerProcess) -> None:
        for path, status in (("/", 200), ("/page/main.js", 200), ("/stats", 401), ("/page/../stats", 401)):
            assert tab.request.get(guarded.url + path).status == status, path
        assert tab.request.get(f"{guarded.url}/page/nothing.js").status == 404
        headers = tab.request.get(guarded.url).headers
        assert "default-src 'none'" in headers["content-security-policy"]


class TestConnection:
    def test_a_broken_stream_is_told_and_taken_up_again(self, tab: Page, guarded: ServerProcess) -> None:
        tab.add_init_script(f"sessionStorage.setItem('windowpane-key', '{KEY}')")
        page = opened(tab, guarded)
        assert guarded.stop() == 0, "a watched server does not end"
        expect(page.get_by_role("status")).to_have_text("Reconnecting")
        expect(page.get_by_role("alert")).to_contain_text("What you see may be out of date.")
        expect(page.get_by_text("Trying again")).to_be_visible()
        with page.expect_request("**/stats"):
            page.get_by_role("button", name="Try now").click()
        expect(page.get_by_role("status")).to_have_text("Reconnecting")
        guarded.start()
        guarded.wait_until_up()
        expect(page.get_by_role("status")).to_have_text("Live", timeout=15_000)
        expect(page.get_by_role("alert")).to_be_hidden()


class TestKeyboard:
    def test_reaches_everything_in_order(self, page: Page) -> None:
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            at: str = page.evaluate("() => document.activeElement.id || document.activeElement.textContent")
            if at in reached or page.evaluate("() => document.activeElement === document.body"):
                break
            reached.append(at)
            if at != "map-canvas":
                assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid", at
        expected = ["Skip to the chat box", "theme", "map-canvas", "sequences-scroll", "log", "prompt", "temperature"]
        assert [name for name in reached if name in expected] == expected

    def test_skips_to_the_chat_box(self, page: Page) -> None:
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message")).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(page.get_by_label("Message")).to_have_value("one\ntwo")
        expect(page.locator(".turn")).to_have_count(0)

    def test_moves_through_the_map(self, page: Page, server: ServerProcess) -> None:
        slabs = server.ask("/stats")["arena"]["slabs"]
        slider = page.get_by_role("slider", name="Slab")
        slider.focus()
        for key, slab in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", slabs), ("Home", 1)):
            page.keyboard.press(key)
            expect(slider).to_have_attribute("aria-valuenow", str(slab))
            expect(slider).to_have_attribute(
                "aria-valuetext", re.compile(f"^Slab {slab} of {slabs}: (free|full|window-8)")
            )
        page.keyboard.press("ArrowDown")
        assert int(slider.get_attribute("aria-valuenow") or 0) > 10, "down is a row, not a slab"
        expect(page.locator("#map-cursor")).to_be_visible()


class TestThemes:
    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_text_stands_out(self, tab: Page, server: ServerProcess, theme: Any) -> None:
        tab.emulate_media(color_scheme=theme)
        page = opened(tab, server)
        with Load(server, 1):
            expect(page.locator("#sequences tr")).to_have_count(1)
            page.get_by_label("Tokens", exact=True).fill("1")
            page.get_by_label("Message").fill("Hi")
            page.get_by_label("Message").press("Enter")
            expect(page.locator(".said")).to_have_count(1)
            for selector in (
                *("h1", "#model", "#status", ".value", ".figure .note", ".figure h2", "#slab", "thead th", "tbody th"),
                *("tbody td", "tfoot td", ".tag", ".turn.you", ".who", ".said", "#send", "#clear", "label", "footer a"),
                "textarea",
            ):
                for element in page.locator(selector).all()[:4]:
                    assert element.evaluate(CONTRAST) >= 4.5, selector

    def test_toggle_wins_over_the_system_and_is_remembered(self, tab: Page, server: ServerProcess) -> None:
        tab.emulate_media(color_scheme="light")
        page = opened(tab, server)
        background = "() => getComputedStyle(document.documentElement).backgroundColor"
        light, light_map = page.evaluate(background), page.evaluate(MAP_PIXELS)
        toggle = page.get_by_role("button", name="Dark theme")
        expect(toggle).to_have_attribute("aria-pressed", "false")
        toggle.click()
        expect(toggle).to_have_attribute("aria-pressed", "true")
        dark = page.evaluate(background)
        assert dark != light
        assert page.evaluate(MAP_PIXELS) != light_map, "the map kept its colours"
        page.reload()
        assert page.evaluate(background) == dark
        toggle.click()
        assert page.evaluate(background) == light
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(background) == dark, "back to what the system says"


class TestPhone:
    def test_nothing_is_wider_than_the_screen(self, browser: Browser, server: ServerProcess) -> None:
        with browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2) as context:
            page = opened(context.new_page(), server)
            expect(page.locator("#slab")).to_have_text("Tap a slab to see what it holds.")
            with Load(server, 4):
                expect(page.locator("#sequences tr").first).to_be_visible()
                width = page.evaluate("() => document.documentElement.scrollWidth")
                assert width <= PHONE["width"]
                scroll = page.locator("#sequences-scroll")
                assert scroll.evaluate("e => e.scrollWidth - e.clientWidth") <= 0, "a column is cut off"
                page.locator("#map-canvas").tap(position={"x": 4, "y": 4})
                expect(page.locator("#slab")).to_have_text(re.compile("^Slab 1 of"))
            page.get_by_label("Message").fill("Hi")
            page.get_by_role("button", name="Send").tap()
            expect(page.locator(".turn.you")).to_be_in_viewport()


def test_everything_has_a_name(page: Page, server: ServerProcess) -> None:
    """What a screen reader meets: every control, picture and table by name, one heading of the first rank."""
    with Load(server, 1):
        expect(page.locator("#sequences tr")).to_have_count(1)
        nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    met = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    named = {"button", "textbox", "spinbutton", "slider", "link", "image", "table", "log", "region", "heading"}
    assert [role for role, name in met if role in named and not name.strip()] == []
    assert {role for role, _ in met} >= named | {"status", "main", "banner", "rowheader", "columnheader"}
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"


class TestRequests:
    def test_the_life_of_one_is_opened_by_a_click_and_can_be_cancelled(self, page: Page, server: ServerProcess) -> None:
        with Load(server, 1):
            page.locator("#sequences tr").first.click()
            dialog = page.get_by_role("dialog", name=re.compile("^cmpl-"))
            expect(dialog).to_contain_text("decode")
            expect(dialog.locator("dd").nth(3)).to_have_text(re.compile(r"^\d+ tokens? in .* per second$"))
            name = dialog.get_by_role("heading").text_content()
            dialog.get_by_role("button", name="Cancel this request").click()
            expect(dialog).to_contain_text("Cancelled.")
            expect(page.locator("#request-state")).to_have_text("cancelled")
            expect(dialog.get_by_role("button", name="Cancel this request")).to_be_hidden()
            dialog.get_by_role("button", name="Close").click()
        assert "abort" in [event["what"] for event in server.ask("/stats/history")["events"] if event["id"] == name]

    def test_those_that_ended_and_refusals_are_listed(self, page: Page, server: ServerProcess) -> None:
        server.ask("/v1/completions", {"prompt": "one", "max_tokens": 3, "ignore_eos": True})
        with pytest.raises(OSError, match="404"):
            server.ask("/v1/nothing")
        rows = page.locator("#events tr")
        expect(rows.filter(has_text="refused 404").first).to_be_visible()
        expect(rows.filter(has_text="cut at its limit").first).to_be_visible()
        page.locator("#events-scroll").focus()
        page.keyboard.press("ArrowDown")  # to the first that can be opened
        page.keyboard.press("Enter")
        expect(page.locator("#request-life")).to_contain_text("3 tokens in")
        page.keyboard.press("Escape")
        expect(page.locator("#request-dialog")).to_be_hidden()


class TestTrends:
    def test_have_axes_and_what_the_server_measured(self, page: Page, server: ServerProcess) -> None:
        server.ask("/v1/completions", {"prompt": "one", "max_tokens": 30, "ignore_eos": True})
        for chart, unit in (("speed", r"\d"), ("ttft", r"\d m?s"), ("memory", r"\d MiB")):
            svg = page.locator(f"#{chart}-trend")
            expect(svg).to_have_attribute("aria-label", re.compile(rf"last 15 minutes.*{unit}"))
            expect(svg).to_contain_text("now")
            expect(svg.locator("text").nth(2)).to_have_text(re.compile(unit))
        group = server.ask("/stats/history")["groups"][0]
        expect(page.locator("#memory-trend")).to_have_attribute("aria-label", re.compile(rf"{group} .*of 1\.00 MiB"))


def test_facts_of_the_model_are_planned_beside_measured(page: Page, server: ServerProcess) -> None:
    expect(page.locator("#facts-note")).to_have_text(re.compile(r"float32 · context 512$"))
    rows = page.get_by_role("table", name="Planned and measured bytes").locator("tbody tr")
    for row, account in zip(rows.all(), server.ask("/stats")["model"]["accounts"], strict=True):
        expect(row.get_by_role("rowheader")).to_have_text(account["name"])
        planned, measured = row.locator("td.number").all_text_contents()
        assert planned == measured


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_nothing_is_cut_off(browser: Browser, server: ServerProcess, width: int, height: int, theme: Any) -> None:
    is_phone = width < 720
    size = {"width": width, "height": height}
    with browser.new_context(viewport=size, is_mobile=is_phone, color_scheme=theme) as context, Load(server, 12):
        page = opened(context.new_page(), server)
        expect(page.locator("#sequences tr")).to_have_count(12)
        expect(page.locator("#speed-trend text").first).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        wide = "e => e.scrollWidth - e.clientWidth"
        for id in (
            "use-note",
            "host-note",
            "host-copies",
            "disk-note",
            "disk-copies",
            "speed-note",
            "max-tokens",
            "temperature",
            "sequences-scroll",
            "events-scroll",
            "ask",
        ):
            assert page.locator(f"#{id}").evaluate(wide) <= 0, id
        # Whole rows: what is left of the region under its heading is a multiple of a row's height.
        rest = page.locator("#sequences-scroll").evaluate(
            "e => (e.clientHeight - e.querySelector('thead').offsetHeight) % e.querySelector('tbody tr').offsetHeight"
        )
        assert rest == 0, "half a row at the end"
        # Names of the axes lie inside their pictures and beside each other.
        for left, *texts in page.evaluate(AXES):
            assert min(text["x"] for text in texts) >= left, "a name of an axis is cut off"
            below = sorted((t["x"], t["right"]) for t in texts if t["y"] == max(text["y"] for text in texts))
            assert len(below) >= 2 and all(one[1] <= other[0] for one, other in pairwise(below))
        if is_phone:
            expect(page.locator("#slab")).not_to_contain_text("arrow keys")
            empty = page.locator("#log").bounding_box()
            assert empty is not None and empty["height"] < 20, "an empty chat box"
        page.get_by_text("What these words mean").click()
        expect(page.locator(".words")).to_contain_text("Stranded")
