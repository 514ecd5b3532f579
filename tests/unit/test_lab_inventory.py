"""The Vagrantfile's reader of inventories (Ruby: skipped where no ruby is installed)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUBY = """
require "./lab/inventory"
begin
  inventory = Lab::Inventory.new(ARGV[0], Dir.pwd)
  puts inventory.addresses.map { |host, address| "#{host}=#{address}" }.join(" ")
  puts inventory.group("worker").join(" ")
rescue Lab::InventoryError => e
  abort e.message
end
"""

pytestmark = pytest.mark.skipif(not shutil.which("ruby"), reason="ruby comes with `make lab`")


def read(place: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ruby", "-e", RUBY, str(place)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("place", ["inventory/lab", "inventory/lab/hosts.yml", ROOT / "inventory" / "lab"])
def test_lab_inventory_is_read_from_directory_or_file(place: Path | str) -> None:
    addresses, workers = read(place).stdout.splitlines()
    assert addresses == "head=10.0.3.10 ps-0=10.0.3.20 ps-1=10.0.3.21 worker-0=10.0.3.30 worker-1=10.0.3.31"
    assert workers == "worker-0 worker-1"


def test_hosts_of_child_groups_belong_to_the_parent(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(
        "worker:\n  children:\n    fast:\n      hosts:\n        a: {ansible_host: 10.0.3.40}\n"
        "chief:\n  hosts:\n    a:\n"
    )
    assert read(tmp_path).stdout.splitlines() == ["a=10.0.3.40", "a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("worker: {hosts: {a: }}", "host a in .* has no ansible_host"),
        ("worker: {hosts: {a: {ansible_host: a.example}}}", "host a in .* has ansible_host: a.example"),
        ("worker: {hosts: {a: {ansible_host: 10.0.3.4}, b: {ansible_host: 10.0.3.4}}}", "a and b in .* share"),
        ("worker: {hosts: }", "lists no host"),
        ("- worker", "is not a mapping"),
        ("worker: [", "hosts.yml"),
    ],
)
def test_wrong_inventory_is_refused_with_the_reason(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "hosts.yml").write_text(content)
    result = read(tmp_path)
    assert result.returncode == 1
    assert re.search(message, result.stderr), result.stderr


def test_missing_inventory_names_the_variable() -> None:
    result = read("inventory/nowhere")
    assert result.returncode == 1
    assert "inventory/nowhere" in result.stderr
    assert "PSFLEET_INVENTORY" in result.stderr
