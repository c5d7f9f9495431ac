"""The room stays pure Python: no JAX, and nothing that only tests may use."""

import ast
from pathlib import Path

import jaxinfer.text


def test_what_the_room_imports():
    for path in Path(jaxinfer.text.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert not top.startswith(("jax", "torch", "transformers", "flax", "numpy")) or name.startswith(
                    ("jaxinfer.text", "jaxinfer.kept_files")
                ), f"{path.name} imports {name}"
