"""Write docs/ray_hetero.schema.json, the JSON Schema of configuration files, for editors.

    python tools/write_configuration_schema.py

It comes from the configuration's own model; both forms are in it, the keys by themselves and the
keys inside of `ray_hetero`.  A number or a text that it accepts, the engine accepts too.
"""

from __future__ import annotations

import json
from typing import Any

from page_blocks import DOCS

from ray_hetero.config import HeteroConfig
from ray_hetero.config_sources import KEY, RENAMED

FILE = DOCS / "ray_hetero.schema.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The schema of a whole file or of the value of `--additional-config`'s key."""
    model = HeteroConfig.model_json_schema(ref_template="#/$defs/{model}")
    sections = model.pop("$defs")
    sections[HeteroConfig.__name__] = model
    for name, section in sections.items():
        sections[name] = _tidied(section)
    for old, new in RENAMED.items():
        _add_old_name(sections, old, new)
    return {
        "$schema": DIALECT,
        "title": "Configuration of ray_hetero",
        "description": "What RAY_HETERO_CONFIG names, in YAML or JSON, or --additional-config has.",
        "type": ["object", "null"],
        "if": {"type": "object", "required": [KEY]},
        "then": {
            "properties": {KEY: {"$ref": f"#/$defs/{HeteroConfig.__name__}"}},
            "additionalProperties": False,
        },
        "else": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{HeteroConfig.__name__}"}]},
        "$defs": dict(sorted(sections.items())),
    }


def _tidied(part: Any) -> Any:
    """Without the titles that pydantic makes of names; texts of docstrings on one line."""
    if isinstance(part, list):
        return [_tidied(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {}
    for key, value in part.items():
        if key == "title" and isinstance(value, str):
            continue
        is_text = key == "description" and isinstance(value, str)
        found[key] = " ".join(value.split()) if is_text else _tidied(value)
    if "patternProperties" in found:
        found["additionalProperties"] = False
    return found


def _add_old_name(sections: dict[str, Any], old: str, new: str) -> None:
    *above, name = old.split(".")
    section = sections[HeteroConfig.__name__]
    for key in above:
        section = sections[section["properties"][key]["$ref"].rpartition("/")[2]]
    now = new.rpartition(".")[2]
    meaning = {"description": f"Old name of {now}.", "deprecated": True}
    section["properties"][name] = {**section["properties"][now], **meaning}
    # Both at once are refused.
    section.setdefault("allOf", []).append({"not": {"required": [name, now]}})


def written() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Rewrite the file."""
    FILE.write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
