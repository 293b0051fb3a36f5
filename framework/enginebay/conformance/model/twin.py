"""The transformers twin of a sample: random float32 weights, the checkpoint that it saves, and its logits.

It knows nothing of the plugin that is tried.

Shapes: ``T`` tokens of a prompt, ``V`` vocabulary.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from enginebay.conformance.model.samples import Sample, config_of
from enginebay.errors import PluginError
from enginebay.models.reference import ModelFiles, resolve_model
from enginebay.plugins.records import ModelRecord


class NotTakenError(Exception):
    """transformers itself does not take a sample's configuration, so that there is nothing to compare with."""


@dataclass(frozen=True, eq=False)
class Twin:
    """A random model of transformers, and what it saves."""

    hf: Any
    #: the tensors of its checkpoint
    tensors: Mapping[str, Tensor]
    #: the embedding's and the head's names; the head's is that of an untied one
    embedding: str
    head: str

    @torch.no_grad()
    def logits(self, ids: Sequence[int], positions: Sequence[int] | None = None) -> Tensor:
        """Logits ``[T, V]`` of a prompt, in one piece."""
        inputs = torch.tensor([list(ids)])
        at = torch.tensor([list(range(len(ids)) if positions is None else positions)])
        # without a mask, a leap in the positions would begin another sequence
        mask = torch.ones_like(inputs)
        logits: Tensor = self.hf(inputs, attention_mask=mask, position_ids=at, use_cache=False).logits
        return logits[0]

    def write(self, folder: Path, changes: Mapping[str, Tensor | None] | None = None) -> ModelFiles:
        """Its checkpoint in `folder`, with tensors added or replaced, or left out where None stands for one."""
        tensors = {**self.tensors, **(changes or {})}
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        folder.mkdir(parents=True, exist_ok=True)
        self.hf.config.save_pretrained(folder)
        save_file(kept, folder / "model.safetensors")
        return resolve_model(str(folder), offline=True)


@functools.lru_cache(maxsize=256)
def twin_of(architecture: str, config: Callable[[], Any] | None, sample: Sample) -> Twin:
    """A sample's twin, made once for all laws and plugins; arguments are those of the record that it depends on.

    Raises
    ------
    NotTakenError
        transformers refuses the configuration, or cannot run it.
    """
    record = ModelRecord(name=architecture, summary="", factory=print, api_version=0, tiny_config=config)
    try:
        made = config_of(record, sample)
        made.architectures = [architecture]
        torch.manual_seed(0)
        hf = _class_of(architecture, made)(made).eval()
    except PluginError:
        raise
    except Exception as error:
        raise NotTakenError(f"transformers does not take {sample}: {error}") from error
    for parameter in hf.parameters():
        if parameter.dim() == 1:  # biases of 0 and scales of 1 would hide whether they are read
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    twin = Twin(hf, _saved(hf), _name_of(hf, hf.get_input_embeddings()), _name_of(hf, hf.get_output_embeddings()))
    try:
        twin.logits([1, 2, 3])
    except Exception as error:
        raise NotTakenError(f"transformers cannot run {sample}: {error}") from error
    return twin


def _class_of(architecture: str, config: Any) -> Any:
    import transformers

    found = getattr(transformers, architecture, None)
    if found is None:
        found = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if found is None:
        raise PluginError(
            f"model plugin {architecture}: transformers has no model of {type(config).__name__} to compare with; register one "
            "with AutoModelForCausalLM.register in the record's tiny_config"
        )
    return found


def _saved(hf: Any) -> dict[str, Tensor]:
    """What transformers writes, read back: names and layout are a checkpoint's, which may differ from the module's."""
    with tempfile.TemporaryDirectory(prefix="enginebay-conformance-") as folder:
        hf.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def _name_of(hf: Any, module: Any) -> str:
    return next(f"{name}.weight" for name, found in hf.named_modules() if found is module)
