"""What runs is what was released, and a secret is where it belongs and nowhere else."""

import shutil
import subprocess

import pytest
import yaml

from tests.hosts import wait_until

from .conftest import fab, play, wait_for_progress

PLANTED = "planted-3f9c0d71b2-secret"
PATTERN = "plante[d]-3f9c0d71b2-secret"  # which does not find its own command line
CHECK = "/usr/local/sbin/psfleet-check-release --signers /opt/trainer/signers"


def test_each_host_has_what_was_signed(lab):
    for host in lab.values():
        with host.sudo():
            assert host.check_output(CHECK) == ""


def test_a_deep_look_finds_nothing_on_right_hosts(lab, long_run):
    done = fab("status", "--deep", inventory=long_run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are as they were installed" in done.stdout


@pytest.mark.parametrize(
    ("damage", "fix"),
    [
        ("cp -p trainer/__main__.py /root && echo x >>trainer/__main__.py", "mv /root/__main__.py trainer"),
        pytest.param("touch tensorflow.py", "rm tensorflow.py", marks=pytest.mark.slow),
    ],
)
def test_a_release_that_was_changed_starts_no_task_until_it_is_fixed(damage, fix, lab, long_run):
    """By hand here: test_repair.py has `site.yml` fix such files."""
    host = lab["worker-1"]
    with host.sudo():
        host.run_expect([0], f"sh -c 'cd /opt/trainer/current && {damage}'")
        host.run("systemctl restart trainer@worker-1")
        command = "journalctl --unit trainer@worker-1 --lines 30 --output cat"
        wait_until(
            lambda: "`ansible-playbook site.yml` fixes it" in host.check_output(command), 60, "the start is refused"
        )
        assert not host.service("trainer@worker-1").is_running
        host.run_expect([0], f"sh -c 'cd /opt/trainer/current && {fix}'")
        wait_until(lambda: host.service("trainer@worker-1").is_running, 120, "the task runs again by itself")
    wait_for_progress(lab)


def test_another_key_ships_nothing(lab, long_run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(long_run, other)
    variables = other / "group_vars" / "all.yml"
    settings = yaml.safe_load(variables.read_text())
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    settings["release_signers"] = [key.with_suffix(".pub").read_text().strip()]
    variables.write_text(yaml.safe_dump(settings))
    done = fab("start-cluster", "--detach", inventory=other)
    assert done.returncode != 0
    assert "may sign no release of this cluster" in done.stdout + done.stderr
    wait_for_progress(lab)


@pytest.mark.slow
def test_a_planted_secret_is_in_its_place_alone(lab, long_run, tmp_path):
    secret = tmp_path / "secret"
    shutil.copytree(long_run, secret)
    variables = secret / "group_vars" / "all.yml"
    variables.write_text(yaml.safe_dump({**yaml.safe_load(variables.read_text()), "trainer_secrets": {"KEY": PLANTED}}))
    done = play("site.yml", "--diff", "-vvv", inventory=secret)
    assert done.code == 0, done.failed
    wait_for_progress(lab)
    places = "/etc /opt/trainer /srv/trainer /var/log /tmp /var/tmp /root /home /usr/local"
    own, proofs = "/etc/trainer/secrets/KEY", "/etc/trainer/secrets-coming/KEY"
    for name, host in lab.items():
        with host.sudo():
            found = host.run(f"grep -rlaE --exclude-dir=envs '{PATTERN}' {places}").stdout.split()
            runs_program = name == "head"
            assert set(found) == ({own, proofs} if runs_program else set()), name
            assert host.run(f"journalctl --all --output export | grep -aE '{PATTERN}'").stdout == ""
            assert host.run(f"systemctl show --all 'trainer@*' | grep -E '{PATTERN}'").stdout == ""
            assert host.run(f"grep -alE '{PATTERN}' /proc/[0-9]*/cmdline /proc/[0-9]*/environ").stdout == ""
    with lab["head"].sudo():
        assert lab["head"].check_output(f"stat -c %a {own} {proofs}").split() == ["600", "600"]
        assert lab["head"].check_output("cat /run/credentials/trainer@chief-0.service/KEY") == PLANTED
        assert lab["head"].run("setpriv --reuid=trainer --regid=trainer --clear-groups cat " + own).rc != 0
    again = play("site.yml", inventory=long_run)
    assert again.code == 0, again.failed
    with lab["head"].sudo():
        assert not lab["head"].file(own).exists
        assert not lab["head"].file(proofs).exists
    wait_for_progress(lab)
