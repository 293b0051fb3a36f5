"""The example quantizer through the whole engine: converted checkpoints give the tokens of the weights that they mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from enginebay import LLM, SamplingParams
from enginebay.errors import ModelError
from enginebay.plugins.local import import_local
from safetensors.torch import load_file, save_file

FILE = Path(__file__).parents[2] / "examples" / "int8_groups.py"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
PROMPTS: list[Any] = [{"prompt_token_ids": list(range(2, 2 + n))} for n in (1, 5, 16, 40)]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return import_local(str(FILE)).module


def tokens(folder: str | Path, **changes: Any) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", device="cpu", **changes) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def meant(example: ModuleType, folder: Path, group_size: int) -> dict[str, Any]:
    """The checkpoint's tensors, matrices as its sample decodes them."""
    (sample,) = (s for s in example.samples() if s.config["group_size"] == group_size)
    found: dict[str, Any] = load_file(folder / "model.safetensors")
    packed = [name.removesuffix("_packed") for name in found if name.endswith("weight_packed")]
    assert packed
    for name in packed:
        found[name] = sample.dequantize({f"weight_{key}": found.pop(f"{name}_{key}") for key in ("packed", "scale")})
    return found


@pytest.mark.parametrize("group_size", [4, 32])
def test_a_converted_checkpoint_gives_the_tokens_of_its_meaning(
    example: ModuleType, tiny_model: str, tmp_path: Path, group_size: int
) -> None:
    target, reference = tmp_path / "int8", tmp_path / "reference"
    example.main([tiny_model, str(target), "--group-size", str(group_size), "--skip", "model.layers.1.mlp"])
    shutil.copytree(tiny_model, reference)
    save_file(meant(example, target, group_size), reference / "model.safetensors", metadata={"format": "pt"})
    assert tokens(target, plugins=[str(FILE)]) == tokens(reference)


def test_what_groups_do_not_divide_stays_plain_and_is_named(
    example: ModuleType, tiny_model: str, tmp_path: Path
) -> None:
    plain = example.convert(Path(tiny_model), tmp_path, 64)
    assert plain == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]  # its rows are of 96 weights
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "int8_groups", "group_size": 64, "modules_to_not_convert": plain}
    assert len(tokens(tmp_path, plugins=[str(FILE)])) == len(PROMPTS)


def test_the_weights_stay_int8(example: ModuleType, tiny_model: str, tmp_path: Path) -> None:
    example.convert(Path(tiny_model), tmp_path, 32)
    sizes = [(Path(folder) / "model.safetensors").stat().st_size for folder in (tiny_model, tmp_path)]
    assert sizes[1] < sizes[0] * 0.4  # of float32: a quarter, and a scale for every 32 weights


def test_what_is_quantized_is_not_converted_again(example: ModuleType, tiny_model: str, tmp_path: Path) -> None:
    example.convert(Path(tiny_model), tmp_path / "once", 32)
    with pytest.raises(ModelError, match="is quantized already, as int8_groups"):
        example.convert(tmp_path / "once", tmp_path / "twice", 32)


def test_without_the_plugin_the_checkpoint_is_refused(example: ModuleType, tiny_model: str, tmp_path: Path) -> None:
    example.convert(Path(tiny_model), tmp_path, 32)
    with pytest.raises(Exception, match="quant: no installed plugin fits this run") as caught:
        tokens(tmp_path)
    assert "int8_groups" in str(caught.value)
