"""One schema for the whole inventory: the roles, the reference page and the examples say the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from fleet.site.schema import formats, page
from fleet.site.schema.definition import definition, meant_group, meant_variable
from trainer.core.settings.config import Config

ROOT = Path(__file__).resolve().parents[2]


def test_each_role_but_reset_takes_what_the_schema_has() -> None:
    roles = {path.name for path in (ROOT / "roles").iterdir() if path.is_dir()}
    assert {path.parents[1].name for path in page.role_files()} == roles - {"reset"}


@pytest.mark.parametrize("path", page.role_files(), ids=lambda path: f"{path.parents[1].name}/{path.name}")
def test_a_roles_arguments_and_defaults_are_written_from_the_schema(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == page.role_files()[path], "write it: python -m fleet.site.schema.page"


def test_the_page_is_written_from_the_schema() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "write it: python -m fleet.site.schema.page"


@pytest.mark.parametrize("name", definition().variables)
def test_a_variable_is_a_json_schema_with_all_that_messages_need(name: str) -> None:
    variable = definition().variables[name]
    Draft202012Validator.check_schema(dict(variable.schema))
    assert variable.scope in ("site", "host", "line", "derived")
    assert name.startswith((*definition().prefixes, "ansible_"))
    if variable.scope == "derived":
        assert variable.schema["from"]
        return
    assert variable.expected
    default = variable.schema.get("default")
    if default is not None and "{{" not in str(default):
        assert variable.reason_against(default) is None


@pytest.mark.parametrize("name", [each for each, v in definition().variables.items() if "anyOf" not in v.schema])
def test_no_number_and_no_text_is_without_a_bound(name: str) -> None:
    schema = definition().variables[name].schema
    if schema["scope"] == "derived":
        return
    if schema["type"] == "integer":
        assert {"minimum", "maximum"} <= set(schema)
    if schema["type"] == "string":
        assert {"format", "enum", "pattern"} & set(schema)


def test_misspelt_names_are_no_names() -> None:
    for known in (definition().groups, {name: each.schema for name, each in definition().variables.items()}):
        wrong = [name for each in known.values() for name in each.get("misspelt", ())]
        assert len(set(wrong)) == len(wrong)
        assert not set(wrong) & set(known)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpus", "gpu"), ("evaluators", "evaluator"), ("nfs-server", "nfs_server"), ("parameter_servers", "ps"),
        ("workers", "worker"), ("coordinator", "chief"), ("Tensorboard", "tensorboard"), ("bastion", None),
    ],
)  # fmt: skip
def test_the_group_that_was_meant_is_found(name: str, meant: str | None) -> None:
    assert meant_group(name) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cluster_sharde_dir", "cluster_shared_dir"), ("worker_count", "worker_tasks"), ("gpu_num", "gpu_count"),
        ("nvidia_driver_flavor", "nvidia_driver_flavour"), ("cluster_zzzzz", None), ("user", "ansible_user"),
        ("port", "ansible_port"), ("identity_file", "ansible_ssh_private_key_file"), ("become", "ansible_become"),
    ],
)  # fmt: skip
def test_the_variable_that_was_meant_is_found(name: str, meant: str | None) -> None:
    assert meant_variable(name) == meant


@pytest.mark.parametrize(
    ("text", "is_"),
    [
        ("10.0.3.1", "10.0.3.1"), ("FD00:0:0::1", "fd00::1"), ("Node-1.Example.ORG", "node-1.example.org"),
        ("2001:db8::2", "2001:db8::2"), ("127.0.0.1", "127.0.0.1"), ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("node0x1", "node0x1"), ("169.254.1.1", "169.254.1.1"), ("3com.example", "3com.example"),
    ],
)  # fmt: skip
def test_an_address_has_one_spelling(text: str, is_: str) -> None:
    assert formats.address(text) == is_
    assert formats.address(is_) == is_


@pytest.mark.parametrize(
    "path",
    [
        "/srv/trainer", "/data", "/mnt/shared/trainer", "/var/lib/trainer/local", "/opt/shared", "/efs/a-b_c.d",
        "/var/nfs",
    ],
)  # fmt: skip
def test_a_directory_of_the_clusters_own_is_right(path: str) -> None:
    assert formats.own_directory(path) == path


def test_a_servers_export_is_no_directory_and_its_mount_point_is() -> None:
    with pytest.raises(ValueError, match="it is a server's export: mount it, and name where"):
        formats.own_directory("nas:/export/trainer")


@pytest.mark.parametrize("name", ["head", "ps-0", "w_1", "192.0.2.11", "train-i-167c70d7485f99d3a", "a" * 64, "A.b"])
def test_a_usual_host_name_is_right(name: str) -> None:
    assert formats.host_name(name) == name


def test_every_variable_that_the_code_reads_is_in_the_schema() -> None:
    read = set()
    for directory in ("ansible", "fleet", "roles"):
        for path in (ROOT / directory).rglob("*.py"):
            read |= set(re.findall(r"""(?:get\(|values\[|variables\[|site\[)["']([a-z_]+)["']""", path.read_text()))
    ours = {name for name in read if name.startswith(definition().prefixes)} - set(definition().groups)
    assert "cluster_uid" in definition().variables
    assert ours - set(definition().variables) - {field.name for field in fields(Config)} == set()


def test_filters_are_there_soon() -> None:
    """Ansible imports all filters in the process of each host's task; jsonschema is for the control machine's check."""
    program = "import sys, fleet.site.filters; sys.exit('jsonschema' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT).returncode == 0
