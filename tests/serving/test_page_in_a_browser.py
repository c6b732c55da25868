"""The server's page in a real browser: conversations, two answers side by side, graphs, and texts that nobody should trust."""

import http.server
import json
import shutil
import threading

import pytest

import jkv
from tests.serving.conftest import Running

pytest.importorskip("starlette")
from jkv.serving.page import files

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium or google-chrome")

PROMPT = "b=3;c=7;d=b*c;e=d+b;f=e*c;?f"
POLICIES = [{"name": "r_kv", "has_budget": True}, {"name": "full", "has_budget": False}]
CARD = {
    "id": "scripted",
    "policy": "r_kv",
    "budget": 64,
    "policies": POLICIES,
    "is_chat": True,
    "max_model_len": 1024,
    "kv_pool_bytes": 2e7,
    "kv_bytes_per_token": 1e5,
}


class Scripted(http.server.BaseHTTPRequestHandler):
    """The page's files, and a chat model whose answers are the parts of `script` as the test lets them go.

    A part is a content, a whole chunk, "WAIT" or "[DONE]". With a `key`, the model asks for it.
    """

    def do_GET(self):
        path, server = self.path, self.server
        if path.startswith("/v1/") and server.key and self.headers["authorization"] != f"Bearer {server.key}":
            self.respond("application/json", b'{"error": {"message": "The key is missing."}}', 401)
        elif path == "/v1/models":
            self.respond("application/json", json.dumps({"data": [CARD]}).encode())
        elif path in ("/metrics", "/version"):
            self.respond("text/plain", b'jkv:kv_bytes{engine="0"} 3e+06\n' if path == "/metrics" else b'{"version": "1"}')
        else:
            file = files()[path.removeprefix("/static/").removeprefix("/") or "page.html"]
            self.respond(file.media_type, file.content, headers=file.headers)

    def do_POST(self):
        server = self.server
        server.sent.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.respond("text/event-stream", b": ping\n\n")
        for part in server.script.pop(0):
            if part == "WAIT":
                assert server.go.wait(60)
                continue
            chunk = part if isinstance(part, dict) else {"choices": [{"delta": {"content": part}}]}
            self.wfile.write(f"data: {part if part == '[DONE]' else json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

    def respond(self, kind, content, status=200, headers=None):
        self.send_response(status)
        for name, value in {"content-type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.sent, server.script, server.go, server.key = [], [], threading.Event(), ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever).start()
    yield server
    server.go.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser):
    """A page that must log nothing, such as a content that its policy blocks."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    one, logged = context.new_page(), []
    one.on("console", lambda message: logged.append(message.text))
    one.on("pageerror", lambda error: logged.append(str(error)))
    yield one
    context.close()
    assert logged == []


def send(page, text):
    page.fill("#text", text)
    page.press("#text", "Enter")


def wait_until_free(page):
    page.locator("#send:enabled").wait_for(timeout=120_000)


def wait_for(page, text):
    page.locator("main", has_text=text).wait_for(timeout=60_000)


def usage(tokens, held, prompt=20, **more):
    kv = {"held_tokens": held, "evicted_tokens": prompt + tokens - held} | more
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "kv": kv}


def chunk(tokens, held, **delta):
    return {"choices": [{"delta": delta}], "usage": usage(tokens, held)}


def contents(sent):
    return [[turn["content"] for turn in body["messages"]] for body in sent]


def test_one_message_is_answered_at_a_time_and_the_history_stays_in_order(scripted, page):
    """A second Send while an answer comes does nothing; a stopped answer stays; one that broke off leaves with its message."""
    scripted.script = [["one", "WAIT", "[DONE]"], ["two"], ["WAIT"], ["three", "WAIT"], ["four", "[DONE]"]]
    page.goto(scripted.url)
    page.locator("#about", has_text="r_kv, budget 64").wait_for()
    send(page, "a")
    wait_for(page, "one")
    page.fill("#text", "b")
    assert page.is_disabled("#send")
    page.press("#text", "Enter")
    assert page.input_value("#text") == "b"
    scripted.go.set()
    wait_until_free(page)
    scripted.go.clear()
    page.click("#send")  # which the server breaks off
    wait_for(page, "broke off")
    send(page, "c")  # which is stopped before its first token
    page.click("#stop")
    wait_for(page, "stopped")
    wait_until_free(page)
    send(page, "d")
    wait_for(page, "three")
    page.click("#stop")
    wait_until_free(page)
    send(page, "e")
    wait_for(page, "four")
    asked = [["a"], ["a", "one", "b"], ["a", "one", "c"], ["a", "one", "d"], ["a", "one", "d", "three", "e"]]
    assert contents(scripted.sent) == asked


UNTRUSTED = r"""<img src="https://evil.example/a.png" onerror="window.isTaken = 1"><script>window.isTaken = 1</script>
![picture](https://evil.example/b.png) [link](javascript:window.isTaken=1) <b onclick="window.isTaken=1">bold</b>
$\href{javascript:window.isTaken=1}{x}$ $\includegraphics{https://evil.example/c.png}$
"""
FORMULAS = r"""**Bold** costs $5 or $6, `$not$`, \(a_1\) and $x^2$:
$$
\boxed{y
= 2}
$$

| a | b |
|---|---|
| 1 | 2 |
"""


def test_what_a_model_writes_runs_nothing_and_loads_nothing(scripted, page):
    loaded = []
    page.on("request", lambda request: loaded.append(request.url))
    scripted.script = [[UNTRUSTED, "[DONE]"]]
    page.goto(scripted.url)
    page.locator("#about", has_text="r_kv").wait_for()
    send(page, "a")
    wait_until_free(page)
    page.locator("a", has_text="picture").hover()
    assert page.locator("main").locator("img, script, iframe, b, [onclick], [onerror], a[href^='javascript']").count() == 0
    assert "<img src=" in page.inner_text("main"), "HTML is shown as it was written"
    assert page.evaluate("window.isTaken") is None
    assert {url for url in loaded if not url.startswith(scripted.url)} <= {"data:,"}


def test_markdown_and_formulas_are_shown(scripted, page):
    scripted.script = [[FORMULAS, "[DONE]"]]
    page.goto(scripted.url)
    page.locator("#about", has_text="r_kv").wait_for()
    send(page, "a")
    wait_until_free(page)
    content = page.locator(".content")
    assert [one.text_content() for one in content.locator("strong, td").all()] == ["Bold", "1", "2"]
    assert content.locator("math").count() == 3
    assert content.locator(".display menclose").count() == 1
    assert "$5 or $6" in content.inner_text()
    assert content.locator("code").inner_text() == "$not$"


def test_two_answers_side_by_side_with_their_figures_and_one_graph(scripted, page):
    thought, last = chunk(40, 60, reasoning="Let me see."), {"choices": [], "usage": usage(120, 140, bytes=14e6)}
    last["usage"]["completion_tokens_details"] = {"reasoning_tokens": 40}
    full = [chunk(1, 21), chunk(60, 80, content="all"), last, "[DONE]"]
    cut = [chunk(1, 21), thought, chunk(80, 50, content="few"), {"choices": [], "usage": usage(100, 64, bytes=8e6)}, "[DONE]"]
    scripted.script = [full, cut, ["next", "[DONE]"], ["next", "[DONE]"]]
    page.goto(scripted.url)
    page.locator("#about", has_text="3 MB of 20 MB").wait_for()
    page.click("#settings summary")
    page.select_option("[name=compare]", "in turn")
    for name, value in {"system": "Be brief.", "temperature": "0.5", "budget": "64", "limit": "200"}.items():
        page.fill(f"[name={name}]", value)
    page.fill("#text", "first")
    page.press("#text", "Shift+Enter")
    page.keyboard.type("second")
    page.press("#text", "Enter")
    wait_until_free(page)
    shared = {"temperature": 0.5, "max_tokens": 200}
    assert all(body.items() >= shared.items() for body in scripted.sent)
    assert [(body.get("policy"), body.get("budget")) for body in scripted.sent] == [("full", None), (None, 64)]
    assert contents(scripted.sent) == [["Be brief.", "first\nsecond"]] * 2

    def check():
        names = [one.inner_text() for one in page.locator(".name").all()]
        assert names == ["full cache", "r_kv, budget 64"]
        one, other = (view.inner_text() for view in page.locator(".answer").all())
        assert "holds 140 of 140 tokens · at most 14 MB" in one
        assert "holds 64 of 120 tokens · at most 8 MB" in other
        assert page.locator(".reasoning:visible").count() == 1
        assert page.locator(".reasoning[open]").count() == 0
        assert "40 tokens" in page.locator(".reasoning:visible summary").inner_text()
        texts = set(page.locator("svg text").all_text_contents())
        assert {"tokens held", "MB held", "generated tokens", "0", "100", "10"} <= texts
        assert page.locator("svg path").count() == page.locator("figcaption span").count() == 2
        label = page.get_attribute("svg", "aria-label")
        assert label.endswith("r_kv, budget 64: 64 tokens held after 100 generated.")

    check()
    left, right = (view.bounding_box() for view in page.locator(".answer").all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.locator("#about", has_text="r_kv").wait_for()
    check()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.input_value("[name=system]") == "Be brief."
    send(page, "third")
    wait_until_free(page)
    wait_for(page, "next")
    assert contents(scripted.sent[2:]) == [["Be brief.", "first\nsecond", answer, "third"] for answer in ("all", "few")]
    page.click("#new")
    assert page.locator(".turn").count() == 0
    page.reload()
    page.locator("#about", has_text="r_kv").wait_for()
    assert page.locator(".turn").count() == 0


def test_a_key_is_asked_for_and_not_written_down(scripted, browser):
    context = browser.new_context()  # whose log has the refusal
    page = context.new_page()
    scripted.key = "secret"
    page.goto(scripted.url)
    page.locator("#about", has_text="The key is missing.").wait_for()
    page.fill("[name=key]", "secret")
    page.press("[name=key]", "Tab")
    page.locator("#about", has_text="r_kv").wait_for()
    page.reload()
    assert page.input_value("[name=key]") == ""
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    context.close()


@pytest.fixture
def server():
    model, policy = jkv.load("tiny-reasoner"), jkv.r_kv(budget=48, interval=16, window=4)
    running = Running(jkv.Engine(model, max_running=2, max_slots=640, policies=[policy]))
    yield running
    running.close()


def test_a_text_is_completed_and_the_graph_shows_the_cache(server, page):
    page.goto(server.url)
    page.locator("#about", has_text="r_kv, budget 48").wait_for()
    send(page, PROMPT)
    wait_until_free(page)
    assert page.inner_text(".question") == PROMPT
    assert "d=b*c" in page.text_content(".reasoning")
    assert "at most" in page.inner_text(".figures")
    assert page.locator("svg path").count() == 2, "the answer, and every token"
    held = page.get_attribute("svg", "aria-label")
    assert "r_kv, budget 48: " in held
