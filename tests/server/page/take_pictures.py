"""Pictures of the chat page in Chromium, from `jaxinfer serve demo`: `make pictures`, or
`python -m tests.server.page.take_pictures FOLDER` for those that are only looked at, too."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from tests.server.page.conftest import PHONE, WIDE
from tests.server.page.real_server import KEY, RealServer

IN_THE_DOCS = Path(__file__).parents[3] / "docs" / "pictures" / "chat_page.png"
# The demo model knows a little Python and nothing else, and answers most seeds with less than these.
QUESTIONS = {"Connect to a server": 9, "A stack with push and pop": 17}
SETTINGS = {"isPlain": True, "sampling": {"max_tokens": 100, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1}}


def take(browser: Browser, url: str, path: Path, size: dict[str, int], scheme: str, has_settings: bool = False) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme, locale="en-US", has_touch=size == PHONE)
    context.add_init_script(
        f"sessionStorage['jaxinfer.key'] ??= '{KEY}';"
        f"localStorage['jaxinfer.settings'] ??= {json.dumps(json.dumps(SETTINGS))};"
    )
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#model-picker:enabled")
    for question, seed in QUESTIONS.items():
        page.evaluate(f"openNew(); state.settings.sampling.seed = {seed}")
        page.fill("#input", question)
        page.click("#send")  # on a phone Enter is a new line
        page.locator(".stats").wait_for(timeout=120_000)
    if has_settings:
        page.click("#open-settings")
    page.screenshot(path=path)
    context.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        server = RealServer(Path(folder), "--lazy")
        server.start()
        try:
            server.wait_until_ready()
            server.answer("Compile the programs", max_tokens=9)
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            take(browser, server.url, IN_THE_DOCS, WIDE, "light")
            for further in sys.argv[1:]:
                take(browser, server.url, Path(further) / "dark.png", WIDE, "dark")
                take(browser, server.url, Path(further) / "settings.png", WIDE, "dark", has_settings=True)
                take(browser, server.url, Path(further) / "phone.png", PHONE, "light")
            browser.close()
        finally:
            server.kill()


if __name__ == "__main__":
    main()
