import pytest

from bench.control import groups_of, growth, inventory_of, render_all


@pytest.mark.parametrize("number", [3, 40])
def test_simulated_cluster_is_one_that_preflight_takes(number, tmp_path):
    render_all(groups_of(number), tmp_path)
    assert len(list(tmp_path.iterdir())) == number
    assert len(list(tmp_path.glob("*/*.env"))) == number + 1  # the head's host has the evaluator as well


def test_every_host_has_an_address_of_its_own():
    hosts = {host: v for group in groups_of(1000).values() for host, v in group.items() if v}
    assert len(hosts) == len({v["ansible_host"] for v in hosts.values()}) == 1000


def test_site_variables_reach_every_host():
    written = inventory_of(groups_of(3))["all"]
    assert written["vars"]["trainer_run"]["program"]
    assert list(written["children"]["worker"]["hosts"]) == ["worker-0"]


def test_growth_is_one_when_a_host_costs_the_same():
    assert growth([100, 300, 1000], [1.0, 3.0, 10.0]) == 1
    assert growth([100, 1000], [1.0, 20.0]) == 2
