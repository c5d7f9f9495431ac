"""The command that installs an extra is one that works where it is read."""

import re
from pathlib import Path

from jaxinfer.extras import install_hint

ROOT = Path(__file__).parents[1]


def test_the_command_is_that_of_a_checkout_or_of_a_package(tmp_path, monkeypatch):
    assert install_hint("serve", folder=tmp_path) == "pip install 'jaxinfer[serve]'"
    assert install_hint(folder=tmp_path) == "pip install jaxinfer"
    (tmp_path / "pyproject.toml").touch()
    assert install_hint("serve", folder=tmp_path) == f"pip install -e '{tmp_path}[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_hint("serve", folder=tmp_path) == "pip install -e '.[serve]'"
    assert install_hint(folder=tmp_path) == "pip install -e ."
    odd = tmp_path / "an odd folder's name"
    odd.mkdir()
    (odd / "pyproject.toml").touch()
    assert install_hint("aot", folder=odd) == f"""pip install -e '{tmp_path}/an odd folder'"'"'s name[aot]'"""


def test_every_hint_is_made_here_and_names_an_extra_that_exists():
    """In the code of the product and of the tests, and in one form in the documents."""
    optional = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("optional-dep")[2]
    extras = set(re.findall(r"^([\w-]+) = \[", optional, re.MULTILINE))
    assert {"serve", "cpu", "aot"} <= extras
    written, named = [], []
    for top in ("jaxinfer", "pallas_kernels", "cpu_kernels", "checkpoints_convert", "tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named += re.findall(r"""install_hint\(["']([\w-]+)["']""", text)
            if path not in (Path(__file__), ROOT / "jaxinfer" / "extras.py"):
                written += [
                    f"{path}: {one}" for one in re.findall(r"pip install (?:-e )?['\"]?(?:jaxinfer|\.).*", text)
                ]
    assert written == []
    assert len(named) > 15
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    told = [
        one
        for page in documents
        for one in re.findall(r"pip install\s+(-e '\.\[.*?\]'|.*?jaxinfer\[.*)", page.read_text())
    ]
    assert len(told) > 8
    found = [re.fullmatch(r"-e '\.\[([\w,-]+)\]'", one) for one in told]
    assert [one for one, match in zip(told, found, strict=True) if match is None] == []
    assert {name for match in found if match for name in match[1].split(",")} | set(named) <= extras
