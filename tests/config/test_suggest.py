"""Did-you-mean: each kind of wrong name has its own answer."""

from __future__ import annotations

import pytest
from enginebay.config import EngineConfig, load_config
from enginebay.config.suggest import _FLAT, _REFUSED, REMOVED_VARIABLES
from enginebay.config.tree import dotted, tree_of
from enginebay.errors import ConfigError


def complaint(*settings: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, settings, env=env or {})
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("scheduler.max_num_seq", "unknown key; did you mean scheduler.max_num_seqs?"),
        ("modl", "unknown key; did you mean model?"),
        ("max_num_seqs", "unknown key; here it is scheduler.max_num_seqs"),
        ("gpu_memory_utilization", "unknown key; here it is cache.gpu_memory_utilization"),
        ("tensor_parallel_size", "unknown key; here it is parallel.tensor"),
        ("tensor_paralel_size", "unknown key; did you mean parallel.tensor?"),
        ("quantization", "unknown key; here it is quant.method"),
        (
            "enforce_eager",
            "unknown key; here it is graphs.decode_sizes (empty, its default, runs decode steps eagerly)",
        ),
        ("trust_remote_code", "unknown key; code in a checkpoint is never run; install a model plugin"),
        ("trust_remote_cod", "unknown key; if trust_remote_code was meant: code in a checkpoint is never run"),
        ("backend", "unknown key; here it is attention.backend or executor.backend"),
        ("scheduler.dtype", "unknown key; here it is dtype or cache.dtype"),
        ("parallel.zzz", "unknown key; known keys: tensor, pipeline"),
        ("model.zzz", "expected a text, got {"),
        ("attention.backend.decod", "unknown key; did you mean attention.backend.decode?"),
        ("attention.backend.groups.slidng", "unknown key; did you mean attention.backend.groups.sliding?"),
        ("attention.backend.groups.full.decod", "unknown key; did you mean attention.backend.groups.full.decode?"),
        ("attention.backend.sliding", "unknown key; here it is attention.backend.groups.sliding"),
        ("quant.methd", "unknown key; did you mean quant.method?"),
    ],
)
def test_c5_unknown_keys(key: str, answer: str) -> None:
    """C5: a misspelt or foreign key is an error with a suggestion."""
    assert answer in complaint(f"{key}=1")


def test_flat_names_of_other_engines_lead_to_paths_that_exist() -> None:
    tree = tree_of(EngineConfig)
    for name, place in _FLAT.items():
        assert tree.at(tuple(place.split()[0].split("."))), name
        assert not tree.at((name,)), name
    assert not [name for name in _REFUSED if tree.at((name,))]


@pytest.mark.parametrize("name", REMOVED_VARIABLES)
def test_c4_removed_variables_name_their_replacement(name: str) -> None:
    """C4: a retired variable is an error that says what replaced it."""
    text = complaint(env={name: "x"})
    assert text == f"{name}: not an environment variable of enginebay: {REMOVED_VARIABLES[name]}"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("ENGINEBAY_SCHEDULER__MAX_NUM_SEQ", "did you mean ENGINEBAY_SCHEDULER__MAX_NUM_SEQS?"),
        ("ENGINEBAY_MAX_NUM_SEQS", "here it is ENGINEBAY_SCHEDULER__MAX_NUM_SEQS"),
        ("ENGINEBAY_TENSOR_PARALLEL_SIZE", "here it is ENGINEBAY_PARALLEL__TENSOR"),
        ("ENGINEBAY_POLICY", "see scheduler.policy, in the YAML file or with --set"),
        ("ENGINEBAY_DISABLE_PLUGIN", "did you mean ENGINEBAY_DISABLE_PLUGINS?"),
        ("ENGINEBAY_dtype", "did you mean ENGINEBAY_DTYPE?"),
        ("ENGINEBAY_PARALLEL", "set one key: ENGINEBAY_PARALLEL__TENSOR, ENGINEBAY_PARALLEL__PIPELINE"),
        ("ENGINEBAY_XYZZY", "they are named ENGINEBAY_<SECTION>__<KEY>"),
    ],
)
def test_c4_unknown_variables(name: str, answer: str) -> None:
    """C4: an unknown ENGINEBAY_* variable is never ignored."""
    text = complaint(env={name: "1"})
    assert text.startswith(f"{name}: ")
    assert answer in text


@pytest.mark.parametrize(
    "path",
    [
        "attention.backend",
        "attention.backend.decode",
        "attention.backend.groups.sliding",
        "executor.backend",
        "scheduler.policy",
        "quant",
        "quant.method",
        "plugins",
    ],
)
def test_no_environment_variable_selects_a_part(path: str) -> None:
    assert path in {dotted(p) for p in tree_of(EngineConfig).leaves()}
    name = "ENGINEBAY_" + path.replace(".", "__").upper()
    assert complaint(env={name: "x"}) == (
        f"{name}: no environment variable selects a backend, policy, method or plugin file; "
        f"set {path} in the YAML file, or with --set {path}=…"
    )
