"""The chat page in a real browser: a text is sent, tokens stream in, and the picture of the cache grows with them."""

import shutil

import pytest

import jkv
from tests.serving.conftest import Running

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser, chromium or google-chrome")
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
