"""The chat page: one static file that talks to `v1/chat/completions` of the server that sends it."""

import base64
import functools
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

# An element's text between its tags, as the browser hashes it.
INLINE = r"<{tag}>(.*?)</{tag}>"


@dataclass(frozen=True)
class ChatPage:
    """The page's bytes and the HTTP headers to send with them."""

    content: bytes
    headers: dict[str, str]


def security_policy(html: str) -> str:
    """The Content-Security-Policy of a page: its own inline scripts and styles run, named by their hashes, and it talks
    to its own server; nothing else is loaded, and Trusted Types refuse HTML that is made from text."""
    scripts, styles = (_hashes(html, tag) for tag in ("script", "style"))
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {scripts}",
            f"style-src {styles}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(INLINE.format(tag=tag), html, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"


@functools.cache
def chat_page() -> ChatPage:
    """The chat page, read once; its requests are relative: serve it at `/`, or at a prefix that ends with `/`."""
    html = resources.files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": security_policy(html),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return ChatPage(html.encode(), headers)
