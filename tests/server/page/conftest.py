"""A browser for the tests of the chat page, and a page in it that talks to a fake server."""

import shutil

import pytest

from tests.server.page import fake_server

WIDE, PHONE = {"width": 1180, "height": 820}, {"width": 390, "height": 844}


@pytest.fixture(scope="session")
def browser():
    """Chromium, without a window. Skips where it or its driver is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="browser: needs jaxinfer[browser] (make test-browser)"
    )
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("browser: no chromium is installed")
    with playwright.sync_playwright() as driver:
        # A sandbox needs rights that a container does not have.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server():
    with fake_server.running() as server:
        yield server


@pytest.fixture
def context(browser):
    """A browser profile of its own: storage starts empty."""
    context = browser.new_context(viewport=WIDE, accept_downloads=True, locale="en-US")
    context.set_default_timeout(10_000)
    yield context
    context.close()


@pytest.fixture
def opened(context, server):
    """Opens the page in a new tab. At the end no tab had an error or asked another host for anything."""
    problems, own = [], (server.url, "data:", "blob:")

    def open_page(fragment="", is_ready=True):
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda sent: sent.url.startswith(own) or problems.append(sent.url))
        page.goto(server.url + fragment)
        if is_ready:
            page.wait_for_selector("#model-picker:enabled")
        return page

    yield open_page
    assert problems == []


@pytest.fixture
def page(opened):
    return opened()
