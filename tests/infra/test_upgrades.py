"""Packages that the distribution upgrades by itself while training goes on."""

import pytest

from .conftest import play, units

CONFIG = "/etc/needrestart/conf.d/60-psfleet.conf"


@pytest.fixture
def needrestart(lab, long_run):
    """A host that restarts, after an upgrade, what still runs an old library; as Ubuntu 24.04 comes."""
    host = lab["worker-1"]
    apt = "env DEBIAN_FRONTEND=noninteractive apt-get -qq"
    with host.sudo():
        host.run_expect([0], f"{apt} update")
        host.run_expect([0], f"{apt} install --yes --no-install-recommends needrestart")
        yield host
        host.run_expect([0], f"{apt} purge --yes --autoremove needrestart")
        host.run_expect([0], "rm -rf /etc/needrestart")


def test_an_upgraded_library_restarts_no_training_task(lab, long_run, needrestart):
    converged = play("site.yml", "--limit", "worker-1", inventory=long_run)
    assert converged.code == 0, converged.failed
    assert converged.changed == [("worker-1", "Keep needrestart from restarting training tasks")]
    before = units(lab)
    # What an upgrade does: another file under the old one's name.
    library = needrestart.check_output("find /usr/lib -name libssl.so.3")
    needrestart.run_expect([0], f"sh -c 'cp -p {library} {library}.new && mv {library}.new {library}'")
    assert after_needrestart(needrestart, "Service restarts being deferred:")
    assert units(lab) == before
    # The same without the setting, so that the test knows what it kept away.
    needrestart.run_expect([0], f"rm {CONFIG}")
    assert after_needrestart(needrestart, "Restarting services...")
    assert {task for task, started in units(lab).items() if started != before[task]} == {"worker-1"}


def after_needrestart(host, heading):
    """Whether needrestart lists the training task below this heading."""
    lines = host.check_output("needrestart -r a </dev/null").splitlines()
    listed = lines[lines.index(heading) + 1 :]
    end = listed.index("") if "" in listed else None
    return " systemctl restart trainer@worker-1.service" in listed[:end]
