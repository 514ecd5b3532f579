"""`fab gpu-check` on hosts that are only pretended."""

import io
import json

import pytest
from test_fab import fab

from fleet.actions.console import Console
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.ssh import Answer
from fleet.site.inventory import Inventory
from fleet.site.routes import Host
from fleet.site.topology import Task
from fleet.verbs.gpu_check import check_gpus
from tests.unit.fake_hosts import AnsweringHosts

RIGHT = {
    "expected": {"driver": "580.95.05", "gpus": 2, "devices": ["0", "1"]},
    "module": "580.95.05",
    "smi": "580.95.05",
    "gpus": [{"index": "0", "name": "Tesla T4"}, {"index": "1", "name": "Tesla T4"}],
    "devices": [{"device": "0", "error": None}, {"device": "1", "error": None}],
    "problems": [],
}
WRONG = RIGHT | {
    "smi": "580.173.02",
    "devices": [],
    "problems": ["nvidia-smi says driver 580.173.02 and the loaded module is 580.95.05"],
}


def answer_with(report):
    return Answer(stdout=json.dumps(report) + "\n", code=1 if report["problems"] else 0)


def show(as_json=False, gpu=("a", "b"), **answers):
    hosts = {name: Host(name, "192.0.2.1") for name in ("head", *answers)}
    tasks = [Task("chief", 0, "head", "192.0.2.1", 2222, server=False)]
    inventory = Inventory("inventory/x", {"gpu": list(gpu)}, hosts, tasks, {})
    pretence, out = AnsweringHosts(answers), io.StringIO()
    try:
        check_gpus(Cluster(inventory, pretence), Console(out, json_out=out if as_json else None))
    finally:
        show.text = out.getvalue()
    return pretence


def test_a_row_for_each_host_with_gpus():
    pretence = show(a=answer_with(RIGHT), b=answer_with(RIGHT))
    assert list(pretence.asked) == ["a", "b"]
    assert pretence.asked["a"] == "root /usr/local/sbin/psfleet-gpu-check --json"
    assert show.text.splitlines() == [
        "HOST  GPUS  MODEL     DRIVER     COMPUTES  STATE",
        "a     2/2   Tesla T4  580.95.05  2/2       ok",
        "b     2/2   Tesla T4  580.95.05  2/2       ok",
    ]


def test_trouble_is_shown_in_the_table_and_told_with_its_host():
    with pytest.raises(ClusterTrouble, match=r"^b: nvidia-smi says driver 580.173.02 and the loaded module"):
        show(a=answer_with(RIGHT), b=answer_with(WRONG))
    assert "b     2/2   Tesla T4  580.95.05 != 580.173.02  0/2       trouble" in show.text


def test_a_host_that_gives_no_report_is_trouble():
    with pytest.raises(
        ClusterTrouble, match="a: the check gave no report: sh: 1: cd: can't cd to /opt/trainer/current"
    ):
        show(gpu=["a"], a=Answer(stderr="sh: 1: cd: can't cd to /opt/trainer/current\n", code=2))


def test_an_unreachable_host_costs_the_others_nothing():
    with pytest.raises(HostsUnreachable, match="b is unreachable: no answer"):
        show(a=answer_with(RIGHT), b=Answer(unreachable="no answer"))
    assert "a     2/2   Tesla T4  580.95.05  2/2       ok" in show.text
    assert show.text.splitlines()[-1].endswith("unreachable")


def test_json_is_what_the_hosts_said():
    show(as_json=True, gpu=["a"], a=answer_with(RIGHT))
    assert json.loads(show.text)["hosts"] == {"a": RIGHT}


def test_without_the_group_there_is_nothing_to_check():
    with pytest.raises(OperatorMistake, match="has no host with a task in the group gpu"):
        show(gpu=[])


def test_the_verb_is_there_and_ends_with_2_on_an_inventory_without_gpus(capsys):
    assert fab("--list") == 0
    assert "  gpu-check " in capsys.readouterr().out
    assert fab("gpu-check", "--inventory", "inventory/three-machines") == 2
    assert "in the group gpu" in capsys.readouterr().err
