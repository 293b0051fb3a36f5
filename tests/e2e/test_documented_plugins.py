"""The complete plugins of the authors' pages, run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError

DOCS = Path(__file__).parents[2] / "docs" / "plugins"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS: list[Any] = [{"prompt_token_ids": list(range(2, 2 + n))} for n in (1, 5, 16, 40)]


def printed(page: str, name: str, folder: Path) -> str:
    """Write the page's first code block after the mention of `name` to a file of that name."""
    text = (DOCS / page).read_text()
    code = re.search(r"```python\n(.*?)```", text[text.index(f"`{name}`") :], re.DOTALL)
    assert code is not None
    file = folder / name
    file.write_text(code[1])
    return str(file)


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain(tiny_model: str) -> list[list[int]]:
    with LLM(tiny_model, dtype="float32") as llm:
        return tokens(llm)


def test_an_attention_backend_by_plugin_changes_no_token(
    tiny_model: str, plain: list[list[int]], tmp_path: Path
) -> None:
    file = printed("attention.md", "row_by_row.py", tmp_path)
    with LLM(tiny_model, dtype="float32", plugins=[file], attention={"backend": "row_by_row"}) as llm:
        assert tokens(llm) == plain


def test_attention_backends_by_phase_and_group_as_printed(
    tiny_model: str, plain: list[list[int]], tmp_path: Path
) -> None:
    file = printed("attention.md", "row_by_row.py", tmp_path)
    text = re.search(r"```yaml\n(.*?)```", (DOCS / "attention.md").read_text(), re.DOTALL)
    assert text is not None
    with LLM(tiny_model, dtype="float32", plugins=[file], **yaml.safe_load(text[1])) as llm:
        chosen = {s.bay: s.chosen.name for s in llm.info.selections if s.kind == "attention" and s.chosen}
        assert chosen == {"attention.decode": "row_by_row", "attention.prefill": "torch"}
        assert tokens(llm) == plain


@pytest.mark.parametrize("name", ["shortest_first", "one_at_a_time"])
def test_a_scheduler_by_plugin_changes_no_token(
    tiny_model: str, plain: list[list[int]], tmp_path: Path, name: str
) -> None:
    """C14: a scheduler that keeps no second step in flight switches that off, and the report says who did."""
    file = printed("scheduler.md", f"{name}.py", tmp_path)
    with LLM(tiny_model, dtype="float32", plugins=[file], scheduler={"policy": name}) as llm:
        assert tokens(llm) == plain
        assert tokens(llm) == plain  # now the prefix cache is warm
        off = [off for selection in llm.info.selections for off in selection.switched_off]
        assert [o.feature for o in off] == (["asynchronous scheduling"] if name == "one_at_a_time" else [])
        with llm.stream(PROMPTS[3], GREEDY) as stream:
            next(stream)
        assert tokens(llm) == plain
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks


def test_a_logits_processor_by_plugin_serves_who_asks(tiny_model: str, plain: list[list[int]], tmp_path: Path) -> None:
    file = printed("logits_processor.md", "only_even.py", tmp_path)
    even = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
        extra_args={"only_even": {"enabled": True}},
    )
    with LLM(tiny_model, dtype="float32", plugins=[file], sampler={"processors": ["only_even"]}) as llm:
        assert tokens(llm) == plain
        changed = tokens(llm, even)
        assert all(token % 2 == 0 for answer in changed for token in answer)
        both = llm.generate([PROMPTS[1], PROMPTS[1]], [GREEDY, even])
        assert [o.outputs[0].token_ids for o in both] == [plain[1], changed[1]]
        with pytest.raises(RequestError, match="only_even"):
            llm.generate(PROMPTS[0], SamplingParams(extra_args={"only_even": {"enabeld": True}}))
        with pytest.raises(RequestError, match="only_evn"):
            llm.generate(PROMPTS[0], SamplingParams(extra_args={"only_evn": {"enabled": True}}))
        assert tokens(llm) == plain
