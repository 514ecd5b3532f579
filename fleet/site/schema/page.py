"""What is made from inventory.yml: docs/inventory.md, and the roles' arguments and defaults.

`python -m fleet.site.schema.page` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fleet.places import CODE
from fleet.site.schema.definition import Variable, definition

PAGE = CODE / "docs" / "inventory.md"
ROLES = CODE / "roles"
HEAD = Path(__file__).with_name("page.md")
TYPES = {
    "string": "text",
    "integer": "whole number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
    "null": "null",
}
ANSIBLES_TYPES = {"string": "str", "integer": "int", "boolean": "bool", "array": "list", "object": "dict"}


def page() -> str:
    """Write docs/inventory.md."""
    known = definition()
    lines = [HEAD.read_text(encoding="utf-8")]
    lines += [f"| `{group}` | {entry['description']} |\n" for group, entry in known.groups.items()]
    lines.append("\n## Variables\n| Variable | Type | Default | Meaning |\n|---|---|---|---|\n")
    for variable in known.variables.values():
        if variable.scope != "derived":
            scope = "" if variable.scope == "host" else f" ({variable.scope})"
            cells = (f"`{variable.name}`{scope}", _type(variable.schema), _default(variable), _meaning(variable))
            lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _type(schema: Mapping[str, Any]) -> str:
    """Say a type with its range, in a phrase."""
    if "enum" in schema:
        return "one of " + ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    name = TYPES[schema["type"]]
    if "minimum" in schema:
        return f"{schema['minimum']:,} to {schema['maximum']:,}"
    if schema["type"] == "array":
        inner = schema["items"]
        return f"list of {inner.get('format', 'text') if inner['type'] == 'string' else TYPES[inner['type']]}"
    return {
        "own-directory": "directory",
        "address": "address",
        "control-path": "local path",
        "url": "URL",
        "port-text": "the same as text",
        "command-template": "command",
    }.get(schema.get("format", ""), name)


def _default(variable: Variable) -> str:
    if variable.mandatory:
        return "required"
    if "default" not in variable.schema:
        return ""
    default = variable.schema["default"]
    return "computed" if isinstance(default, str) and "{{" in default else f"`{json.dumps(default)}`"


def _meaning(variable: Variable) -> str:
    return variable.description.replace("|", "\\|")


def role_options(role: str) -> dict[str, dict[str, Any]]:
    """The arguments of a role, as meta/argument_specs.yml spells them."""
    return {
        variable.name: _option(variable.schema, bool(variable.schema.get("mandatory")))
        for variable in definition().variables.values()
        if variable.role == role
    }


def _option(schema: Mapping[str, Any], mandatory: bool) -> dict[str, Any]:
    kind = "raw" if schema.get("raw") else "path" if schema.get("path") else ANSIBLES_TYPES[schema["type"]]
    option: dict[str, Any] = {"type": kind, "description": schema["description"]}
    if mandatory:
        option["required"] = True
    if schema.get("secret"):
        option["no_log"] = True
    if "enum" in schema:
        option["choices"] = schema["enum"]
    if kind == "list":
        option["elements"] = ANSIBLES_TYPES[schema["items"]["type"]]
        if "properties" in schema["items"]:
            needed = schema["items"]["required"]
            option["options"] = {
                name: _option(each, name in needed) for name, each in schema["items"]["properties"].items()
            }
    return option


def role_defaults(role: str) -> dict[str, Any]:
    """The defaults of a role, as defaults/main.yml has them."""
    return {
        variable.name: variable.schema["default"]
        for variable in definition().variables.values()
        if variable.role == role and "default" in variable.schema
    }


class _Indented(yaml.SafeDumper):
    """Writes YAML as yamllint wants it: the items of a list are indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def role_files() -> dict[Path, str]:
    """Return the arguments and defaults of the schema's roles. Entries keep their descriptions.

    The role `reset` is none of them: reset.yml works out what it takes.
    """
    files = {}
    for role in sorted({each.role for each in definition().variables.values() if each.role}):
        arguments = ROLES / role / "meta" / "argument_specs.yml"
        entries = yaml.safe_load(arguments.read_text(encoding="utf-8"))["argument_specs"]
        options = role_options(role)
        specs = {name: entry | {"options": options} for name, entry in entries.items()}
        files[arguments] = _as_yaml({"argument_specs": specs})
        files[ROLES / role / "defaults" / "main.yml"] = _as_yaml(role_defaults(role))
    return files


def _as_yaml(content: Mapping[str, Any]) -> str:
    made = "# Made from fleet/site/schema/inventory.yml: python -m fleet.site.schema.page\n"
    return made + "---\n" + yaml.dump(content, Dumper=_Indented, sort_keys=False, width=100)


if __name__ == "__main__":
    for path, text in {PAGE: page(), **role_files()}.items():
        path.write_text(text, encoding="utf-8")
