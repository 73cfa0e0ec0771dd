"""The page at /, in a real browser."""

import http.client
import json
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from browser import BINARY, Browser
from rest_server import FakeService, HttpServer, infer_json, request

from hurtle.serving.config import ServeConfig
from hurtle.serving.rest import page
from hurtle.serving.server import ServerThread

HOSTILE = "<img src=x onerror=window.hacked=1>"
in_browser = pytest.mark.skipif(BINARY is None, reason="needs a browser: Chromium or Chrome")


class PageService(FakeService):
    """Names that try to be more than text."""

    async def index(self, ready=False):
        return [
            {"name": "echo", "version": "1", "state": "READY", "reason": ""},
            {"name": "echo", "version": "2", "state": "UNAVAILABLE", "reason": f"damaged: {HOSTILE}"},
            {"name": HOSTILE, "version": "1", "state": "READY", "reason": ""},
            {"name": "__proto__", "version": "1", "state": "LOADING", "reason": ""},
        ]

    def model_metadata(self, name, version=""):
        inputs = [{"name": HOSTILE, "datatype": "FP32", "shape": [-1, 2]}, {"name": "half", "datatype": "FP16", "shape": [3]}]
        return {"name": name, "versions": ["1"], "platform": HOSTILE, "inputs": inputs, "outputs": inputs}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(str(tmp_path_factory.mktemp("profile")))
    yield found
    found.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for version, scale in (("1", 2.0), ("2", 3.0)):
        (folder / "affine" / version).mkdir(parents=True)
        (folder / "affine" / version / "model.json").write_text(json.dumps({"scale": scale, "shift": 1.0, "size": 2}))
    config = ServeConfig(models=(str(folder),), http_port=0, grpc_port=None, backend="affine", drain=5.0)
    with ServerThread(config) as found:
        yield found


@contextmanager
def opened(browser, service):
    """The page of a fake server."""
    server = HttpServer(service)
    try:
        browser.open(f"http://127.0.0.1:{server.port}/")
        yield server
    finally:
        server.close()


