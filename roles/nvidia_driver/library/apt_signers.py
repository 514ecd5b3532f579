#!/usr/bin/python
"""Find which key a machine's own lists of sources name for some archives.

apt refuses all its lists when two of them name another key for the same archive and suite, be it the same key in
another file. Another list must therefore repeat the entries of the first. Changes nothing.

Returns:
    archives: The same, with `signed_by` as it stands in the list. Empty where the list names no key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

LISTS = ("etc/apt/sources.list", "etc/apt/sources.list.d/*.list", "etc/apt/sources.list.d/*.sources")
Entry = tuple[str, str, str]  # uri, suite, signed_by


def one_line_entries(text: str) -> Iterator[Entry]:
    """Read `deb [signed-by=FILE] URI SUITE COMPONENT...`."""
    for line in text.splitlines():
        found = re.match(r"\s*deb(?:-src)?\s+(?:\[([^]]*)\]\s*)?(\S+)\s+(\S+)", line)
        if found:
            key = re.search(r"(?:^|\s)signed-by=(\S+)", found[1] or "")
            yield found[2].rstrip("/"), found[3], key[1] if key else ""


def stanza_entries(text: str) -> Iterator[Entry]:
    """Read paragraphs of fields (deb822). A key that stands in the field itself is kept with its lines."""
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", uncommented):
        fields = {
            name.lower(): value.strip()
            for name, value in re.findall(r"^([\w-]+):(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        }
        if fields.get("enabled", "yes").lower() in ("no", "false", "0", "off"):
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield uri.rstrip("/"), suite, fields.get("signed-by", "")


def read_entries(root: Path, ignore: Path) -> Iterator[Entry]:
    """Read every list of a machine but one."""
    for pattern in LISTS:
        for path in sorted(root.glob(pattern)):
            if path != ignore:
                text = path.read_text(errors="replace")
                yield from (stanza_entries if path.suffix == ".sources" else one_line_entries)(text)


def find_signers(entries: Iterable[Entry], archives: Iterable[Mapping[str, str]], default: str) -> list[dict[str, str]]:
    """Tell the key of each archive."""
    there = list(entries)
    answer = []
    for archive in archives:
        keys = [key for uri, suite, key in there if (uri, suite) == (archive["uri"].rstrip("/"), archive["suite"])]
        named = [key for key in keys if key]
        answer.append({**archive, "signed_by": named[0] if named else "" if keys else default})
    return answer


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The archives that are asked for, each with `uri` and `suite`.
            "archives": {"type": "list", "elements": "dict", "required": True},
            # A list of sources that doesn't count, since the caller writes it.
            "ignore": {"type": "path", "required": True},
            # The key for an archive that no list has.
            "default": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    entries = read_entries(Path("/"), Path(module.params["ignore"]))
    archives = find_signers(entries, module.params["archives"], module.params["default"])
    module.exit_json(changed=False, archives=archives)


if __name__ == "__main__":
    main()
