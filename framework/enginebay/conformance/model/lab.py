"""Builds models as the engine does, from files or from tensors in memory, for one rank or one of several.

It knows the factory, and neither the architecture nor what its results should be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from enginebay.conformance.model.ranks import on_ranks
from enginebay.conformance.model.running import Runner
from enginebay.interfaces.model import CausalLM, ModelContext
from enginebay.layers.build import ModelBuilder
from enginebay.layers.parallel import Communicator
from enginebay.loading.hf_config import load_hf_config
from enginebay.loading.load_model import load_weights
from enginebay.loading.open_source import open_source
from enginebay.loading.source import RawTensor, WeightSource
from enginebay.models.reference import ModelFiles

Factory = Callable[[ModelContext], CausalLM]


@dataclass
class MemorySource:
    """A checkpoint in memory."""

    tensors: Mapping[str, Tensor]

    def names(self) -> list[str]:
        """See `WeightSource.names`."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return tuple(self.tensors[name].shape)

    def load(self, name: str) -> RawTensor:
        """See `WeightSource.load`."""
        return RawTensor(name, self.shape(name), self.tensors[name])

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class ModelLab:
    """Builds models by one factory, and their transformers twins' results."""

    factory: Factory
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def build(self, config: Any, *, max_model_len: int = 64, device: str | None = None, **place: Any) -> CausalLM:
        """The network, unfilled; `place` is `ModelBuilder`'s rank, world and comm."""
        where = self.device if device is None else device
        builder = ModelBuilder(dtype=self.dtype, device=where, max_model_len=max_model_len, **place)
        return self.factory(ModelContext(config=config, build=builder))

    def load(self, config: Any, tensors: Mapping[str, Tensor], max_model_len: int = 64, **place: Any) -> CausalLM:
        """The network with the tensors of a checkpoint."""
        return self._filled(config, MemorySource(tensors), max_model_len=max_model_len, **place)

    def open(self, files: ModelFiles, *, max_model_len: int = 64, **place: Any) -> CausalLM:
        """The network with the checkpoint and the configuration of a folder, read as the engine reads them."""
        source = open_source(files)
        try:
            return self._filled(load_hf_config(files), source, max_model_len=max_model_len, **place)
        finally:
            source.close()

    def runner(self, config: Any, tensors: Mapping[str, Tensor], max_model_len: int = 64) -> Runner:
        """The same, bound to a cache."""
        return Runner(self.load(config, tensors, max_model_len=max_model_len))

    def twin(self, hf: Any, config: Any, max_model_len: int = 64) -> Runner:
        """Our model with the weights of transformers' `hf`."""
        return self.runner(config, self.saved(hf), max_model_len=max_model_len)

    def saved(self, hf: Any) -> dict[str, Tensor]:
        """What `save_pretrained` writes of a model whose tensors keep their names: tied matrices once."""
        tensors = {name: tensor.detach().clone() for name, tensor in hf.state_dict().items()}
        if hf.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        return tensors

    @torch.no_grad()
    def reference(self, hf: Any, ids: Sequence[int], offset: int = 0) -> Tensor:
        """transformers' logits ``[T, V]`` of a prompt whose positions begin at `offset`."""
        positions = torch.arange(offset, offset + len(ids))[None]
        logits: Tensor = hf(torch.tensor([list(ids)]), position_ids=positions).logits[0]
        return logits

    def ranks(
        self, config: Any, tensors: Mapping[str, Tensor], world: int, tokens: Mapping[int, Sequence[int]]
    ) -> list[Tensor]:
        """Logits of a step on each of `world` ranks."""

        def work(rank: int, comm: Communicator) -> Tensor:
            return Runner(self.load(config, tensors, rank=rank, world=world, comm=comm)).step(tokens)

        return on_ranks(world, work)

    def _filled(self, config: Any, source: WeightSource, **place: Any) -> CausalLM:
        model = self.build(config, **place)
        load_weights(model, source)
        return model.eval()
