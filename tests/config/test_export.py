"""The JSON schema with plugins' options."""

from __future__ import annotations

from typing import Any

from enginebay.config import EngineConfig, json_schema
from pydantic import BaseModel


class Limits(BaseModel):
    rows: int = 1


class Options(BaseModel):
    limits: Limits = Limits()


def refs(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [ref for value in node.values() for ref in refs(value)]
    return [ref for value in node for ref in refs(value)] if isinstance(node, list) else []


def test_without_plugins_it_is_the_trees_own() -> None:
    schema = json_schema({})
    assert schema.pop("$schema") == "https://json-schema.org/draft/2020-12/schema"
    assert schema == EngineConfig.model_json_schema()


def test_a_plugins_options_are_bound_to_its_name() -> None:
    schema = json_schema({("attention", "acme"): Options, ("scheduler", "sjf"): Options})
    attention = schema["$defs"]["AttentionConfig"]
    assert attention["allOf"] == [
        {
            "if": {"properties": {"backend": {"const": "acme"}}, "required": ["backend"]},
            "then": {"properties": {"options": {"$ref": "#/$defs/attention.acme"}}},
        }
    ]
    assert attention["properties"]["options"]["anyOf"][0]["$ref"] == "#/$defs/attention.acme"
    assert schema["$defs"]["SchedulerConfig"]["allOf"][0]["if"]["required"] == ["policy"]
    assert "allOf" not in schema["$defs"]["ExecutorConfig"]


def test_options_of_plugins_unknown_to_the_schema_stay_valid() -> None:
    options = json_schema({("quant", "acme"): Options})["$defs"]["QuantConfig"]["properties"]["options"]
    assert options["anyOf"][-1]["type"] == "object"


def test_every_reference_leads_somewhere() -> None:
    schema = json_schema({("attention", "a"): Options, ("attention", "b"): Options, ("executor", "c"): Options})
    found = refs(schema)
    assert "#/$defs/attention.a/$defs/Limits" in found
    for ref in found:
        node = schema
        for key in ref.removeprefix("#/").split("/"):
            node = node[key]


def test_models_have_no_options_in_yaml() -> None:
    assert "model.Acme" not in json_schema({("model", "Acme"): Options})["$defs"]
