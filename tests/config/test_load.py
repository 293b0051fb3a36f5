"""`load_config`: precedence, provenance, and all faults at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from enginebay.config import EngineConfig, LoadedConfig, PhaseBackends, Source, load_config
from enginebay.config.tree import dotted, tree_of
from enginebay.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel


def booleans() -> list[str]:
    """Dotted paths of every boolean of the tree, from the schema."""
    tree = tree_of(EngineConfig)
    return [dotted(p) for p in tree.leaves() if any(node.get("type") == "boolean" for node in tree.at(p))]


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def value_at(config: BaseModel, path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        node = getattr(node, key)
    return node


def variable(path: str) -> str:
    return "ENGINEBAY_" + path.replace(".", "__").upper()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_by(source: str, path: str, value: bool) -> LoadedConfig:
    """Give one boolean through one source, over the opposite in every weaker one where both are accepted."""
    text = str(value).lower()
    Path("engine.yaml").write_text(yaml.safe_dump(nested(path, value if source == "yaml" else not value)))
    file = "engine.yaml"
    if source == "env":
        return load_config(file, env={variable(path): text})
    if source == "cli":
        return load_config(file, [f"{path}={text}"], env={})
    if source == "python":
        return load_config(file, nested(path, value), env={})
    return load_config(file, env={})


def test_the_tree_has_booleans_to_test() -> None:
    assert booleans() == ["scheduler.chunked_prefill", "scheduler.async_scheduling", "cache.prefix_caching"]


@pytest.mark.parametrize("source", ["yaml", "env", "cli", "python"])
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("path", booleans())
def test_c1_every_boolean_makes_the_round_trip(folder: Path, path: str, value: bool, source: str) -> None:
    """C1, C3: a false is a false from every source, also over a true below it."""
    loaded = load_by(source, path, value)
    assert value_at(loaded.config, path) is value
    assert loaded.sources[path].kind == source


@pytest.mark.parametrize("path", booleans())
@pytest.mark.parametrize("text", ['"false"', "0", "null"])
def test_c1_what_only_looks_like_a_boolean_is_an_error(folder: Path, path: str, text: str) -> None:
    Path("engine.yaml").write_text(f"{path.split('.')[0]}:\n  {path.split('.')[1]}: {text}\n")
    with pytest.raises(ConfigError, match=rf"{path} \(engine\.yaml:2\): expected true or false, got"):
        load_config("engine.yaml", env={})


SEQS = st.one_of(st.none(), st.integers(1, 9))


@given(file=SEQS, env=SEQS, cli=SEQS, python=st.booleans())
def test_c2_precedence(
    tmp_path_factory: pytest.TempPathFactory, file: int | None, env: int | None, cli: int | None, python: bool
) -> None:
    """C2: command line or Python > environment > file > default, for every subset of them, and the source is kept."""
    path, kind = "scheduler.max_num_seqs", "python" if python else "cli"
    yaml_file = tmp_path_factory.getbasetemp() / "precedence.yaml"
    yaml_file.write_text("seed: 1\n" if file is None else f"scheduler: {{max_num_seqs: {file}}}\n")
    overrides: Any = nested(path, cli) if python else [] if cli is None else [f"{path}={cli}"]
    loaded = load_config(yaml_file, overrides, {} if env is None else {variable(path): str(env)})
    value, source = next((v, s) for v, s in ((cli, kind), (env, "env"), (file, "yaml"), (256, "default")) if v)
    assert (loaded.config.scheduler.max_num_seqs, loaded.sources[path].kind) == (value, source)


def test_every_leaf_has_a_source(folder: Path) -> None:
    Path("engine.yaml").write_text("attention:\n  backend: {decode: torch}\n  options: {a: {b: 1}}\n")
    loaded = load_config("engine.yaml", ["seed=3"], {"ENGINEBAY_DTYPE": "float32"})
    given_ones = {path: source for path, source in loaded.sources.items() if source.kind != "default"}
    assert given_ones == {
        "dtype": Source("env", "ENGINEBAY_DTYPE"),
        "seed": Source("cli", "--set seed=3"),
        "attention.backend.decode": Source("yaml", "engine.yaml:2"),
        "attention.options.a.b": Source("yaml", "engine.yaml:3"),
    }
    assert {"attention.backend.prefill", "executor.options", "quant", "graphs.decode_sizes"} <= loaded.sources.keys()


def test_source_of_a_path_below_or_above_a_leaf() -> None:
    loaded = load_config(None, ["attention.backend=torch"], {})
    assert loaded.source("attention.backend.decode").kind == loaded.source("attention.backend").kind == "cli"
    assert loaded.where("attention.backend.decode") == "--set attention.backend=torch"
    assert loaded.source("nope.x") == Source("default")


def test_one_phase_on_the_command_line_keeps_the_files_backend_for_the_other(folder: Path) -> None:
    Path("engine.yaml").write_text("attention: {backend: torch}\n")
    loaded = load_config("engine.yaml", ["attention.backend.decode=flashinfer"], {})
    assert loaded.config.attention.backend == PhaseBackends(prefill="torch", decode="flashinfer")
    assert loaded.where("attention.backend.prefill") == "engine.yaml:1"


def test_all_faults_of_one_load_are_reported_together(folder: Path) -> None:
    Path("engine.yaml").write_text("dtype: fp16\nscheduler:\n  max_num_seq: 8\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError) as error:
        load_config("engine.yaml", ["device=tpu", "x"], {"ENGINEBAY_DTYP": "auto"})
    lines = str(error.value).split("\n  ")
    assert lines[0] == "6 errors in the configuration:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "seed (engine.yaml",
        "ENGINEBAY_DTYP",
        "--set x",
        "dtype (engine.yaml",
        "device (--set device=tpu)",
        "scheduler.max_num_seq (engine.yaml",
    ]
    assert "scheduler.max_num_seq (engine.yaml:3): unknown key; did you mean scheduler.max_num_seqs?" in lines


def test_c5_python_names_of_other_engines_are_answered() -> None:
    """C5: `LLM(tensor_paralel_size=…)` is an error with a suggestion."""
    with pytest.raises(ConfigError) as error:
        load_config(None, {"tensor_paralel_size": 2}, env={})
    assert str(error.value) == "tensor_paralel_size (Python argument): unknown key; did you mean parallel.tensor?"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEBAY_SEED", "7")
    assert load_config().config.seed == 7


def test_one_text_is_no_sequence_of_settings() -> None:
    with pytest.raises(TypeError, match="overrides must be a mapping or a sequence"):
        load_config(None, "seed=3", env={})


def test_quickstart_is_valid() -> None:
    file = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    loaded = load_config(file, env={})
    assert loaded.config.model == "smollm2-135m-instruct"
    assert loaded.config.device == "auto"
