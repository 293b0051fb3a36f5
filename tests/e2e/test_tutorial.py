"""docs/plugins/tutorial.md, block by block as it is printed, where only the built package is installed.

After a fence's language stands what is done with the block: a file's name, to write it or (``diff``) to change it; ``fails``
for commands that must fail. A ``text`` block holds words that the commands before it print.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clean_venv import ROOT, CleanVenv, build_wheel

PAGE = ROOT / "docs" / "plugins" / "tutorial.md"


def blocks() -> Iterator[tuple[str, str, str]]:
    """Language, word and content of each block."""
    yield from re.findall(r"^```(\w+) ?(.*)\n((?:.*\n)*?)```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def change(file: Path, diff: str) -> None:
    """Replace the one place that reads as the diff's lines without ``+`` by those without ``-``."""
    old, new = (
        "".join(f"{line[1:]}\n" for line in diff.splitlines() if not line.startswith(sign)) for sign in ("+", "-")
    )
    text = file.read_text()
    assert text.count(old) == 1, f"{file} does not hold once:\n{old}"
    file.write_text(text.replace(old, new))


@pytest.mark.full
@pytest.mark.model
def test_the_tutorial_does_what_it_says(tmp_path: Path, smollm2: Path) -> None:
    venv = CleanVenv(tmp_path)
    wheel = build_wheel(ROOT, tmp_path / "wheel")
    venv.text("pip", "install", "-q", f"{wheel}[conformance]")
    (venv.work / "examples").symlink_to(ROOT / "examples")
    done: subprocess.CompletedProcess[str] | None = None
    for language, word, content in blocks():
        if language == "bash":
            done = venv.shell(content, venv.work)
            assert (done.returncode != 0) == (word == "fails"), content + done.stdout + done.stderr
        elif language == "text":
            assert done is not None
            for line in content.splitlines():
                assert line in done.stdout + done.stderr, done.stdout + done.stderr
        elif language == "diff":
            change(venv.work / word, content)
        else:
            assert language in ("python", "yaml")
            (venv.work / word).write_text(content)


def test_every_block_says_what_is_done_with_it() -> None:
    found = list(blocks())
    assert len(found) * 2 == PAGE.read_text(encoding="utf-8").count("```")
    assert {language for language, _, _ in found} <= {"bash", "text", "diff", "python", "yaml"}
    assert all(word in ("", "fails") if language in ("bash", "text") else word for language, word, _ in found)
