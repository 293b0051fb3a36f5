"""Laws of shards and weight specs: what ranks hold together is the whole, in stored elements of any unit."""

from __future__ import annotations

import pytest
import torch
from enginebay.errors import ModelError, WeightsError
from enginebay.interfaces.quant import Axis, LayerInfo, Part, QuantContext, Quantizer, Shard, WeightSpec
from enginebay.layers.weights import WeightModule
from enginebay.loading.source import RawTensor
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")
worlds = st.sampled_from([1, 2, 3, 4])
units = st.sampled_from([1, 2, 4, 8])


def layer(name: str, outs: dict[str, Shard], inner: Shard) -> LayerInfo:
    parts = tuple(Part(part, out) for part, out in outs.items())
    return LayerInfo(name=name, kind="linear", parts=parts, input=inner, dtype=torch.float32)


def share(total: int, rank: int, world: int) -> Shard:
    each = -(-total // world)
    return Shard(rank * each, (rank + 1) * each, total)


@given(world=worlds, unit=units, groups=st.integers(1, 9))
def test_refusing_shards_tile_the_whole(world: int, unit: int, groups: int) -> None:
    total = world * unit * groups
    stored = [share(total, rank, world).stored(unit) for rank in range(world)]
    assert [shard.start for shard in stored] == [rank * groups for rank in range(world)]
    assert all((shard.size, shard.filled, shard.total) == (groups, groups, world * groups) for shard in stored)


@given(world=worlds, unit=units, total=st.integers(1, 70))
def test_padded_shards_keep_every_unit_that_they_touch(world: int, unit: int, total: int) -> None:
    """C57."""
    for rank in range(world):
        shard = share(total, rank, world)
        stored = shard.stored(unit, "pad")
        touched = {weight // unit for weight in range(shard.start, min(shard.stop, total))}
        assert touched <= set(range(stored.start, stored.start + stored.filled))
        assert stored.filled <= len(touched) + 1
        assert stored.total == -(-total // unit)
        assert stored.stop * unit >= shard.stop


@given(unit=st.sampled_from([2, 4, 8]), start=st.integers(0, 40), size=st.integers(1, 40), rest=st.integers(0, 40))
def test_a_cut_unit_is_refused_exactly_when_there_is_one(unit: int, start: int, size: int, rest: int) -> None:
    """C57."""
    shard = Shard(start, start + size, start + size + rest)
    if any(edge % unit for edge in (shard.start, shard.stop, shard.total)):
        with pytest.raises(ValueError, match=f"whole units of {unit}"):
            shard.stored(unit)
    else:
        assert shard.stored(unit).size == size // unit


def test_the_refusal_names_the_layer_and_the_axis() -> None:
    """C57."""
    info = layer("model.layers.0.mlp.down_proj", {"": Shard.whole(8)}, Shard(64, 128, 256))
    spec = WeightSpec(axes=(Axis("out"), Axis("in", 128)), dtype=torch.float32)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.down_proj: .*the in axis cuts a quantization unit"):
        spec.shape(info, info.parts[0])
    padded = WeightSpec(axes=spec.axes, dtype=torch.float32, uneven="pad")
    assert padded.shape(info, info.parts[0]) == (8, 1)
    assert padded.checkpoint_shape(info, info.parts[0]) == (8, 2)


@given(world=worlds, groups=st.integers(1, 5))
def test_an_axis_that_is_not_split_is_whole_on_every_rank(world: int, groups: int) -> None:
    """C53: weights of a rank's inputs may belong to any group."""
    spec = WeightSpec(axes=(Axis("out"), Axis("in", 8, split=False)), dtype=torch.float32)
    for rank in range(world):
        info = layer("a.down_proj", {"": Shard.whole(6)}, share(8 * groups * world, rank, world))
        assert spec.shards(info, info.parts[0]) == (Shard.whole(6), Shard.whole(groups * world))


@given(
    world=worlds,
    out_unit=units,
    in_unit=units,
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    width=st.integers(1, 3),
    transposed=st.booleans(),
    split=st.sampled_from(["out", "in"]),
)
def test_ranks_filled_from_whole_tensors_hold_the_whole_together(
    world: int, out_unit: int, in_unit: int, sizes: list[int], width: int, transposed: bool, split: str
) -> None:
    """Sharding, concatenation of parts, packed units and either order of axes, all at once."""
    axes = (Axis("out", out_unit), Axis("in", in_unit))
    spec = WeightSpec(axes=axes[::-1] if transposed else axes, dtype=torch.float32)
    outs = {f"p{i}" if len(sizes) > 1 else "": size * world * out_unit for i, size in enumerate(sizes)}
    inner = width * world * in_unit
    torch.manual_seed(0)
    whole = {}
    held: dict[str, list[torch.Tensor]] = {name: [] for name in outs}
    for rank in range(world):
        shards = {n: share(o, rank, world) if split == "out" else Shard.whole(o) for n, o in outs.items()}
        info = layer("a.fused", shards, share(inner, rank, world) if split == "in" else Shard.whole(inner))
        module = WeightModule(info, CPU)
        module.add_weight("weight", spec)
        module.get_parameter("weight").data.fill_(float("nan"))
        for part, target in zip(info.parts, module.targets(), strict=True):
            if part.name not in whole:
                whole[part.name] = torch.randn(target.shape)
            assert target.shape == spec.checkpoint_shape(info, part)
            target.fill(whole[part.name])
            held[part.name].append(target.destination.clone())
        assert not module.get_parameter("weight").isnan().any()
    axis = [a.name for a in spec.axes].index(split)  # type: ignore[arg-type]
    for name, tensors in held.items():
        assert torch.equal(torch.cat(tensors, axis), whole[name])


def test_parts_are_stacked_separate_or_refused() -> None:
    info = layer("a.qkv_proj", {"q_proj": Shard.whole(4), "k_proj": Shard.whole(2)}, Shard.whole(6))
    assert info.checkpoint_names == ("a.q_proj", "a.k_proj")
    module = WeightModule(info, CPU)
    module.add_weight("scale", WeightSpec(axes=(), dtype=torch.float32, fuse="stack"))
    module.add_weight("g_idx", WeightSpec(axes=(Axis("in"),), dtype=torch.int32, fuse="separate"))
    targets = {f"{t.module}.{t.weight}": t for t in module.targets()}
    targets["a.q_proj.scale"].fill(torch.tensor([2.0]))
    targets["a.k_proj.scale"].fill(torch.tensor(3.0))
    targets["a.q_proj.g_idx"].fill(torch.arange(6))
    targets["a.k_proj.g_idx"].fill(torch.arange(6) * 2)
    assert module.get_parameter("scale").tolist() == [2.0, 3.0]
    assert module.get_parameter("g_idx_q_proj").tolist() == list(range(6))
    assert module.get_parameter("g_idx_k_proj").tolist() == list(range(0, 12, 2))
    with pytest.raises(ModelError, match="without an out axis cannot be concatenated"):
        module.add_weight("other", WeightSpec(axes=(Axis("in"),), dtype=torch.float32))
    with pytest.raises(ModelError, match="unequal shapes"):
        module.add_weight("other", WeightSpec(axes=(Axis("out"),), dtype=torch.float32, fuse="stack"))
    with pytest.raises(ModelError, match="may not be called 'info'"):
        module.add_weight("info", WeightSpec(axes=(Axis("out"),), dtype=torch.float32))


class Bare(Quantizer):
    """As little as a plugin of today implements."""

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> Bare:
        return cls()


def test_what_a_quantizer_leaves_out_has_defaults() -> None:
    """C16, C58: plain layers, and encodings refused by name."""
    quantizer = Bare.from_checkpoint(QuantContext(quantization_config={}, dtype=torch.float32))
    info = layer("a", {"": Shard.whole(2)}, Shard.whole(2))
    assert quantizer.method_for(info) is None
    with pytest.raises(WeightsError, match=r"a\.weight: Bare does not read the encoding 'gguf:Q4_0'"):
        quantizer.decode(RawTensor("a.weight", (2, 2), torch.zeros(1), "gguf:Q4_0"), torch.float32)
