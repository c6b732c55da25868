"""The chat page in a real browser: a text is sent, tokens stream in, and the picture of the cache grows with them."""

import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest

import jkv
from tests.serving.conftest import Running

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium or google-chrome")
PAGE = Path(jkv.__file__).parent / "serving" / "page.html"
PROMPT = "b=3;c=7;d=b*c;e=d+b;f=e*c;?f"


@pytest.fixture
def server():
    model, policy = jkv.load("tiny-reasoner"), jkv.r_kv(budget=48, interval=16, window=4)
    running = Running(jkv.Engine(model, max_running=2, max_slots=640, policies=[policy]))
    yield running
    running.close()


def test_a_text_is_completed_and_the_picture_shows_the_cache(server):
    errors = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.fill("textarea", PROMPT)
        page.click("button:has-text('Send')")
        page.wait_for_function("document.body.innerText.includes('at most')", timeout=120_000)
        text, label = page.inner_text("main"), page.get_attribute("canvas", "aria-label")
        is_drawn = page.evaluate(
            "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)", page.query_selector("canvas")
        )
        browser.close()
    assert errors == []
    assert PROMPT in text
    assert "d=b*c" in text
    assert label.startswith("The cache holds ")
    assert is_drawn


class Scripted(http.server.BaseHTTPRequestHandler):
    """The page of a chat model, whose answers are the parts of `words` as the test lets them go."""

    def do_GET(self):
        self.respond("text/html", PAGE.read_text().replace("IS_CHAT", "true").encode())

    def do_POST(self):
        server = self.server
        server.sent.append(
            [turn["content"] for turn in json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]]
        )
        self.respond("text/event-stream", b": ping\n\n")
        for part in server.script.pop(0):
            if part == "WAIT":
                assert server.go.wait(60)
            else:
                chunk = json.dumps({"choices": [{"delta": {"content": part}}]})
                self.wfile.write((f"data: {chunk}\n\n" if part != "[DONE]" else "data: [DONE]\n\n").encode())
                self.wfile.flush()

    def respond(self, kind, content):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.sent, server.script, server.go = [], [], threading.Event()
    threading.Thread(target=server.serve_forever).start()
    yield server
    server.go.set()
    server.shutdown()
    server.server_close()


def test_one_message_is_answered_at_a_time_and_the_history_stays_in_order(scripted):
    """A second Send while an answer comes does nothing; a stopped answer stays; one that broke off leaves with its message."""
    scripted.script = [["one", "WAIT", "[DONE]"], ["two"], ["WAIT"], ["three", "WAIT"], ["four", "[DONE]"]]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{scripted.server_port}")

        def send(text):
            page.fill("textarea", text)
            page.click("#send")

        def wait_for(text):
            page.wait_for_function(f"document.querySelector('main').innerText.includes({text!r})", timeout=60_000)

        def wait_until_free():
            page.wait_for_function("!document.getElementById('send').disabled && document.getElementById('stop').disabled")

        send("a")
        wait_for("one")
        page.fill("textarea", "b")
        assert page.is_disabled("#send")
        page.evaluate("document.forms[0].dispatchEvent(new Event('submit', {cancelable: true}))")
        page.press("input[name=budget]", "Enter")
        assert page.input_value("textarea") == "b"
        scripted.go.set()
        wait_until_free()
        scripted.go.clear()
        page.click("#send")  # which the server breaks off
        wait_for("broke off")
        send("c")  # which is stopped before its first token
        page.click("#stop")
        wait_for("stopped")
        wait_until_free()
        send("d")
        wait_for("three")
        page.click("#stop")
        wait_until_free()
        send("e")
        wait_for("four")
        browser.close()
    assert scripted.sent == [["a"], ["a", "one", "b"], ["a", "one", "c"], ["a", "one", "d"], ["a", "one", "d", "three", "e"]]
