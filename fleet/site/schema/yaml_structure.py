"""Files of hosts that are YAML, and that Ansible half reads: where one is wrong, and what was expected there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from fleet.site.schema.inventory_files import VARIABLE_SUFFIXES, directories, variable_files
from fleet.site.schema.problems import Problem, show
from fleet.site.schema.yaml_text import GROUP_KEYS, compose_any, entries, group_bodies, hosts_files

_TAG = "tag:yaml.org,2002:"
_KINDS = {"str": "the text", "int": "the number", "float": "the number", "bool": "true or false", "null": "nothing"}
_EXAMPLES = {"hosts": "worker-0: {ansible_host: 10.0.3.31}", "children": "worker:", "vars": "worker_tasks: 2"}


def shape_problems(sources: Sequence[str]) -> Iterator[Problem]:
    """Refuse files of hosts of which Ansible's plugin takes a part and then fails, or skips a group with a warning, and
    files of variables that have none."""
    for directory in directories(sources):
        for kind in ("group_vars", "host_vars"):
            for entry in variable_files(directory / kind):
                for file in [entry] if entry.is_file() else sorted(entry.rglob("*")):
                    root = compose_any(file)
                    if root is not None and not _is_mapping(root):
                        text = f"this is {_kind(root)}; expected variables by name, such as worker_tasks: 2"
                        yield Problem(text, file=str(file), line=root.start_mark.line + 1)
    for file in hosts_files(sources):
        # Without a suffix it may be an INI file.
        root = compose_any(file) if file.suffix in VARIABLE_SUFFIXES[1:] else None
        if root is None or any(key == "plugin" for key, _, _ in entries(root)):
            continue
        if not isinstance(root, yaml.MappingNode):
            text = f"this is {_kind(root)}; expected groups by name, such as worker: {{hosts: {{worker-0: "
            yield Problem(f"{text}{{ansible_host: 10.0.3.31}}}}}}", file=str(file), line=root.start_mark.line + 1)
            continue
        for text, node in _group_shapes(root):
            yield Problem(text, file=str(file), line=node.start_mark.line + 1)


def _group_shapes(root: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    """What is wrong with the shape of groups, and where."""
    yield from _name_shapes(root, "group")
    for group, body in group_bodies(root):
        if not _is_mapping(body):
            wrong = f"{show(group)} is {_kind(body)}; expected a group, with hosts, children or vars below it. A host"
            yield (
                f"{wrong} stands below its group: worker: {{hosts: {{{group[:64]}: {{ansible_host: 10.0.3.31}}}}}}",
                body,
            )
        for section, _, content in entries(body):
            # One name alone may stand there as a text.
            if section not in GROUP_KEYS or content.tag == f"{_TAG}str":
                continue
            if not _is_mapping(content):
                right = f"a mapping, such as {section}: {{{_EXAMPLES[section]}}}"
                yield f"{section} of group {show(group)} is {_kind(content)}; expected {right}", content
            elif section == "hosts":
                yield from _name_shapes(content, "host")
                for host, _, variables in entries(content):
                    if not _is_mapping(variables):
                        wrong = (
                            f"host {show(host)} in group {show(group)} is {_kind(variables)}; expected its variables"
                        )
                        yield f"{wrong}, such as {host[:64]}: {{ansible_host: 10.0.3.31}}", variables
            elif section == "children":
                yield from _name_shapes(content, "group")


def _name_shapes(names: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node]]:
    for key, _ in names.value if isinstance(names, yaml.MappingNode) else ():
        if key.tag not in (f"{_TAG}str", f"{_TAG}merge", f"{_TAG}value"):
            fix = f'. Write it in quotes: "{key.value[:64]}"' if isinstance(key, yaml.ScalarNode) else ""
            yield f"the name of a {what} is {_kind(key)}; expected a text{fix}", key


def _is_mapping(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode) or node.tag == f"{_TAG}null"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, (yaml.SequenceNode, yaml.MappingNode)):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    kind = _KINDS.get(node.tag.removeprefix(_TAG), "a value of another kind")
    return f"{kind} {show(node.value)}" if kind.startswith("the ") else kind
