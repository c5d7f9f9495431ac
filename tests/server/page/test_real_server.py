"""The chat page of `jaxinfer serve demo` in a real browser: with a key, and through a kill and a restart."""

import json

import pytest

from tests.server.page.conftest import PHONE
from tests.server.page.real_server import KEY, RealServer
from tests.server.page.test_chat_in_browser import ANSWERS, DONE, ask, send, settled, shown

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(600)]

# A long answer that is known in advance: the API gives the same for the same fields.
SAMPLING = {"seed": 5, "max_tokens": 250, "temperature": 0.8}
QUESTION = "read all lines of a file"
# Violations of the Content-Security-Policy, as the browser reports them.
REPORT = "addEventListener('securitypolicyviolation', one => console.error(`policy: ${one.violatedDirective}`));"
SETTINGS = f"sessionStorage['jaxinfer.key'] ??= '{KEY}'; localStorage['jaxinfer.settings'] ??= " + json.dumps(
    json.dumps({"sampling": SAMPLING, "isPlain": True})
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # Two requests are in the engine, one more waits: easy to fill.
    server = RealServer(tmp_path_factory.mktemp("server"), "--max-seqs", "1", "--max-queued", "1", "--lazy")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def answer(server):
    """The whole answer to QUESTION."""
    server.wait_until_ready()
    text = server.answer(QUESTION, **SAMPLING)
    assert len(text) > 400
    return text


@pytest.fixture
def opened(context, server):
    """Opens the page, with the key and SAMPLING where they are `known`. At the end no tab had an error, of its policy
    neither, or asked another host for anything."""
    problems = []

    def told(message):
        # Chromium reports failed requests too.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            problems.append(message.text)

    def open_page(known=True):
        context.add_init_script(REPORT + (SETTINGS if known else ""))
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", told)
        page.on("request", lambda sent: sent.url.startswith((server.url, "data:")) or problems.append(sent.url))
        page.goto(server.url)
        if known:
            page.wait_for_selector("#model-picker:enabled")
        return page

    yield open_page
    assert problems == []


def content(page):
    """The text of the shown answer as the page got it: innerText has other spaces."""
    return page.evaluate("state.current.messages.find(one => one.id === state.current.leaf).content")


def wait_for_text(page, length):
    """Waits until so much of an answer is there and it has not ended."""
    page.evaluate(f"""async () => {{
        const text = () => state.current.messages.find(one => one.id === state.current.leaf).content;
        while (state.jobs.size && text().length < {length}) await new Promise(done => setTimeout(done, 10));
        if (!state.jobs.size) throw new Error("the answer has ended");
    }}""")


def test_the_key_is_asked_for_and_an_answer_is_that_of_the_api(opened, answer):
    page = opened(known=False)
    page.click("#notice >> text=Enter a key")
    page.fill("#api-key", "sk-another")
    page.keyboard.press("Tab")
    page.locator("#notice", has_text="The server does not accept this API key.").wait_for()
    page.fill("#api-key", KEY)
    for name, value in SAMPLING.items():
        page.fill(f"#sampling-{name}", str(value))
    page.wait_for_selector("#model-picker:enabled")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=demo is ready.")
    ask(page, QUESTION)
    assert content(page) == answer
    assert "tokens/s" in page.inner_text(".stats")
    page.reload()
    page.wait_for_selector(ANSWERS)
    assert content(page) == answer


def test_an_answer_is_stopped_continued_and_made_again(opened, answer):
    page = opened()
    send(page, QUESTION)
    wait_for_text(page, 40)
    page.keyboard.press("Escape")
    settled(page)
    part = content(page)
    assert part != answer
    assert answer.startswith(part)
    page.click(f"{ANSWERS} [data-action=resume]")
    settled(page)
    assert content(page) == answer
    page.click(DONE)
    settled(page)
    assert content(page) == answer
    assert page.inner_text(f"{ANSWERS} .branches") == "2 / 2"


def test_an_answer_goes_on_after_the_server_was_killed(opened, server, answer):
    page = opened()
    send(page, QUESTION)
    wait_for_text(page, 40)
    server.kill()
    page.locator(".reconnecting:visible").wait_for()
    part = content(page)
    assert part != answer
    server.start()
    page.set_default_timeout(120_000)
    page.locator(".stats").wait_for()
    assert content(page) == answer
    assert len(shown(page)) == 2


def test_a_full_queue_is_told_with_the_time_to_wait(opened, server, answer):
    page = opened()
    messages = [{"role": "user", "content": QUESTION}]
    others = [server.begin(messages=messages, stream=True, **SAMPLING) for _ in range(3)]
    ask(page, "busy?")
    assert "Try again in" in page.inner_text(".failure:visible span")
    for other in others:
        other.read()
    page.click("[data-action=retry]")
    settled(page)
    assert page.locator(".failure:visible").count() == 0


def test_a_phone_shows_everything_in_its_width(opened, answer):
    page = opened()
    page.set_viewport_size(PHONE)
    ask(page, QUESTION)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("$('scroller').scrollWidth <= $('scroller').clientWidth")
    assert content(page) == answer
