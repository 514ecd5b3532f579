"""What passes the schema survives the whole way: inventory, environment file, unit, process, byte for byte.

The text is hypothesis's. The environment files are read by systemd's own parser, in its library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.site.escaping import config_word, environment_value
from fleet.site.filters import FILTERS
from fleet.site.preflight import inventory_problems
from fleet.site.schema import formats
from fleet.site.schema.definition import definition
from fleet.site.schema.problems import describe_problems, show
from fleet.site.topology import cluster_spec, host_tasks
from tests.unit.hostile import RUN, inventory

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = sorted(Path("/usr/lib").glob("**/libsystemd-shared-*.so"))
# Each run tries the same, so that a gate that was green stays so.
FEW = settings(
    max_examples=300, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
# With the others more than 10,000 examples; these take a millisecond each.
MANY = settings(FEW, max_examples=2000)

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
HOSTILE = st.sampled_from([*"$`'\"\\;|&<>(){}[]*?~#%!=:/.- \n\t", "$(id)", "{{ x }}", "..", "//", "%i", "\\x00", "é"])
TEXT = st.lists(st.one_of(HOSTILE, CHARACTERS, st.text("abcz019.-_:/", max_size=4)), max_size=8).map("".join)
LABEL = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9-]{0,8}[A-Za-z0-9])?", fullmatch=True)


def spoilt(right: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Right texts with one thing put in somewhere."""
    return st.builds(lambda text, at, what: text[:at] + what + text[at:], right, st.integers(0, 4), HOSTILE)


DIRECTORY = st.lists(LABEL, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
ADDRESS = st.one_of(
    TEXT,
    spoilt(st.one_of(st.ip_addresses().map(str), LABEL)),
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda ip: ip.exploded.upper()),
    st.lists(LABEL, min_size=1, max_size=4).map(".".join),
)
NAME = st.one_of(
    TEXT,
    LABEL,
    spoilt(st.text("abz09", min_size=2, max_size=6)),
    st.from_regex(r"[A-Za-z0-9._-]{1,70}", fullmatch=True),
)
PATH = st.one_of(TEXT, DIRECTORY, spoilt(DIRECTORY), TEXT.map("/srv/{}".format))
VALUE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        TEXT,
        st.booleans().map(lambda short: 10**4299 if short else -(10**4400)),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=4,
)


def accepted(function: Callable[[str], str], text: str) -> str | None:
    try:
        return function(text)
    except ValueError:
        return None


@pytest.fixture(scope="module")
def parse() -> Iterator[Callable[[str], dict[str, str]]]:
    """Read an environment file as systemd does."""
    if not LIBRARIES:
        pytest.skip("this machine has no systemd, whose library reads environment files")
    library = ctypes.CDLL(str(LIBRARIES[-1]))
    with tempfile.NamedTemporaryFile() as file:

        def read(text: str) -> dict[str, str]:
            Path(file.name).write_bytes(text.encode())
            entries = ctypes.POINTER(ctypes.c_char_p)()
            code = library.load_env_file(None, file.name.encode(), ctypes.byref(entries))
            assert code >= 0, os.strerror(-code)
            found, number = {}, 0
            while entries and (entry := entries[number]) is not None:
                name, _, value = entry.decode().partition("=")
                found[name] = value
                number += 1
            return found

        yield read


@MANY
@given(ADDRESS)
def test_an_address_that_passes_has_one_spelling_that_needs_no_quotes(text: str) -> None:
    if (address := accepted(formats.address, text)) is not None:
        assert formats.address(address) == address
        assert shlex.quote(address) == address or ":" in address
        assert config_word(address) == environment_value(address) == address
        assert not address.startswith("-")


@MANY
@given(NAME)
def test_a_host_name_that_passes_needs_no_quotes_and_is_a_file_name(text: str) -> None:
    if (name := accepted(formats.host_name, text)) is not None:
        assert name == text == shlex.quote(text) == config_word(text) == PurePosixPath(text).name
        assert len(f".psfleet-probe-{name}.new") < 255


