"""Reading YAML, environment, ``--set`` and Python: values, lines and every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from enginebay.config import EngineConfig, SchedulerConfig
from enginebay.config.sources import Layer, read_environment, read_python, read_settings, read_yaml
from enginebay.config.tree import tree_of
from enginebay.config.values import Given, find_source, plain

SCHEMA = tree_of(EngineConfig)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder: Path, text: str | bytes) -> Layer:
    data = text.encode() if isinstance(text, str) else text
    (folder / "engine.yaml").write_bytes(data)
    return read_yaml("engine.yaml", SCHEMA)


def test_yaml_values_carry_their_lines(folder: Path) -> None:
    layer = read(folder, "dtype: float32\nscheduler:\n  max_num_seqs: 8\n  options: {a: 1}\n")
    assert layer.problems == []
    assert plain(layer.tree) == {"dtype": "float32", "scheduler": {"max_num_seqs": 8, "options": {"a": 1}}}
    assert str(find_source(layer.tree, ("scheduler", "max_num_seqs"))) == "engine.yaml:3"
    assert str(find_source(layer.tree, ("scheduler", "options", "a"))) == "engine.yaml:4"


@pytest.mark.parametrize("text", ["", "# nothing\n", "\ufeffdtype: auto\n", "scheduler:\n  # max_num_seqs: 8\n"])
def test_empty_files_and_sections_give_nothing_wrong(folder: Path, text: str) -> None:
    layer = read(folder, text)
    assert layer.problems == []
    assert plain(layer.tree) in ({}, {"dtype": "auto"}, {"scheduler": {}})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("dtype: auto\ndtype: float32\n", "dtype (engine.yaml:2): written twice, first at engine.yaml:1; keep one"),
        ("cache:\n  dtype: auto\n  dtype: auto\n", "cache.dtype (engine.yaml:3): written twice, first at"),
        ("a: [\n", "engine.yaml:2: not valid YAML: while parsing a flow node"),
        ("- 1\n", "engine.yaml:1: expected a mapping, such as model: smollm2-135m-instruct"),
        ("1: x\n", "top level (engine.yaml:1): every key must be a text; quote it"),
        ("scheduler:\n  [1]: x\n", "scheduler (engine.yaml:2): every key must be a text; quote it"),
        ("dtype: !python/object:os.system x\n", "dtype (engine.yaml:1): cannot be read: could not determine a constr"),
        ("cache: &a\n  dtype: *a\n", "cache.dtype (engine.yaml:1): cannot be read: an alias that contains itself"),
        ("cache: {<<: 3}\n", "cache (engine.yaml:1): cannot be read: while constructing a mapping"),
        ("--- \na: 1\n---\nb: 1\n", "engine.yaml:3: not valid YAML: expected a single document"),
        (b"model: \xff\n", "engine.yaml: not valid YAML: 'utf-8' codec can't decode"),
        (b"model: \x00\n", "engine.yaml: not valid YAML: "),
    ],
)
def test_yaml_faults(folder: Path, text: str | bytes, problem: str) -> None:
    assert read(folder, text).problems[0].startswith(problem)


def test_a_missing_file_and_a_folder(folder: Path) -> None:
    assert read_yaml("none.yaml", SCHEMA).problems == ["none.yaml: cannot be opened: No such file or directory"]
    assert read_yaml(folder, SCHEMA).problems == [f"{folder}: cannot be opened: Is a directory"]


def test_yaml_merge_keys_and_anchors(folder: Path) -> None:
    layer = read(folder, "cache: &c {dtype: auto, block_size: 16}\nattention: {options: {<<: *c, block_size: 32}}\n")
    assert layer.problems == []
    assert plain(layer.tree)["attention"] == {"options": {"dtype": "auto", "block_size": 32}}


def test_numbers_with_exponents_are_numbers(folder: Path) -> None:
    assert plain(read(folder, "attention: {options: {eps: 1e-6}}\n").tree)["attention"]["options"]["eps"] == 1e-6


def test_paths_in_a_file_start_at_its_folder(folder: Path) -> None:
    (folder / "conf").mkdir()
    file = folder / "conf" / "e.yaml"
    file.write_text("model: ./m.gguf\ntokenizer: ../t\nplugins: [a.py, ./b/c.py, /d.py]\n")
    assert plain(read_yaml("conf/e.yaml", SCHEMA).tree) == {
        "model": str(folder / "conf" / "m.gguf"),
        "tokenizer": str(folder / "t"),
        "plugins": [str(folder / "conf" / "a.py"), str(folder / "conf" / "b" / "c.py"), "/d.py"],
    }


def test_a_plugin_file_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert plain(read(folder, "plugins: [~/a.py]\n").tree) == {"plugins": [str(folder / "home" / "a.py")]}


def test_names_and_hub_ids_are_not_paths(folder: Path) -> None:
    assert plain(read(folder, "model: org/name\n").tree) == {"model": "org/name"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model=123", "123"),
        ("model=no", "no"),
        ("model=C: x", "C: x"),
        ("model=a=b", "a=b"),
        ("tokenizer=null", None),
        ("tokenizer=", None),
        ("dtype=", ""),
        ("scheduler.max_num_seqs=8", {"max_num_seqs": 8}),
        ("scheduler.chunked_prefill=false", {"chunked_prefill": False}),
        ("graphs.decode_sizes=[1, 2]", {"decode_sizes": [1, 2]}),
        ("scheduler={max_num_seqs: 8}", {"max_num_seqs": 8}),
        ("attention.options.eps=1e-6", {"options": {"eps": 1e-6}}),
    ],
)
def test_set(setting: str, value: Any) -> None:
    layer = read_settings([setting], SCHEMA)
    assert layer.problems == []
    assert list(plain(layer.tree).values()) == [value]
    assert str(find_source(layer.tree, (setting.split("=")[0].split(".")[0],))) == f"--set {setting}"


def test_of_two_settings_the_later_holds() -> None:
    layer = read_settings(["seed=1", "scheduler.max_num_seqs=2", "seed=3"], SCHEMA)
    assert plain(layer.tree) == {"seed": 3, "scheduler": {"max_num_seqs": 2}}


@pytest.mark.parametrize("setting", ["dtype", "=x", ".a=1", "a..b=1"])
def test_a_setting_needs_path_and_value(setting: str) -> None:
    assert read_settings([setting], SCHEMA).problems == [
        f"--set {setting}: expected PATH=VALUE, such as scheduler.max_num_seqs=8"
    ]


def test_a_setting_that_is_no_yaml() -> None:
    assert read_settings(["seed=[1"], SCHEMA).problems[0].startswith("seed (--set seed=[1): not valid YAML: ")


def test_environment() -> None:
    env = {
        "ENGINEBAY_SCHEDULER__MAX_NUM_SEQS": "8",
        "ENGINEBAY_DTYPE": "float32",
        "ENGINEBAY_SCHEDULER__CHUNKED_PREFILL": "false",
        "ENGINEBAY_ATTENTION__OPTIONS__KV_SPLITS": "4",
        "ENGINEBAY_DISABLE_PLUGINS": "acme",
        "ENGINEBAY_CACHE": "/somewhere",
        "ENGINEBAYX": "1",
        "PATH": "/bin",
    }
    layer = read_environment(env, SCHEMA)
    assert layer.problems == []
    assert plain(layer.tree) == {
        "attention": {"options": {"kv_splits": 4}},
        "dtype": "float32",
        "scheduler": {"chunked_prefill": False, "max_num_seqs": 8},
    }
    assert str(find_source(layer.tree, ("dtype",))) == "ENGINEBAY_DTYPE"


def test_python_none_is_not_given_except_where_null_is_a_value() -> None:
    """C3: None never hides a value below it; false and 0 are values."""
    values = {
        "dtype": None,
        "tokenizer": None,
        "scheduler": {"max_num_seqs": None, "chunked_prefill": False},
        "attention": {"options": {"window": None}},
        "seed": 0,
    }
    assert plain(read_python(values, SCHEMA).tree) == {
        "tokenizer": None,
        "scheduler": {"chunked_prefill": False},
        "attention": {"options": {"window": None}},
        "seed": 0,
    }


def test_c5_a_python_none_under_an_unknown_name_is_kept_for_the_error() -> None:
    assert plain(read_python({"tensor_paralel_size": None}, SCHEMA).tree) == {"tensor_paralel_size": None}


def test_python_models_give_only_what_was_set() -> None:
    tree = read_python({"scheduler": SchedulerConfig(max_num_seqs=8)}, SCHEMA).tree
    assert plain(tree) == {"scheduler": {"max_num_seqs": 8}}
    assert isinstance(tree["scheduler"], dict)
    assert isinstance(tree["scheduler"]["max_num_seqs"], Given)


def test_python_keys_are_texts() -> None:
    values: dict[Any, Any] = {"attention": {"options": {1: 2}}}
    assert read_python(values, SCHEMA).problems == [
        "attention.options (Python argument): every key must be a text, not 1"
    ]
