"""Fixtures that build a model beside its transformers twin, and the laws of its family that the suite does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from enginebay.conformance.model.lab import Factory, ModelLab


class FamilyLab(ModelLab):
    """Compares twins."""

    def check_logits(self, hf: Any, config: Any, ids: list[int], offset: int, max_model_len: int = 8300) -> None:
        """Logits equal transformers' from position `offset` on."""
        ours = self.twin(hf, config, max_model_len=max_model_len).step({0: ids}, offset)
        torch.testing.assert_close(ours, self.reference(hf, ids, offset), rtol=1e-4, atol=1e-4)

    def check_greedy(self, hf: Any, config: Any, ids: list[int], *, beside: bool) -> None:
        """The prompt in two chunks, then one token a step, once `beside` another row's prefill: transformers' tokens."""
        runner = self.twin(hf, config)
        runner.step({1: ids[:4]})
        logits, tokens = runner.step({1: ids[4:]}), list(ids)
        for step in range(12):
            tokens.append(int(logits[0 if beside and step == 1 else -1].argmax()))
            logits = runner.step({1: tokens[-1:]} | ({0: ids[::-1]} if beside and step == 0 else {}))
        want = hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
        assert tokens == want[0].tolist()

    def check_ranks(self, hf: Any, config: Any, ids: list[int], world: int) -> None:
        """Each of `world` ranks has the whole model's logits."""
        ranks = self.ranks(config, self.saved(hf), world, {0: ids})
        assert len(ranks) == world
        for logits in ranks:
            torch.testing.assert_close(logits, self.reference(hf, ids), rtol=1e-4, atol=1e-4)

    def check_pipeline_cut(self, hf: Any, config: Any, ids: list[int], cut: int) -> None:
        """Layers before and from `cut` on, one after the other, give the whole model's logits."""
        runner = self.twin(hf, config)
        runner.step({0: ids})  # sets the batch; the cut below rewrites the same slots
        model, batch = runner.model, runner.runtimes[0].batch
        assert batch is not None
        with torch.no_grad():
            hidden, residual = model.forward_layers(model.embed(batch.input_ids), None, batch.positions, 0, cut)
            hidden, residual = model.forward_layers(hidden, residual, batch.positions, cut, len(model.layers))
            got = model.compute_logits(model.final_norm(hidden, residual))
        torch.testing.assert_close(got, self.reference(hf, ids), rtol=1e-4, atol=1e-4)


@pytest.fixture
def model_lab() -> Callable[[Factory], FamilyLab]:
    """`FamilyLab` of a model factory."""
    return FamilyLab
