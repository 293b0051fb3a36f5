"""The configuration's JSON schema for editors and documentation, with the options of plugins filled in.

It is given option models and does not look for plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from enginebay.config.schema import EngineConfig

#: kind -> (definition in the schema, the key that names the part). A model has no options in YAML; processors: below.
_BAYS = {
    "attention": ("AttentionConfig", "backend"),
    "executor": ("ExecutorConfig", "backend"),
    "scheduler": ("SchedulerConfig", "policy"),
    "quant": ("QuantConfig", "method"),
}


def json_schema(option_models: Mapping[tuple[str, str], type[BaseModel]]) -> dict[str, Any]:
    """The JSON schema of `EngineConfig` (draft 2020-12).

    Parameters
    ----------
    option_models
        ``(kind, name) -> record.options``. Each becomes ``$defs["<kind>.<name>"]``; it binds a bay's ``options`` where
        the part is named, and is offered as an alternative where it is not. Kinds without options in YAML are left out.
    """
    schema = EngineConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for kind, (definition, selector) in _BAYS.items():
        names = sorted(name for k, name in option_models if k == kind)
        if not names:
            continue
        bay = schema["$defs"][definition]
        bindings = []
        for name in names:
            key = f"{kind}.{name}"
            schema["$defs"][key] = option_models[kind, name].model_json_schema(
                ref_template=f"#/$defs/{key}/$defs/{{model}}"
            )
            bindings.append(
                {
                    "if": {"properties": {selector: {"const": name}}, "required": [selector]},
                    "then": {"properties": {"options": {"$ref": f"#/$defs/{key}"}}},
                }
            )
        bay["allOf"] = bindings
        options = bay["properties"]["options"]
        options["anyOf"] = [
            *({"title": f"options of {name}", "$ref": f"#/$defs/{kind}.{name}"} for name in names),
            {"title": "options of a plugin that this schema does not know", "type": "object"},
        ]
    _add_processors(schema, option_models)
    return schema


def _add_processors(schema: dict[str, Any], option_models: Mapping[tuple[str, str], type[BaseModel]]) -> None:
    """Logits processors run side by side, so each has its options under its own name."""
    options = schema["$defs"]["SamplerConfig"]["properties"]["options"]
    for kind, name in sorted(option_models):
        if kind == "sampler":
            key = f"{kind}.{name}"
            schema["$defs"][key] = option_models[kind, name].model_json_schema(
                ref_template=f"#/$defs/{key}/$defs/{{model}}"
            )
            options.setdefault("properties", {})[name] = {"$ref": f"#/$defs/{key}"}
