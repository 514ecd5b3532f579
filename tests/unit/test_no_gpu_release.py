"""A cluster without GPUs has a smaller environment; with the first GPU it gets the others, and goes back without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.places import KIT
from fleet.rollout.release import read_release
from fleet.rollout.roles import Role
from fleet.site.inventory import Inventory
from fleet.verbs.prune import wheel_sets
from tests.unit.fake_hosts import make_inventory


def cluster(gpu: Sequence[str] = (), **variables: Any) -> Inventory:
    made = make_inventory()
    variables |= {"gpu_count": 1, "ansible_facts": {"python_version": "3.11.2"}}
    with_facts = {host: {**each, **variables} for host, each in made.variables.items()}
    return replace(made, groups={**made.groups, "gpu": list(gpu)}, variables=with_facts)


def environments(inventory: Inventory) -> dict[str, str]:
    """Return by kind the names of the release's environments for 3.11, without their hashes."""
    release = read_release(inventory)[0]
    kinds = [kind for kind in release if kind.endswith("environments")]
    return {kind: release[kind]["3.11"]["name"].rpartition("-")[0] for kind in kinds}


def role(inventory: Inventory, host: str) -> Role:
    play = list(inventory.hosts)
    return Role(
        inventory, host, "release", "release.yml", __release=read_release(inventory)[0], ansible_play_hosts=play
    )


def test_the_first_gpu_brings_the_other_environments_and_the_last_takes_them_away() -> None:
    without = cluster()
    assert environments(without) == {"environments": "cpu-no-gpu-3.11"}
    assert environments(cluster(["far"])) == {"environments": "cpu-3.11", "gpu_environments": "cuda-3.11"}
    assert read_release(cluster(["far"]))[0]["id"] != read_release(without)[0]["id"] == read_release(cluster())[0]["id"]


@pytest.mark.parametrize(
    ("gpu", "sets", "locks"),
    [
        ([], {"head": "no-gpu-3.11", "far": "no-gpu-3.11"}, ["cpu-no-gpu"]),
        (["far"], {"head": "3.11", "far": "cuda-3.11"}, ["cpu", "cuda"]),
    ],
)
def test_the_role_fetches_the_wheels_of_the_releases_own_locks(
    gpu: list[str], sets: dict[str, str], locks: list[str]
) -> None:
    inventory = cluster(gpu)
    first = role(inventory, "head")
    assert first.value("__release_wheel_sets") == sorted({*sets.values()})
    asked = first.arguments("build", "release_archive")
    assert [Path(asked[name]) for name in ("lock", "lock_gpu")[: len(locks)]] == [
        KIT / "locks" / each for each in locks
    ]
    fetched = next(task for task in first.load("fetch") if "wheelhouse" in task)
    for host, wheels in sets.items():
        each = role(inventory, host)
        assert each.value("__release_wheel_set") == wheels
        environment = each.value("__release_environment")
        made = json.dumps(read_release(inventory)[0])
        assert wheel_sets([environment["name"]], made) == {wheels}  # by which `fab prune` keeps the set
        found = each._template(fetched["wheelhouse"], {**fetched["vars"], "item": wheels})
        assert (found["lock"], found["python"]) == (str(KIT / environment["lock"]), "3.11")


def test_a_list_that_was_locked_by_hand_has_one_lock_for_both(tmp_path: Path) -> None:
    (tmp_path / "mine-3.11.txt").write_text("a==1\n")
    inventory = cluster(release_lock=str(tmp_path / "mine"))
    assert environments(inventory) == {"environments": "mine-3.11"}
    assert role(inventory, "head").value("__release_wheel_sets") == ["3.11"]
    (tmp_path / "mine-no-gpu-3.11.txt").write_text("a==2\n")
    assert environments(inventory) == {"environments": "mine-no-gpu-3.11"}
    assert role(inventory, "head").value("__release_wheel_sets") == ["no-gpu-3.11"]