@MANY
@given(PATH)
def test_a_directory_that_passes_is_normalised_and_needs_no_quotes(text: str) -> None:
    if (path := accepted(formats.own_directory, text)) is not None:
        assert path == text == shlex.quote(text) == config_word(text) == os.path.normpath(text)
        assert len(PurePosixPath(path).parts) >= 2
        assert not any(formats.is_within(tree, path) for tree in (*formats.SYSTEM_TREES, formats.RELEASES, "/home"))


@MANY
@given(TEXT)
def test_an_environment_value_survives_systemds_parser(parse: Callable[[str], dict[str, str]], text: str) -> None:
    written = f"# a comment\nBEFORE=1\nX={environment_value(text)}\nAFTER='2'\n"
    assert parse(written) == {"BEFORE": "1", "X": text, "AFTER": "2"}


@settings(FEW, max_examples=500)
@given(TEXT)
def test_a_word_of_a_unit_is_refused_or_stays_one_word(text: str) -> None:
    if (word := accepted(config_word, text)) is not None:
        assert word == text
        assert re.fullmatch(r"\S+", word)
        assert not set("%$\\'\";#") & set(word)


@settings(FEW, max_examples=1000)
@given(st.sampled_from(sorted(definition().variables)), VALUE)
def test_no_value_breaks_a_check(name: str, value: Any) -> None:
    variable = definition().variables[name]
    reason = variable.reason_against(value) if variable.scope != "derived" else None
    assert reason is None or isinstance(reason, str)
    assert len(show(value)) < 1000


@FEW
@given(st.sampled_from(sorted(definition().variables)), VALUE, NAME)
def test_no_inventory_breaks_preflight(name: str, value: Any, host: str) -> None:
    groups, hostvars = inventory({"worker": ["worker-0", host]}, {"all": {name: value}})
    text = describe_problems(inventory_problems(groups, hostvars))
    assert len(text.splitlines()) <= 11
    assert all(line.isprintable() for line in text.splitlines())


def environment() -> jinja2.Environment:
    """Ansible's settings of its templates."""
    made = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    made.filters.update(FILTERS, quote=lambda value: shlex.quote(str(value)))
    return made


ENVIRONMENT = environment()
TEMPLATES = {
    name: ENVIRONMENT.from_string((ROOT / "roles" / name).read_text())
    for name in (
        "trainer/templates/task.env.j2",
        "trainer/templates/trainer@.service.j2",
        "tensorboard/templates/tensorboard.service.j2",
        "storage/templates/psfleet-check-shared-path.j2",
    )
}