def test_the_page_comes_with_a_policy_that_lets_only_its_own_script_run():
    server = HttpServer(FakeService())
    try:
        (answer,) = server.ask(request("GET", "/"))
        (icon,) = server.ask(request("GET", "/favicon.svg"))
    finally:
        server.close()
    assert (answer[0], answer[1]["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer[2] == page.HTML
    policy = answer[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (icon[0], icon[1]["content-type"]) == (200, "image/svg+xml")
    for word in (b"http://", b"https://", b"innerHTML", b"insertAdjacentHTML", b"document.write", b"eval("):
        assert page.HTML.count(word) == (word == b"http://"), word  # the one is SVG's name, which is not fetched


@in_browser
def test_the_page_shows_models_tries_them_and_counts(browser, real):
    browser.open(f"http://127.0.0.1:{real.http_port}/")
    browser.wait_for("document.querySelector('section.card td') !== null")
    text = browser.text()
    assert "ready" in text.split("\n")
    for part in ("affine", "hurtle_affine", "v1", "v2", "any × 2"):
        assert part in text
    editor = browser.wait_for("document.querySelector('textarea').value")
    assert json.loads(editor) == {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}]}

    browser.evaluate("document.querySelector('textarea').focus()")
    browser.press("Enter", modifiers=2)  # Ctrl
    answer = browser.wait_for("document.querySelector('pre').textContent")
    assert json.loads(answer)["outputs"][0]["data"] == [1, 1]
    assert browser.wait_for("document.querySelector('section.card').innerText.match(/200 · [0-9.]+ ms/)")

    browser.evaluate("document.querySelector('.versions button').click()")
    browser.evaluate(
        "document.querySelector('textarea').value = document.querySelector('textarea').value.replace('0, 0', '5, 6')"
    )
    browser.evaluate("document.querySelector('button[type=submit]').click()")
    browser.wait_for("document.querySelector('pre').textContent.includes('[11, 13]')")

    client = http.client.HTTPConnection("127.0.0.1", real.http_port, timeout=60)
    for body in [infer_json([[1, 2], [3, 4]])] * 30 + [b"{}"]:
        client.request("POST", "/v2/models/affine/versions/1/infer", body)
        client.getresponse().read()
    client.close()
    # What stands on the page, by label.
    tile = "Object.fromEntries([...document.querySelectorAll('dl div')].map(d => d.innerText.split('\\n')))"
    browser.wait_for(f"Number({tile}['Requests/s']) > 1 && {tile}['Failures'] === '1'")
    shown = browser.evaluate(tile)
    assert float(shown["Rows/s"]) > float(shown["Requests/s"])
    assert shown["Latency p50"].endswith(("µs", "ms"))
    assert shown["p99"].endswith(("µs", "ms"))
    assert 1 < float(shown["Rows/batch"]) <= 2
    assert shown["Queued"] == "0"
    browser.wait_for("document.querySelector('path.trace').getAttribute('d').split('L').length > 1")
    assert browser.problems == []


@in_browser
def test_what_is_wrong_with_a_tried_request_is_shown(browser, real):
    browser.open(f"http://127.0.0.1:{real.http_port}/")
    browser.wait_for("document.querySelector('textarea')?.value")
    for typed, says in (('{"inputs": []}', "'x'"), ("{", "JSON")):
        browser.evaluate(f"document.querySelector('textarea').value = {json.dumps(typed)}")
        browser.evaluate("document.querySelector('button[type=submit]').click()")
        browser.wait_for(f"document.querySelector('pre.bad')?.textContent.includes({json.dumps(says)})")
    browser.evaluate("document.querySelector('button.quiet').click()")
    assert "inputs" in browser.evaluate("document.querySelector('textarea').value")


@in_browser
def test_names_are_shown_as_text_whatever_they_hold(browser):
    with opened(browser, PageService()):
        browser.wait_for("document.querySelectorAll('section.card').length === 3")
        browser.wait_for("document.querySelectorAll('section.card td').length > 6")
        browser.evaluate("[...document.querySelectorAll('.versions button')].find(b => b.textContent === 'v2').click()")
        text = browser.text()
        for part in (HOSTILE, f"damaged: {HOSTILE}", "__proto__", "loading", "unavailable"):
            assert part in text
        assert browser.evaluate("window.hacked === undefined && document.querySelectorAll('main img').length === 0")
        assert browser.problems == []


@in_browser
def test_half_precision_inputs_are_sent_as_binary_data(browser):
    with opened(browser, PageService()) as server:
        browser.wait_for("cards.get('echo')?.editor.value.includes('FP16')")
        browser.evaluate(
            "cards.get('echo').editor.value = cards.get('echo').editor.value.replace('[0, 0, 0]', '[0.1, -2, 65504]')"
        )
        browser.evaluate("cards.get('echo').tryIt()")
        assert server.service.last.inputs["half"].tolist() == np.array([0.1, -2, 65504], np.float16).tolist()
        rng = np.random.default_rng(1)
        values = np.concatenate(
            [rng.normal(size=500) * 10.0 ** rng.integers(-9, 6, 500), [0, -0.0, 65519.9, 65520, 1e9, 6e-8, 3e-8, 2.98e-8]]
        )
        values = values.astype(np.float32).astype(float)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16).view(np.uint16).tolist()
            brain = values.astype(ml_dtypes.bfloat16).view(np.uint16).tolist()
        assert browser.evaluate(f"{json.dumps(values.tolist())}.map(float16)") == half
        assert browser.evaluate(f"{json.dumps(values.tolist())}.map(bfloat)") == brain


@in_browser
def test_a_server_that_wants_a_token_is_given_it_from_the_page(browser):
    with opened(browser, PageService(token="open sesame")):
        browser.wait_for("document.activeElement === document.getElementById('token')")
        assert "This server wants a token" in browser.text()
        assert browser.evaluate("document.querySelectorAll('section.card').length") == 0
        browser.type("wrong")
        browser.press("Enter", text="\r")
        browser.wait_for("document.body.innerText.includes('This token was not taken.')")
        browser.evaluate("document.getElementById('token').select()")
        browser.type("open sesame")
        browser.press("Enter", text="\r")
        browser.wait_for("document.querySelectorAll('section.card').length === 3")
        browser.wait_for("document.getElementById('gate').hidden")
        browser.evaluate("cards.get('echo').tryIt()")
        browser.wait_for("cards.get('echo').took.textContent.startsWith('200')")


@in_browser
def test_the_page_says_when_the_server_is_not_ready_or_gone(browser):
    with opened(browser, PageService()) as server:
        browser.wait_for("document.getElementById('health').textContent === 'ready'")
        server.service.ready = False
        browser.wait_for("document.getElementById('health').textContent === 'not ready'")
    browser.wait_for("document.getElementById('health').textContent === 'not answering'")
    browser.send("Page.navigate", url="about:blank")
