"""docs/plugins/contract.md and the checks that hold the tree to it say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_a_plugin_may_import_is_what_the_trees_own_may() -> None:
    tree = ast.parse((ROOT / "tests" / "test_imports.py").read_text(encoding="utf-8"))
    (held,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPEN_TO_PLUGINS"
    )
    page = (ROOT / "docs" / "plugins" / "contract.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\* `(enginebay[\w.]*)`", page[page.index("## What is private") :], re.MULTILINE)
    # the package's own names need no rule, and the suite is for tests
    assert set(listed) - {"enginebay", "enginebay.conformance"} == set(held)