@settings(FEW, max_examples=300)
@given(NAME, ADDRESS, st.one_of(PATH, st.just("/data/x-1")), st.one_of(TEXT, LABEL), st.integers(1000, 66000))
def test_what_passes_arrives_at_the_process(
    parse: Callable[[str], dict[str, str]], host: str, address: str, path: str, run: str, port: int
) -> None:
    site = {"cluster_shared_dir": path, "trainer_run": RUN | {"run": run}}
    candidates: list[dict[str, Any]] = [
        {"host": host}, {"address": address}, {"path": path}, {"run": run}, {"port": port},
    ]  # fmt: skip
    right = {"host": "worker-1", "address": "10.0.9.9", "path": "/srv/trainer", "run": "first", "port": 2400}
    for each in candidates:
        case = right | each
        site = {"cluster_shared_dir": case["path"], "trainer_run": RUN | {"run": case["run"]}}
        mine = {"ansible_host": case["address"], "worker_port": case["port"]}
        groups, hostvars = inventory({"worker": [case["host"]]}, {"all": site, case["host"]: mine})
        if inventory_problems(groups, hostvars):
            continue
        spec = cluster_spec(groups, hostvars)
        (task,) = host_tasks(spec, case["host"])
        shared = {"shared_dir": case["path"]}
        text = TEMPLATES["trainer/templates/task.env.j2"].render(
            item=task, trainer_settings=shared, inventory_hostname=case["host"], ansible_managed="Ansible managed"
        )
        read = parse(text)
        assert read["TRAINER_HOST"] == case["host"]
        config = json.loads(read["TF_CONFIG"])
        member = f"[{case['address']}]" if ":" in case["address"] else case["address"]
        assert config["cluster"]["worker"] == [f"{member}:{case['port']}"]
        assert config["task"] == {"type": "worker", "index": 0}
        assert read["DATA_DIR"] == f"{case['path']}/data"
        unit = TEMPLATES["tensorboard/templates/tensorboard.service.j2"].render(
            tensorboard_logdir=f"{case['path']}/runs",
            tensorboard_address=case["address"],
            tensorboard_listen_port=case["port"],
            ansible_managed="",
        )
        (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
        assert shlex.split(line)[3:6] == [
            f"--logdir={case['path']}/runs", f"--host={case['address']}", f"--port={case['port']}",
        ]  # fmt: skip


@settings(FEW, max_examples=100)
@given(st.lists(TEXT, min_size=8, max_size=8))
def test_values_arrive_in_a_process_byte_for_byte(parse: Callable[[str], dict[str, str]], texts: list[str]) -> None:
    wanted = {f"V{number}": text for number, text in enumerate(texts)}
    read = parse("".join(f"{name}={environment_value(text)}\n" for name, text in wanted.items()))
    seen = subprocess.run(["/usr/bin/env", "-0"], env=read, stdout=subprocess.PIPE, check=True).stdout
    entries = dict(entry.split(b"=", 1) for entry in seen.split(b"\0") if entry)
    assert entries == {name.encode(): text.encode() for name, text in wanted.items()}


@settings(FEW, max_examples=60)
@given(TEXT, TEXT, TEXT)
def test_a_script_of_the_shared_path_runs_nothing_of_a_name(path: str, witness: str, host: str) -> None:
    """Not even of names that the schema refuses."""
    script = TEMPLATES["storage/templates/psfleet-check-shared-path.j2"].render(
        storage_path=path,
        storage_witness=witness,
        inventory_hostname=host,
        ansible_managed="",
        storage_rename_seconds=1,
        storage_clock_seconds=5,
        storage_free_mib=1,
    )
    head = script.partition("refuse() {")[0]
    output = subprocess.run(
        ["/bin/sh", "-c", head + 'printf \'%s\\0\' "$path" "$witness" "$host"'], stdout=subprocess.PIPE, check=True
    ).stdout
    assert output.decode().split("\0")[:3] == [path, witness, host]
    assert host not in script.partition("refuse() {")[2] or len(host) < 3 or shlex.quote(host) == host


EXPRESSION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
# What psfleet writes there itself, or a package manager did; none of it is a text of the inventory.
OWN_TEXTS = re.compile(
    r"ansible_managed.*|line|__nvidia_driver_.*|__nfs_client_unit|archive\.(uri|suite|signed_by)|__firewall_family"
    r"|__wireguard_(program|directory|interface)|128 if ':' in peer\.address else 32"
)
# Alerts keep Prometheus's own templates, and have other brackets.
OTHER_BRACKETS = re.compile(r"<<(.*?)>>", re.DOTALL)


@pytest.mark.parametrize("path", sorted((ROOT / "roles").glob("*/templates/*.j2")), ids=lambda path: path.name)
def test_no_template_writes_a_text_of_the_inventory_as_it_is(path: Path) -> None:
    text = path.read_text()
    filters = ("quote",) if text.startswith("#!") else ("config_word", "environment_value", "limit_word")
    brackets = OTHER_BRACKETS if text.startswith("# <<") else EXPRESSION
    for expression in (each.strip() for each in brackets.findall(text)):
        last = expression.rpartition("|")[2].strip()
        # A number that the template counts itself.
        assert last in (*filters, "length") or OWN_TEXTS.fullmatch(expression), f"{path}: {{{{ {expression} }}}}"


@pytest.mark.parametrize("path", sorted((ROOT / "roles").glob("*/tasks/*.yml")), ids=str)
def test_no_command_takes_a_text_as_it_is(path: Path) -> None:
    for block in re.findall(r"ansible\.builtin\.(?:shell|command):(.*?)(?=\n\s*(?:- name|changed_when|when|register))",
                            path.read_text(), re.DOTALL):  # fmt: skip
        if "argv:" in block:
            continue
        for expression in (each.strip() for each in EXPRESSION.findall(block)):
            quoted = expression.endswith(("| quote", "| map('quote') | join(' ')"))
            assert quoted or expression in ("__wireguard_program",), f"{path}: {expression}"
