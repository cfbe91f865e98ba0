"""The page at `/`: its files, its marks of drafts, and what a person sees in headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error, Page, expect, sync_playwright

from mtp_runtime import Emitted, Model
from mtp_serving.page.routes import FILES
from tests.serving.server import NAME, Running, serving

PROMPT = "The function returns"
PAGE = Path(__file__).resolve().parents[2] / "serving" / "mtp_serving" / "page"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on the PATH; Debian's is installed with `apt-get install chromium`"
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on the PATH")


def marks_of(model: Model, **options: Any) -> tuple[list[bool], str, Any]:
    """Of every token whether it was drafted, the text, and the statistics, straight from the runtime."""
    marks, finished = [], None
    for event in model.generate(prompt=PROMPT, max_new_tokens=40, ignore_eos=True, **options):
        if isinstance(event, Emitted):
            marks += event.drafted
        else:
            finished = event
    assert finished is not None
    return marks, finished.text, finished.stats


def pieces_of(server: Running, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """All pieces of a stream, and its text."""
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True, "speculative_stats": True, **body}
    pieces, text = [], ""
    for line in server.post(path, asked).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[len("data: ") :])["choices"]:
                pieces += choice.get("pieces", [])
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return pieces, text


@pytest.mark.parametrize("draft_tokens", [0, 1, 3])
def test_events_mark_the_tokens_that_came_from_drafts(carried: Model, draft_tokens: int) -> None:
    marks, _, stats = marks_of(carried, draft_tokens=draft_tokens)
    assert len(marks) == 40
    assert sum(marks) == stats.accepted
    assert not marks[0], "no draft comes before the first token"
    assert (stats.accepted > 0) == (draft_tokens > 0), "control: with drafts some are kept"


def test_a_stream_tells_text_and_source_of_each_token(carried: Model, server: Running) -> None:
    marks, text, _ = marks_of(carried, draft_tokens=3)
    pieces, streamed = pieces_of(server, "/v1/completions", {"prompt": PROMPT, "draft_tokens": 3})
    assert [piece["drafted"] for piece in pieces] == marks
    assert "".join(piece["text"] for piece in pieces) == text == streamed
    plain, _ = pieces_of(server, "/v1/completions", {"prompt": PROMPT, "draft_tokens": 0})
    assert [piece["id"] for piece in plain] == [piece["id"] for piece in pieces]
    assert not any(piece["drafted"] for piece in plain), "control"


def test_chunks_have_no_pieces_unless_they_are_asked_for(server: Running) -> None:
    assert pieces_of(server, "/v1/completions", {"prompt": PROMPT, "speculative_stats": False})[0] == []


def test_the_page_and_its_files_are_served_and_bring_nothing_from_elsewhere(server: Running) -> None:
    for path, (name, kind) in FILES.items():
        response = server.http.get(f"{server.url}{path}")
        assert response.status_code == 200
        assert response.headers["content-type"] == kind
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.content == (PAGE / name).read_bytes()
        assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", response.text), "an address of somebody else"
    linked = re.findall(r'(?:href|src)="(page/[^"]+)"', (PAGE / "index.html").read_text())
    assert linked, "control: the page links its files"
    assert {f"/{name}" for name in linked} <= set(FILES)


@needs_node
def test_the_reading_of_streams_and_cycles_by_itself(tmp_path: Path) -> None:
    """An event cut anywhere, a character cut in two, cycles out of marks: the file as it is, without a browser."""
    script = tmp_path / "try.mjs"
    script.write_text(f"import {{ Acceptance, eventsOf }} from {json.dumps(str(PAGE / 'reading.js'))};\n" + _TRY)
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "whole": True,
        "broken": "the connection broke off",
        "kept": [2 / 3, 1 / 3],
        "perCycle": 2,
        "share": 3 / 7,
    }


_TRY = """
const bytes = new TextEncoder().encode('data: {"text":"é"}\\n\\ndata: [DONE]\\n\\n');
const streamOf = (parts) => new ReadableStream({
  start(controller) { parts.forEach((part) => controller.enqueue(part)); controller.close(); },
});
let whole = true;
for (let cut = 0; cut <= bytes.length; cut += 1) {
  const found = [];
  for await (const data of eventsOf(streamOf([bytes.slice(0, cut), bytes.slice(cut)]))) found.push(data);
  whole &&= JSON.stringify(found) === JSON.stringify(['{"text":"é"}', "[DONE]"]);
}
let broken = null;
const half = eventsOf(streamOf([bytes.slice(0, 30)]));
try { for await (const data of half) data; } catch (error) { broken = error.message; }
const seen = new Acceptance();
// The first token; cycles that kept two, none and one.
const chunks = [[false], [true, true], [false, false, true, false]];
for (const marks of chunks) seen.add(marks.map((drafted) => ({ drafted })));
console.log(JSON.stringify({ whole, broken, kept: seen.byPosition, perCycle: seen.perCycle, share: seen.share }));
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of headless Chromium; what the browser complains of fails the test."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        opened = browser.new_page()
        yield opened
        browser.close()


