"""docs/serving.md names every route and every option."""

import dataclasses
import re
from pathlib import Path

from jaxinfer.options import describe
from jaxinfer.server.app import make_app
from jaxinfer.server.options import ServerOptions
from tests.server.services import service_of

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_every_route_is_described():
    guard = make_app(service_of())
    routes = {path.replace("{id:path}", "{id}") for path in guard._routes}
    table = PAGE.partition("## Routes")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert routes == set(re.findall(r"[` ](/[^`]*)`", table))


def test_every_option_is_described():
    flags = {
        flag
        for name, about in describe(ServerOptions).items()
        for flag in (about.flags or (f"--{name.replace('_', '-')}",))
    }
    assert len(flags) >= len(dataclasses.fields(ServerOptions)) > 10
    assert {flag for flag in flags if f"`{flag}" not in PAGE} == set()
