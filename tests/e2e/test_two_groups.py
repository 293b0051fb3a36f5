"""A model with two attention groups, through the whole engine: a random Qwen3 whose layers alternate a sliding window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay import LLM, SamplingParams
from enginebay.errors import ResolutionError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 128
WINDOW = 8
#: beyond the headroom that admission leaves (32), so that a small pool must preempt
MAX_TOKENS = 72
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
SCHEDULERS: dict[str, dict[str, Any]] = {
    "async": {"max_num_seqs": 8},
    "sync": {"max_num_seqs": 8, "async_scheduling": False},
    # 24 is neither a block nor a window, so chunks end inside of both
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
    "one seat": {"max_num_seqs": 1},
}


def prompts() -> list[list[int]]:
    """Lengths around the window and the block (16 tokens), and far beyond both."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 7, 8, 9, 15, 16, 17, 33, 64, 150)]


def network() -> Any:
    """The model by transformers, float32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
        # The default of 0.02 hardly lets attention speak: tokens would be right whatever a window hides.
        initializer_range=0.3,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """A continuation by transformers that no token ends."""
    model.generation_config.eos_token_id = None
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
    )
    found: list[int] = result[0, len(prompt) :].tolist()
    assert len(found) == MAX_TOKENS
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model as transformers saves it, with a tokenizer that is only there to be loaded."""
    path: Path = tmp_path_factory.mktemp("qwen3")
    network().save_pretrained(path, safe_serialization=True)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    model = network()
    return [greedy(model, prompt) for prompt in prompts()]


def answers(llm: LLM) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], PARAMS)
    return [list(result.outputs[0].token_ids) for result in results]


def test_the_reference_needs_both_the_windows_and_the_full_layers(expected: list[list[int]]) -> None:
    """Otherwise equality with it would not prove that each group reads its own blocks and mask."""
    model = network()
    long = prompts()[-1]
    for kind in ("full_attention", "sliding_attention"):
        other = network()
        other.config.layer_types = [kind] * 4
        flat = Qwen3ForCausalLM(other.config).eval()
        flat.load_state_dict(model.state_dict())
        assert greedy(flat, long) != expected[-1]


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_tokens_equal_transformers(folder: str, expected: list[list[int]], scheduler: dict[str, Any]) -> None:
    with LLM(model=folder, load_format="safetensors", dtype="float32", device="cpu", scheduler=scheduler) as llm:
        assert answers(llm) == expected
        stats = llm._client._core.stats()  # type: ignore[attr-defined]
        assert stats.num_free_blocks == stats.num_blocks


def test_preemption_changes_no_token(folder: str, expected: list[list[int]]) -> None:
    # The longest request (222 tokens) takes 14 blocks in each of the two groups; 30 seat it and hardly another.
    with LLM(
        model=folder,
        load_format="safetensors",
        dtype="float32",
        device="cpu",
        max_model_len=224,
        scheduler={"max_num_seqs": 8},
        cache={"num_blocks": 30},
    ) as llm:
        assert answers(llm) == expected
        stats = llm._client._core.stats()  # type: ignore[attr-defined]
        assert stats.num_preemptions > 0
        assert stats.num_free_blocks == stats.num_blocks == 30


#: torch's attention under two names, each of which serves one group only, and a backend whose layout nobody else reads
BACKENDS = """
from dataclasses import replace

from enginebay import hookimpl
from enginebay.plugins.records import KVLayout
from enginebay_torch_attention import RECORD


def for_group(group):
    def make(context):
        assert context.spec.cache_kind == group
        return RECORD.factory(context)

    return make


@hookimpl
def enginebay_attention_backends():
    exotic = KVLayout("exotic", ("kv", "blocks", "kv_heads", "block", "head_dim"))
    return [
        replace(RECORD, name="windows", factory=for_group("sliding"), priority=-1),
        replace(RECORD, name="whole", factory=for_group("full"), window=False, priority=-1),
        replace(RECORD, name="exotic", layouts=(exotic,), priority=-1),
    ]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    file = tmp_path / "by_group.py"
    file.write_text(BACKENDS)
    return str(file)


@pytest.mark.parametrize(
    ("backend", "bays"),
    [
        (
            {"decode": "whole", "prefill": "whole", "groups": {"sliding": "windows"}},
            {"attention.full": "whole", "attention.sliding": "windows"},
        ),
        ({"groups": {"sliding": "windows"}}, {"attention.full": "torch", "attention.sliding": "windows"}),
        (
            {"groups": {"sliding": {"decode": "windows"}}},
            {"attention.full.decode": "torch", "attention.sliding.decode": "windows", "attention.prefill": "torch"},
        ),
        ({"groups": {"sliding": "torch", "full": "torch"}}, {"attention": "torch"}),
    ],
)
def test_another_backend_for_one_group_changes_no_token(
    folder: str, expected: list[list[int]], plugin: str, backend: dict[str, Any], bays: dict[str, str]
) -> None:
    with LLM(
        model=folder,
        load_format="safetensors",
        dtype="float32",
        device="cpu",
        plugins=[plugin],
        attention={"backend": backend},
        scheduler={"max_num_seqs": 8},
    ) as llm:
        chosen = {s.bay: s.chosen.name for s in llm.info.selections if s.kind == "attention" and s.chosen}
        assert chosen == bays
        assert answers(llm) == expected


def test_a_backend_of_one_group_is_refused_for_the_other(folder: str, plugin: str) -> None:
    """C17: before weights are read, with the number and with what would do."""
    with pytest.raises(ResolutionError, match=rf"(?s)whole \(.*window: wanted sliding window {WINDOW}.*fitting: torch"):
        LLM(model=folder, dtype="float32", device="cpu", plugins=[plugin], attention={"backend": "whole"})


def test_groups_that_cannot_share_the_cache_are_refused(folder: str, plugin: str) -> None:
    backend = {"decode": "torch", "prefill": "torch", "groups": {"sliding": "exotic"}}
    with pytest.raises(ResolutionError) as caught:
        LLM(model=folder, dtype="float32", device="cpu", plugins=[plugin], attention={"backend": backend})
    text = str(caught.value)
    assert "  attention.full: torch: NHD, HND\n  attention.sliding: exotic: exotic\n" in text
    assert "attention.full (torch) cannot share with attention.sliding (exotic)" in text
    assert "\n  attention.backend.groups.full: exotic\n" in text
    assert "\n  attention.backend.groups.sliding: torch or windows\n" in text
