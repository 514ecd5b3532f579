"""A host that was away while the cluster was switched to another release must not join with its own."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import pytest

import trainer.__main__
from trainer.__main__ import read_present_config, why_out
from trainer.cluster.spec import ClusterConfig
from trainer.core.settings.config import Config
from trainer.run.release import MissedRelease, own_release, reject_missed_release
from trainer.run.replaced import Replaced, reject_replaced


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(program="p:P", shared_dir=str(tmp_path))


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A host whose current release is `old`, and that has `new` too."""
    for name in ("old", "new"):
        (tmp_path / "releases" / name).mkdir(parents=True)
    link = tmp_path / "current"
    link.symlink_to("releases/old")
    return link


def tell(config: Config, text: str) -> None:
    (Path(config.shared_dir) / "release.json").write_text(text)


def test_a_host_that_missed_a_release_is_refused_with_the_fix(config: Config, link: Path) -> None:
    tell(config, '{"release": "new"}')
    message = "has release old, and the cluster runs new: `ansible-playbook site.yml --limit HOST` brings"
    with pytest.raises(MissedRelease, match=message):
        reject_missed_release(config, link, link.resolve())


@pytest.mark.parametrize("record", [None, '{"release": "old"}', "{}", "{", "[]"])
def test_a_host_that_missed_none_takes_part(config: Config, link: Path, record: str | None) -> None:
    if record is not None:
        tell(config, record)
    reject_missed_release(config, link, link.resolve())


def test_a_task_that_is_about_to_be_restarted_is_left_alone(config: Config, link: Path) -> None:
    """Its host has been switched, and its coordinator may be saving."""
    tell(config, '{"release": "new"}')
    own = link.resolve()
    link.unlink()
    link.symlink_to("releases/new")
    reject_missed_release(config, link, own)


def test_without_a_deployment_and_without_a_shared_path_nothing_is_compared(config: Config, link: Path) -> None:
    tell(config, '{"release": "new"}')
    reject_missed_release(config, None, link.resolve())
    reject_missed_release(config.replace(local_run_dir=True), link, link.resolve())


def test_a_machine_whose_place_another_has_stays_out_at_its_old_address(config: Config) -> None:
    path = Path(config.shared_dir) / "replaced.json"
    reject_replaced(config, "worker-0", "192.0.2.30:2400", "w-a")
    path.write_text('{"worker-0": ["192.0.2.30:2400"]}')
    with pytest.raises(Replaced, match=f"worker-0 was replaced at 192.0.2.30:2400\\. .* remove worker-0 from {path}"):
        reject_replaced(config, "worker-0", "192.0.2.30:2400", None)  # its files are of an older release
    reject_replaced(config, "worker-0", "192.0.2.99:2400", "w-x")  # the new one
    reject_replaced(config, "worker-5", "192.0.2.30:2400", "w-a")  # the old one in another place
    reject_replaced(config.replace(local_run_dir=True), "worker-0", "192.0.2.30:2400", "w-a")
    path.write_text("{")
    reject_replaced(config, "worker-0", "192.0.2.30:2400", "w-a")


@pytest.mark.parametrize(("task", "address"), [("worker-0", "192.0.2.30:2400"), ("evaluator-0", None)])
def test_a_machine_whose_place_and_address_another_has_stays_out_by_its_name(
    config: Config, task: str, address: str | None
) -> None:
    """As an evaluator, which has no address that others know."""
    (Path(config.shared_dir) / "replaced.json").write_text(f'{{"{task}": ["w-a"]}}')
    with pytest.raises(Replaced, match=f"{task} was replaced at w-a"):
        reject_replaced(config, task, address, "w-a")
    reject_replaced(config, task, address, "w-x")


@pytest.mark.parametrize("host", ["w-a", "w-x"])
def test_an_evaluator_asks_whether_another_has_its_place(
    config: Config, link: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    (Path(config.shared_dir) / "replaced.json").write_text('{"evaluator-0": ["w-a"]}')
    monkeypatch.setattr(trainer.__main__, "read_config", lambda *_: config)
    cluster = ClusterConfig({"chief": ["192.0.2.10:2222"], "ps": ["192.0.2.20:2300"]}, "evaluator", 0)
    environment = {"TRAINER_RELEASE": str(link), "TRAINER_HOST": host}
    with pytest.raises(Replaced) if host == "w-a" else contextlib.nullcontext():
        read_present_config(argparse.Namespace(), environment, cluster, link.resolve())


def test_a_replaced_machine_that_missed_a_release_too_hears_of_its_place(
    config: Config, link: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release fixes that, and the inventory has no such host."""
    tell(config, '{"release": "new"}')
    (Path(config.shared_dir) / "replaced.json").write_text('{"ps-0": ["192.0.2.20:2300"]}')
    monkeypatch.setattr(trainer.__main__, "read_config", lambda *_: config)
    cluster = ClusterConfig({"chief": ["192.0.2.10:2222"], "ps": ["192.0.2.20:2300"]}, "ps", 0)
    with pytest.raises(Replaced):
        read_present_config(argparse.Namespace(), {"TRAINER_RELEASE": str(link)}, cluster, link.resolve())


@pytest.mark.parametrize(("looks", "missed"), [(2, None), (99, "not this one")])
def test_a_record_that_is_late_is_waited_for(
    looks: int, missed: str | None, monkeypatch: pytest.MonkeyPatch, config: Config
) -> None:
    monkeypatch.setattr(trainer.__main__, "RELEASE_SECONDS", 5.0)
    now = [0.0]
    monkeypatch.setattr(trainer.__main__.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(trainer.__main__.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def selected() -> Config:
        if now[0] < looks:
            raise MissedRelease("not this one")
        return config

    assert why_out(selected) == missed


@pytest.mark.parametrize(("text", "release"), [(None, None), ("{", None), ("{}", None), ('{"id": "abc"}', "abc")])
def test_a_process_knows_the_release_that_it_works_in(text: str | None, release: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "release.json").write_text(text)
    assert own_release(tmp_path) == release