@pytest.fixture
def complaints(page: Page) -> Iterator[list[str]]:
    """Errors of scripts and of the console."""
    found: list[str] = []

    def hear(message: Any) -> None:
        if message.type == "error":
            found.append(message.text)

    def crash(error: Error) -> None:
        found.append(error.message)

    page.on("console", hear)
    page.on("pageerror", crash)
    yield found
    page.remove_listener("console", hear)
    page.remove_listener("pageerror", crash)


def ask(page: Page, prompt: str, draft_tokens: str, max_tokens: int = 40) -> None:
    """Fill the form in and send it."""
    page.fill("#prompt", prompt)
    page.select_option("#draft-tokens", draft_tokens)
    page.fill("#max-tokens", str(max_tokens))
    page.click("#send")


@needs_browser
def test_a_person_sees_the_answer_with_its_drafts_shaded(
    page: Page, complaints: list[str], carried: Model, server: Running
) -> None:
    _, text, stats = marks_of(carried, draft_tokens=3)
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text(NAME)
    ask(page, PROMPT, "3")
    expect(page.locator("#reason")).to_have_text("limit")
    shown = page.locator("#answer").evaluate("element => element.textContent")
    assert shown == text or text.startswith(shown), "an end token may have come before the limit"
    assert shown == text
    assert page.locator("#answer .drafted").count() == stats.accepted
    shades = [
        page.locator(f"#answer {which}").first.evaluate("element => getComputedStyle(element).backgroundColor")
        for which in ("span.drafted", "span:not(.drafted)")
    ]
    assert shades[0] != shades[1], "control: they look different"
    rates = page.locator("#positions tr td:last-child").all_text_contents()
    expected = stats.as_dict()
    assert rates == [f"{rate:.3f}" for rate in expected["acceptance_by_position"]]
    assert page.locator("#per-cycle").text_content() == f"{expected['emitted_per_cycle']:.2f}"
    assert page.locator("#tokens").text_content() == "40"
    assert float(page.locator("#speed").text_content() or 0) > 0

    ask(page, PROMPT, "0")
    expect(page.locator("#share")).to_have_text("0 %")
    expect(page.locator("#reason")).to_have_text("limit")
    assert page.locator("#answer").evaluate("element => element.textContent") == text, "the same without drafts"
    assert page.locator("#answer .drafted").count() == 0, "control"
    assert complaints == []


@needs_browser
def test_markup_in_an_answer_stays_text(page: Page, complaints: list[str], server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    hostile = '<img src=x onerror="document.title=1">'
    chunk = {"choices": [{"index": 0, "pieces": [{"id": 1, "text": hostile, "drafted": True}], "finish_reason": None}]}
    stream = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    ask(page, PROMPT, "3")
    expect(page.locator("#answer .drafted")).to_have_text(hostile)
    page.unroute("**/v1/completions")
    assert page.locator("#answer img").count() == 0
    assert page.title() == "mtp-run serve"
    assert complaints == []


@needs_browser
def test_stopping_ends_the_request_on_the_server_too(page: Page, carried: Model, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    ask(page, PROMPT, "0", max_tokens=200)
    page.locator("#answer span").first.wait_for()
    page.click("#stop")
    expect(page.locator("#reason")).to_have_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    tokens = int(page.locator("#tokens").text_content() or 0)
    assert 0 < tokens < 200
    page.wait_for_function(
        "async () => /num_requests_running\\{[^}]*\\} 0/.test(await (await fetch('metrics')).text())"
    )


@needs_browser
def test_a_refusal_is_shown_as_the_sentence_that_it_is(page: Page, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator("#status")).to_have_text("ready")
    ask(page, "word " * 400, "3")
    expect(page.locator("#error")).to_contain_text("tokens")
    expect(page.locator("#status")).to_have_text("the request failed")
    ask(page, PROMPT, "3", max_tokens=4)
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#status")).to_have_text("ready")


@needs_browser
def test_a_server_with_a_key_is_asked_with_it(page: Page, carried: Model) -> None:
    with serving(carried, api_key="secret") as guarded:
        page.goto(guarded.url)
        expect(page.locator("#status")).to_have_text("the server asks for a key")
        page.fill("#key", "secret")
        page.locator("#key").blur()
        expect(page.locator("#status")).to_have_text("ready")
        ask(page, PROMPT, "2", max_tokens=3)
        expect(page.locator("#reason")).to_have_text("limit")
        assert page.locator("#answer").text_content()
        page.goto("about:blank")


@needs_browser
def test_an_answer_in_the_form_of_a_conversation(page: Page, speaker: Any) -> None:
    with serving(speaker(["Good", " day", " to", " you", "."])) as chatting:
        page.goto(chatting.url)
        expect(page.locator("#status")).to_have_text("ready")
        page.check("#chat")
        ask(page, "y", "3")
        expect(page.locator("#reason")).to_have_text("end token")
        expect(page.locator("#answer")).to_have_text("Good day to you.")
        page.goto("about:blank")
