"""Pages of the site that are written elsewhere: the README, notebooks, model card, command help, API reference.

A hook of mkdocs (see mkdocs.yml). Nothing is executed: pictures are those that the notebooks hold.
"""

import ast
import base64
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import typer
from mkdocs.structure.files import File, Files
from typer.cli import MARKUP_MODE_KEY, get_docs_for_click

ROOT = Path(__file__).parent.parent
DATA = "jaxinfer/data/demo"
# Files outside of docs/ that are pages, by where they lie.
PAGES = {
    "README.md": "index.md",
    "jaxinfer/README.md": "reading_the_code.md",
    "CHANGELOG.md": "changelog.md",
    f"{DATA}/MODEL_CARD.md": "model_card.md",
}
# Each page has the public names (`__all__`) of these packages, or the names given.
API: dict[str, dict[str, tuple[str, ...]]] = {
    "jaxinfer": {"jaxinfer": ()},
    "models": {"jaxinfer.models": ()},
    "sampling": {"jaxinfer.sampling": ()},
    "engine": {"jaxinfer.engine.events": ("Dispatch", "SlotWork", "Snapshot", "Running")},
    "profiling": {"jaxinfer.measure.profiling.run": ("profile",), "jaxinfer.measure.profiling.phases": ("Workload",)},
    "text": {"jaxinfer.text": ()},
    "batch": {"jaxinfer.batch": ()},
    "fleet": {"jaxinfer.fleet.pool": ("RayPool", "RayDataGenerator")},
    "speculative": {"jaxinfer.speculative": ()},
    "quantization": {"jaxinfer.quantization": ()},
    "calibration": {"jaxinfer.calibration": ()},
    "cache": {"jaxinfer.cache": ()},
    "parallel": {"jaxinfer.parallel": ()},
    "planning": {"jaxinfer.planning": ()},
    "training": {
        "jaxinfer.training.loop": ("TrainOptions", "train"),
        "jaxinfer.training.objectives": ("next_token", "distillation", "sequence_logits"),
        "jaxinfer.training.distill": ("DistillOptions", "Documents", "distill", "draft_config", "projected_draft"),
    },
    "pallas_kernels": {
        "pallas_kernels": (),
        "pallas_kernels.flash_attention": ("explain", "KernelChoice"),
        "pallas_kernels.paged_attention": ("choose", "make_schedule", "PageShape"),
    },
    "checkpoints_convert": {"checkpoints_convert": ()},
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages; called by mkdocs."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Where each page or picture goes, below docs/, and what it holds."""
    for source, page in PAGES.items():
        yield page, page_links((ROOT / source).read_text(encoding="utf-8"), ROOT / source, page)
    yield "loss.png", (ROOT / DATA / "loss.png").read_bytes()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        yield from notebook_pages(path)
    yield "command_line.md", command_line()
    for name, packages in API.items():
        yield f"api/{name}.md", api_page(name, packages)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from a page of docs/ to other files of the repository become links to their pages; called by mkdocs."""
    if page.file.generated_by is not None:
        return markdown
    return page_links(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def page_links(text: str, source: Path, page: str) -> str:
    """A document's text, its links to files of the repository made links from `page` to other pages."""

    def page_link(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        place = (source.parent / target).resolve().relative_to(ROOT).as_posix()
        place = PAGES.get(place, place).removeprefix("docs/")
        if place.startswith("notebooks/"):
            place = place.replace(".ipynb", ".md")
        if place == f"{DATA}/loss.png":
            place = "loss.png"
        place = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"]({place}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", page_link, text)


def notebook_pages(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """A notebook as a page, and its pictures beside it."""
    parts, count = [], 0
    for cell in nbformat.read(path, as_version=4).cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            count += 1
            name = f"{path.stem}_{count}.png"
            yield f"notebooks/{name}", base64.b64decode(output["data"]["image/png"])
            parts.append(f"![picture {count}]({name})")
    yield f"notebooks/{path.stem}.md", "\n\n".join(parts) + "\n"


def command_line() -> str:
    """The help of every command, by typer's own writer of documentation."""
    from jaxinfer.cli.main import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="jaxinfer", obj={MARKUP_MODE_KEY: "rich"})
    text = get_docs_for_click(obj=command, ctx=context, name="jaxinfer", title="Command line")
    return re.sub(r"\[/?bold\]", "**", text)


def api_page(title: str, packages: dict[str, tuple[str, ...]]) -> str:
    """Directives for mkdocstrings, one for each public name."""
    first = next(iter(packages))
    lines = [f"# {first if first.endswith(title) else f'jaxinfer.{title}'}", ""]
    for package, chosen in packages.items():
        if len(packages) > 1:
            lines += [f"## {package}", ""]
        doc, exported = exports(package)
        lines += [doc, ""]
        for name in chosen or exported:
            level = "\n    options:\n      heading_level: 3" if len(packages) > 1 else ""
            lines += [f"::: {package}.{name}{level}", ""]
    return "\n".join(lines)


def exports(package: str) -> tuple[str, list[str]]:
    """A module's docstring and `__all__`, read without importing it."""
    path = ROOT / package.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.get_docstring(tree) or "", ast.literal_eval(node.value)
    return ast.get_docstring(tree) or "", []
