from bench.provision import index_settings, shape_of, stat_plays

ALL, HEAD = ("head", "ps-0", "worker-0"), ("head",)


def result(**hosts):
    return {"hosts": {host: {"skipped": True} if skipped else {"changed": False} for host, skipped in hosts.items()}}


def test_tasks_are_counted_where_they_ran():
    run = {
        "plays": [
            {"tasks": [result(head=False, ps=False), result(head=False, ps=True), result(head=True, ps=True)]},
            {"tasks": [result(head=True)]},
            {"tasks": []},
        ]
    }
    assert shape_of(run) == [[("head", "ps"), ("head",)]]


def test_stat_plays_have_as_many_tasks_on_as_many_hosts():
    plays = stat_plays([[ALL, ALL, HEAD, ("ps-0", "worker-0")], [("localhost",)]])
    assert [play["hosts"] for play in plays] == [["head", "ps-0", "worker-0"], ["localhost"]]
    assert [play["become"] for play in plays] == [True, False]
    assert all("ansible.builtin.stat" in task for play in plays for task in play["tasks"])
    limits = [(task.get("run_once"), task.get("when")) for task in plays[0]["tasks"]]
    assert limits == [(None, None), (None, None), (True, None), (None, "inventory_hostname in ['ps-0', 'worker-0']")]


def test_hosts_are_told_how_this_machine_reaches_the_index():
    config = "\n".join(
        [
            "global.index-url='https://index.invalid/simple'",
            "global.extra-index-url='file:///srv/simple https://other.invalid/simple'",
            "global.find-links='/srv/wheels'",
            "global.default-timeout='15'",
            ":env:.default-timeout='60'",
        ]
    )
    settings = index_settings(config, {"https_proxy": "http://proxy.invalid:3128", "HOME": "/root"})
    assert settings.pop("PIP_CONFIG_FILE") == "/dev/null"
    assert settings == {
        "https_proxy": "http://proxy.invalid:3128",
        "PIP_INDEX_URL": "https://index.invalid/simple",
        "PIP_EXTRA_INDEX_URL": "https://other.invalid/simple",
        "PIP_DEFAULT_TIMEOUT": "60",
        "PIP_FIND_LINKS": "",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
