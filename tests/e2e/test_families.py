"""Every family with windows through the whole engine: greedy float32 tokens of random models equal transformers'.

Qwen3 has its own file (`test_two_groups`), which also shows that such a reference depends on the windows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from enginebay import LLM, SamplingParams
from tokenizers import Tokenizer, models

VOCAB = 128
MAX_TOKENS = 40
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    # The default of 0.02 hardly lets attention speak: tokens would be right whatever a window hides.
    "initializer_range": 0.3,
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"layer_types": MIXED, "query_pre_attn_scalar": 16},
    ),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": True, "layer_types": MIXED},
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {}),
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "plain": {"max_num_seqs": 8, "chunked_prefill": False, "max_num_batched_tokens": 256},
    # 24 is neither a block nor a window, so chunks end inside of both
    "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
}


def prompts() -> list[list[int]]:
    """Lengths around the window and the block (16 tokens), and far beyond both."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 7, 8, 9, 15, 16, 17, 33, 64, 150)]


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A model's folder as transformers saves it, and transformers' continuations of the prompts."""
    config_class, model_class, changes = FAMILIES[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**(COMMON | changes))).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # transformers starts biases and scales where they cannot be seen
            parameter.data.add_(torch.randn(parameter.shape) * (0.2 if "norm" in name else 0.5))
    path: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path, safe_serialization=True)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0").save_pretrained(path)
    return str(path), [greedy(model, prompt) for prompt in prompts()]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """A continuation by transformers that no token ends."""
    model.generation_config.eos_token_id = None
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
    result = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False)
    found: list[int] = result[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_tokens_equal_transformers(saved: tuple[str, list[list[int]]], scheduler: dict[str, Any]) -> None:
    folder, expected = saved
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(model=folder, load_format="safetensors", dtype="float32", device="cpu", scheduler=scheduler) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params)
    assert [list(result.outputs[0].token_ids) for result in results] == expected
