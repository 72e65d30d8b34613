"""The chat page in a real browser (Debian: chromium), driven over its own debugging protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request

import pytest

from lily import testing
from lily.testing import scripted

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
websocket = pytest.importorskip("websocket")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: chromium)")


class Browser:
    """One tab."""

    def __init__(self, folder):
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--remote-allow-origins=*", "--no-first-run", "--window-size=900,700", f"--user-data-dir={folder}"]  # fmt: skip
        self.process = subprocess.Popen([BROWSER, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        active = folder / "DevToolsActivePort"
        self.until(lambda: active.exists() and active.read_text().count("\n") >= 1, 60)
        port = active.read_text().split("\n")[0]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        tabs = json.load(opener.open(f"http://127.0.0.1:{port}/json/list"))
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self.socket = websocket.create_connection(address, timeout=60)
        self.number = 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            level = message.get("params", {}).get("entry", {}).get("level", "error")
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded") and level in ("error", "warning"):
                self.problems.append(json.dumps(message["params"]))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]

    def value(self, script):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, condition, seconds=30.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)

    def open(self, url):
        self.requests.clear()
        self.problems.clear()
        self.call("Page.navigate", url=url)
        self.until(lambda: self.value("document.readyState") == "complete" and self.value("document.querySelector('#model')?.textContent"))

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, *, alt=False, shift=False, code=None):
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "n": 78, " ": 32}
        event = {"key": key, "code": code or key, "windowsVirtualKeyCode": codes[key], "modifiers": alt * 1 + shift * 8}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def texts(self, selector):
        return self.value(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")

    def screenshot(self, name):
        folder = os.environ.get("LILY_SCREENSHOTS")
        if folder:
            import base64

            with open(os.path.join(folder, f"{name}.png"), "wb") as file:
                file.write(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.socket.close()
    found.process.terminate()
    found.process.wait(20)


@needs_browser
def test_a_conversation_by_keyboard(browser, demo_server):
    browser.open(demo_server.url)
    assert browser.value("document.activeElement.id") == "input"
    browser.type("What is a young dog called?")
    browser.press("Enter")
    browser.until(lambda: "tokens/s" in "".join(browser.texts(".figures")), 60)
    first = browser.texts(".assistant > .text")
    assert browser.texts(".user > .text") == ["What is a young dog called?"] and "puppy" in first[0]
    thoughts = browser.value("(e => [e.open, e.querySelector('.text').textContent])(document.querySelector('.thoughts'))")
    assert thoughts[0] is False and len(thoughts[1]) > 3
    assert browser.value("document.activeElement.id") == "input"
    browser.type("And what is a young cat called?")
    browser.press("Enter")
    browser.until(lambda: len(browser.texts(".figures")) == 2 and "tokens/s" in browser.texts(".figures")[1], 60)
    figures = browser.texts(".figures")[1]
    assert int(figures.split("reused ")[1]) > 0
    browser.screenshot("conversation")
    assert browser.problems == [] and all(url.startswith(demo_server.url) or url.startswith("data:") for url in browser.requests)
    browser.press("n", alt=True, code="KeyN")
    assert browser.texts("article") == [] and browser.value("document.activeElement.id") == "input"


@needs_browser
def test_escape_stops_an_answer(browser, serving):
    client = serving(scripted("many words ", repeat=True, max_context=1 << 20))
    browser.open(client.server.url)
    browser.type("Talk")
    browser.press("Enter")
    browser.until(lambda: "many words" in "".join(browser.texts(".assistant .text")))
    assert browser.value("[document.getElementById('send').hidden, document.getElementById('stop').hidden]") == [True, False]
    browser.press("Escape")
    browser.until(lambda: browser.texts(".figures") == ["stopped"])
    browser.until(lambda: client.server.state.scheduler.active == 0 and client.model._native.in_flight == 0)
    assert browser.value("[document.getElementById('send').hidden, document.getElementById('stop').hidden]") == [False, True]


@needs_browser
def test_markup_in_an_answer_stays_text(browser, serving):
    attack = "<img src=x onerror=document.title='caught'><script>document.title='caught'</script>"
    client = serving(f"</think>\n\n{attack}")
    browser.open(client.server.url)
    browser.type(attack)
    browser.press("Enter")
    browser.until(lambda: "tokens/s" in "".join(browser.texts(".figures")))
    assert browser.texts("article > .text") == [attack, attack]
    assert browser.value("document.title") == "Lily" and browser.value("document.querySelectorAll('main img, main script').length") == 0


@needs_browser
def test_errors_are_shown_and_the_next_try_works(browser, serving):
    client = serving("</think>\n\nFour.", api_key="secret-key-1")
    browser.open(client.server.url)
    browser.type("2+2?")
    browser.press("Enter")
    browser.until(lambda: browser.texts(".error"))
    assert "API key" in browser.texts(".error")[0]
    browser.value("document.getElementById('key').value = 'secret-key-1'")
    testing.fail_at(client.model, 1, 0)
    browser.type("2+2?")
    browser.press("Enter")
    browser.until(lambda: len(browser.texts(".error")) == 2)
    assert "failed as asked" in browser.texts(".error")[1]
    browser.type("2+2?")
    browser.press("Enter")
    browser.until(lambda: "Four." in browser.texts("article > .text"))


@needs_browser
def test_light_and_dark(browser, serving):
    client = serving("</think>\n\nFour.")
    seen = {}
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(client.server.url)
        browser.type("2+2?")
        browser.press("Enter")
        browser.until(lambda: "Four." in browser.texts("article > .text"))
        style = "(s => [s.backgroundColor, s.color].map(c => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)))(getComputedStyle(document.body))"
        seen[scheme] = browser.value(style)
        browser.screenshot(scheme)
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert seen["light"][0] - seen["light"][1] > 500 and seen["dark"][1] - seen["dark"][0] > 500


def test_the_page_asks_nothing_of_anybody_else(serving):
    client = serving("x")
    index = client.get("/")
    assert index.status_code == 200 and "default-src 'none'" in index.headers["content-security-policy"]
    for name in ("page.js", "page.css"):
        text = client.get(f"/page/{name}").text
        assert text and "http://" not in text and "https://" not in text and "innerHTML" not in text
    assert client.get("/page/..%2fapp.py").status_code == 404 and client.get("/page/other").status_code == 404
    assert serving("x", page=False).get("/").status_code == 404
