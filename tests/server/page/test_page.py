"""The file of the chat page, without a browser."""

import base64
import hashlib
import html.parser
import re

from jaxinfer.server.page import chat_page, security_policy

PAGE = chat_page()
HTML = PAGE.content.decode()
POLICY = dict(part.split(" ", 1) for part in PAGE.headers["Content-Security-Policy"].split("; "))
# Names a namespace, and is never fetched.
SVG = "http://www.w3.org/2000/svg"


class Elements(html.parser.HTMLParser):
    """Elements with their attributes, and the text of each script and style."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.open = ""

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open = tag

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open in self.texts:
            self.texts[self.open].append(data)


ELEMENTS = Elements()
ELEMENTS.feed(HTML)


def test_the_page_is_small():
    assert len(PAGE.content) < 100_000


def test_nothing_is_requested_from_elsewhere():
    assert set(re.findall(r"https?://[\w.]+[^\s'\"]*", HTML)) == {SVG}
    loading = {"src", "srcset", "poster", "action", "formaction", "background"}
    assert [(tag, name) for tag, attributes in ELEMENTS.found for name in attributes.keys() & loading] == []
    assert {tag for tag, _ in ELEMENTS.found} & {"iframe", "object", "embed", "base", "img", "audio", "video"} == set()
    addresses = {attributes["href"] for tag, attributes in ELEMENTS.found if attributes.get("href")}
    assert all(address.startswith(("#", "data:image/svg+xml,")) for address in addresses)


def test_attributes_hold_no_scripts_and_no_styles():
    """The policy refuses them, so that they would do nothing."""
    names = {name for _, attributes in ELEMENTS.found for name in attributes}
    assert [name for name in names if name.startswith("on") or name == "style"] == []
    assert "javascript:" not in HTML


def test_the_policy_has_the_hash_of_each_script_and_style():
    for tag in ("script", "style"):
        assert ELEMENTS.texts[tag]
        digests = [hashlib.sha256(text.encode()).digest() for text in ELEMENTS.texts[tag]]
        hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert POLICY[f"{tag}-src"].split() == hashes
    assert security_policy("<p>").startswith("default-src 'none'; script-src 'none'; style-src 'none';")
    assert security_policy("<script>1</script>") != security_policy("<script>2</script>")


def test_the_policy_allows_the_own_server_and_no_html_from_text():
    assert POLICY["default-src"] == "'none'"
    assert POLICY["connect-src"] == "'self'"
    assert POLICY["require-trusted-types-for"] == "'script'"
    assert POLICY["trusted-types"] == "'none'"
    assert "unsafe" not in PAGE.headers["Content-Security-Policy"]
    assert PAGE.headers["X-Content-Type-Options"] == "nosniff"


def test_the_script_makes_no_html_of_text():
    (script,) = (text for text in ELEMENTS.texts["script"] if "function" in text)
    code = re.sub(r"^\s*//.*$", "", script, flags=re.MULTILINE)
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser|setHTML"
    assert re.findall(sinks, code) == []
    assert re.findall(sinks, "node.innerHTML = text")


def test_each_field_and_button_has_a_name():
    """A label, an aria-label, or text of its own; the script names those that it makes."""
    labelled = {attributes.get("for") for tag, attributes in ELEMENTS.found if tag == "label"}
    for tag, attributes in ELEMENTS.found:
        if tag in ("input", "textarea", "select"):
            assert attributes.get("aria-label") or attributes.get("id") in labelled, attributes
    for element_id in re.findall(r"\$\(\"([\w-]+)\"\)", HTML):
        assert f'id="{element_id}"' in HTML, element_id
