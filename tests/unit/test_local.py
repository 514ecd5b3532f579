"""The supervisor of local tasks, with small programs in place of the trainer."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.stand_ins import put_program
from tests.waiting import until
from trainer.command_line import parse
from trainer.core.failures import UserError
from trainer.core.settings.config import Config, ConfigError
from trainer.core.settings.strategies import STRATEGIES
from trainer.process import children
from trainer.process.fork_server import ForkServer
from trainer.process.gpus import share_gpus
from trainer.run.directory import RunDirectory
from trainer.tasks import local, local_supervisor
from trainer.tasks.local import (
    add_local_options,
    cluster_size,
    data_workers,
    local_cluster,
    make_tasks,
    setting,
    where_to_look,
)
from trainer.tasks.local_supervisor import LocalSupervisor, LocalTask, final

pytestmark = pytest.mark.timeout(60)
FOREVER = "import time\nwhile True: time.sleep(0.05)"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_supervisor, "RESTART_SECONDS", 0.05)
    monkeypatch.setattr(local_supervisor, "POLL_SECONDS", 0.01)


def task(name: str, script: str, trains: bool = False) -> LocalTask:
    return LocalTask(name, ["-c", script], dict(os.environ), trains)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pids(output: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in output.splitlines() if "started, pid" in line]


@pytest.mark.parametrize("code", [0, 78])
def test_coordinators_end_ends_all(capfd: pytest.CaptureFixture[str], code: int) -> None:
    tasks = [task("ps-0", FOREVER), task("worker-0", FOREVER), task("chief-0", f"raise SystemExit({code})")]
    assert LocalSupervisor(tasks).run() == code
    started = pids(capfd.readouterr().out)
    assert len(started) == 3
    assert all(map(gone, started))


def test_a_python_without_tensorflow_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None if name == "tensorflow" else object())
    with pytest.raises(ConfigError, match=r"has no tensorflow, which training takes: pip install '\.\[trainer\]'"):
        local.reject_missing_libraries()


def test_a_program_that_is_nowhere_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "reject_missing_libraries", lambda: None)
    with pytest.raises(UserError, match=r"program nett.deep:Net: there is no module 'nett'; looked first in "):
        local.run_local(parse(["local", "--program", "nett.deep:Net", "--shared-dir", str(tmp_path / "runs")]), {})
    assert not (tmp_path / "runs").exists()


def test_output_is_prefixed_with_the_task(capfd: pytest.CaptureFixture[str]) -> None:
    LocalSupervisor([task("chief-0", "import sys; print('hello'); print('trouble', file=sys.stderr)")]).run()
    out = capfd.readouterr().out
    assert "chief-0     | hello\n" in out
    assert "chief-0     | trouble\n" in out


def test_lines_of_tasks_that_print_at_once_stay_whole() -> None:
    prints = "for _ in range(2000): print('x' * 20)"
    script = (
        "import os, sys\nfrom trainer.tasks.local_supervisor import LocalSupervisor, LocalTask\n"
        f"command = ['-c', {prints!r}]\n"
        "tasks = [LocalTask(name, command, dict(os.environ)) for name in ('ps-0', 'ps-1', 'worker-0', 'chief-0')]\n"
        "LocalSupervisor(tasks).run()\n"
    )
    out = subprocess.run([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line for line in out.splitlines() if "pid" not in line and "ended" not in line]
    assert len(lines) > 100
    assert {line.partition("| ")[2] for line in lines} == {"x" * 20}


@pytest.mark.parametrize("code", [75, 1, 143, 139])
def test_coordinator_that_may_try_again_is_started_again(tmp_path: Path, code: int) -> None:
    flag = tmp_path / "flag"
    script = f"import pathlib\np = pathlib.Path({str(flag)!r})\nif p.exists(): raise SystemExit(0)\np.touch()\n"
    assert LocalSupervisor([task("chief-0", script + f"raise SystemExit({code})")]).run() == 0


def test_killed_server_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    starts = tmp_path / "starts"
    server = f"open({str(starts)!r}, 'a').write('x')\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    chief = f"import os, time\nwhile not os.path.exists({str(starts)!r}) or os.path.getsize({str(starts)!r}) < 3: "
    assert LocalSupervisor([task("worker-0", server), task("chief-0", chief + "time.sleep(0.01)")]).run() == 0
    assert "worker-0    | ended with 137; starting it again" in capfd.readouterr().out


def test_one_that_was_killed_while_memory_lacked_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    counts = iter([3, 3, 3, *[4] * 9])  # at the begin of each task, and as the server was killed
    monkeypatch.setattr(local_supervisor, "memory_kills", lambda: next(counts))
    monkeypatch.setattr(children, "memory_kills", lambda: 4)
    server = (
        "import os, signal, time; print('before:', os.environ['TRAINER_LACK'][:13], flush=True); time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    other = "import time; time.sleep(0.5); raise SystemExit(75)"
    chief = "import time; time.sleep(2)"
    assert LocalSupervisor([task("worker-0", server), task("worker-1", other), task("chief-0", chief)]).run() == 0
    out = capfd.readouterr().out
    assert "worker-0    | ended with 137, out of memory, limit " in out
    assert "worker-0    | before: out of memory\n" in out
    assert "worker-1    | ended with 75; starting it again" in out


def test_evaluator_that_finished_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    chief = "import time; time.sleep(0.5)"
    assert LocalSupervisor([task("evaluator-0", "pass"), task("chief-0", chief)]).run() == 0
    assert len(pids(capfd.readouterr().out)) == 2


def after(*paths: Path, seconds: float = 0.0) -> str:
    """Return a script that ends once these files are there, or so long after."""
    names = [str(path) for path in paths]
    return f"import os, time\nwhile not all(map(os.path.exists, {names})): time.sleep(0.01)\ntime.sleep({seconds})"


def twice(directory: Path, code: int) -> str:
    """Return a script that ends with this code the first time, and in the end makes `second`."""
    first, second = str(directory / "first"), str(directory / "second")
    return (
        f"import os\nif os.path.exists({first!r}): open({second!r}, 'x')\nelse: open({first!r}, 'x'); os._exit({code})"
    )


def test_server_that_ended_with_its_run_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_supervisor, "RESTART_SECONDS", 0.1)
    ends = {name: tmp_path / name for name in ("ps-0", "worker-0")}
    tasks = [task(name, f"open({str(path)!r}, 'x')") for name, path in ends.items()]
    assert LocalSupervisor([*tasks, task("chief-0", after(*ends.values(), seconds=1.0))]).run() == 0
    out = capfd.readouterr().out
    assert "ps-0        | ended with 0\n" in out
    assert len(pids(out)) == 3


def test_server_that_was_asked_for_a_new_process_gets_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = [task("ps-0", twice(tmp_path, 75)), task("chief-0", after(tmp_path / "second"))]
    assert LocalSupervisor(tasks).run() == 0
    assert "ps-0        | ended with 75; starting it again" in capfd.readouterr().out


def test_evaluator_may_finish_after_the_coordinator(tmp_path: Path) -> None:
    done = tmp_path / "done"
    evaluator = f"import time; time.sleep(0.5); open({str(done)!r}, 'w')"
    assert LocalSupervisor([task("evaluator-0", evaluator), task("chief-0", "pass")]).run() == 0
    assert done.exists()


def test_training_worker_may_finish_after_the_coordinator(tmp_path: Path) -> None:
    done = tmp_path / "done"
    worker = f"import time; time.sleep(0.5); open({str(done)!r}, 'w')"
    assert LocalSupervisor([task("worker-0", worker, trains=True), task("chief-0", "pass")]).run() == 0
    assert done.exists()


def test_training_workers_error_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    tasks = [task("worker-0", "raise SystemExit(78)", trains=True), task("chief-0", FOREVER)]
    assert LocalSupervisor(tasks).run() == 78
    assert all(map(gone, pids(capfd.readouterr().out)))


def test_training_worker_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = [task("worker-0", twice(tmp_path, 75), trains=True), task("chief-0", after(tmp_path / "second"))]
    assert LocalSupervisor(tasks).run() == 0
    assert len(pids(capfd.readouterr().out)) == 3


def supervise(
    tmp_path: Path, chief: str, worker: str = FOREVER, trains: bool = False, leave: float = 5.0
) -> subprocess.Popen[str]:
    """Run a supervisor as its own process, which gives others so many seconds to end once the chief has stopped."""
    script = (
        "import os, sys\nfrom trainer.tasks import local_supervisor\n"
        "from trainer.tasks.local_supervisor import LocalSupervisor, LocalTask\n"
        f"local_supervisor.LEAVE_SECONDS = {leave}\n"
        "def task(name, script, trains=False):\n"
        "    return LocalTask(name, ['-c', script], dict(os.environ), trains)\n"
        f"tasks = [task('worker-0', {worker!r}, {trains}), task('chief-0', {chief!r})]\n"
        "code = LocalSupervisor(tasks).run()\nsys.exit(code)\n"
    )
    return subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


SAVES = (
    "import signal, sys, time\n"
    "def stop(*a):\n    time.sleep(0.3); print('saved'); sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, stop)\nprint('trains')\n" + FOREVER
)


def stop_when_all_train(process: subprocess.Popen[str], number: int, trainers: int) -> str:
    """Send the signal when all train, and return the whole output."""
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if "trains" in line:
            trainers -= 1
            if trainers == 0:
                process.send_signal(number)
    return "".join(output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_lets_the_coordinator_save(tmp_path: Path, ended: list[subprocess.Popen[str]], number: int) -> None:
    process = supervise(tmp_path, SAVES)
    ended.append(process)
    text = stop_when_all_train(process, number, trainers=1)
    assert process.wait() == 143
    assert "chief-0     | saved" in text
    assert all(map(gone, pids(text)))


def test_stop_lets_every_member_that_trains_save(tmp_path: Path, ended: list[subprocess.Popen[str]]) -> None:
    process = supervise(tmp_path, SAVES, SAVES.replace("0.3", "1"), trains=True)
    ended.append(process)
    text = stop_when_all_train(process, signal.SIGTERM, trainers=2)
    assert process.wait() == 143
    assert "chief-0     | saved" in text
    assert "worker-0    | saved" in text
    assert all(map(gone, pids(text)))


def test_tasks_die_with_a_killed_supervisor(ended: list[subprocess.Popen[str]]) -> None:
    child = (
        "import os, sys\nfrom trainer.process.warm_start import die_with_parent\n"
        "die_with_parent(os.getppid())\nprint('ready')\n" + FOREVER
    )
    script = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-u', '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline()\nprint(p.pid)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True)
    ended.append(parent)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: gone(pid))


def test_stop_during_tensorflows_import_starts_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    forks = ForkServer(tmp_path / "nobody listens yet")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert LocalSupervisor([task("chief-0", FOREVER)], forks).run() == 143
    assert "started" not in capfd.readouterr().out


def test_task_that_ended_soon_after_its_start_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_supervisor, "RESTART_SECONDS", 60.0)
    soon, late = local_supervisor.Restarts(), local_supervisor.Restarts()
    soon.started(100.0)
    late.started(100.0 - 2 * local_supervisor.STEADY_SECONDS)
    for one in (soon, late):
        assert not one.is_due(100.0)  # as long as its process lives
        one.plan(100.0)
    assert late.is_due(100.0)
    assert not soon.is_due(130.0)
    assert soon.is_due(160.0)
    soon.started(160.0)
    assert not soon.is_due(200.0)
    assert soon.starts == 2


def test_final_codes_are_those_that_systemd_leaves_alone() -> None:
    assert [code for code in (0, 1, 75, 78, 137, 143) if final(code)] == [0, 78]


def test_cluster_has_free_ports_of_its_own() -> None:
    cluster = local_cluster(3, 2)
    addresses = [address for job in cluster.values() for address in job]
    assert [len(cluster[job]) for job in ("chief", "worker", "ps")] == [1, 3, 2]
    assert len(set(addresses)) == 6
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_member_that_waits_for_a_stopped_coordinator_is_ended(
    tmp_path: Path, ended: list[subprocess.Popen[str]]
) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('trains')\n" + FOREVER
    process = supervise(tmp_path, SAVES, deaf, trains=True, leave=1.0)
    ended.append(process)
    text = stop_when_all_train(process, signal.SIGTERM, trainers=2)
    assert process.wait() == 143
    assert all(map(gone, pids(text)))


@pytest.mark.parametrize(
    ("strategy", "given", "sizes", "message"),
    [
        ("parameter_server", (None, None), (2, 1), ""),
        ("parameter_server", (3, 2), (3, 2), ""),
        ("multi_worker_mirrored", (3, None), (3, 0), ""),
        ("multi_worker_mirrored", (None, 2), (2, 0), "--ps 2 is not used: strategy multi_worker_mirrored has no ps"),
        ("mirrored", (None, None), (0, 0), ""),
        ("one_device", (4, None), (0, 0), "--workers 4 is not used: strategy one_device has no worker"),
    ],
)
def test_strategy_decides_the_jobs(
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    given: tuple[int | None, int | None],
    sizes: tuple[int, int],
    message: str,
) -> None:
    assert cluster_size(strategy, *given) == sizes
    out = capsys.readouterr().out
    assert message in out
    assert bool(out) == bool(message)
    assert sorted(local_cluster(*sizes)) == sorted(STRATEGIES[strategy].jobs)


def test_the_data_service_is_started_before_those_that_read_from_it() -> None:
    config = Config(program="a:B", input="service", input_sharding="off")
    assert (data_workers(config, None), data_workers(config, 3)) == (1, 3)
    tasks = make_tasks(config, Path("/tmp/run.json"), local_cluster(1, 1, 2), evaluator=False)
    assert [made.name for made in tasks] == ["dispatcher-0", "data-0", "data-1", "ps-0", "worker-0", "chief-0"]
    with pytest.raises(ConfigError, match="--data must be at least 1, not 0"):
        data_workers(config, 0)


def test_the_parameters_that_were_checked_are_those_of_every_task() -> None:
    config = Config(program="a:B", program_args={"rate": 0.5, "layers": [8, 8]})
    for made in make_tasks(config, Path("/tmp/run.json"), local_cluster(1, 1), evaluator=True):
        assert parse(made._spawn.args[1][4:]).program_args == ["rate=0.5", "layers=[8, 8]"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stepz 10", "local: unknown key 'stepz' in the run settings: did you mean 'steps'?"),
        ("--worker 3", "local: unknown key 'worker' in the run settings: did you mean 'workers'?"),
        ("--see=4", "local: unknown key 'see' in the run settings: did you mean 'seed'?"),
        ("10", "local: '10' belongs to no option; a setting is written as --steps 1000"),
        ("--program-args {}", "--program-args is no option: write each parameter of the program as --set learning_r"),
    ],
)
def test_an_unknown_setting_is_named_with_the_one_that_was_meant(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["local", "--program", "a:B", *words.split()])
    assert message in capsys.readouterr().err


def test_data_workers_that_nobody_reads_from_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert data_workers(Config(program="a:B"), 2) == 0
    assert "--data 2 is not used: input is local" in capfd.readouterr().out


def test_every_member_of_a_cluster_without_ps_trains() -> None:
    config = Config(program="a:b", strategy="multi_worker_mirrored")
    tasks = make_tasks(config, Path("/tmp/run.json"), local_cluster(2, 0), evaluator=True)
    assert [(item.name, item.trains) for item in tasks] == [
        ("worker-0", True),
        ("worker-1", True),
        ("evaluator-0", False),
        ("chief-0", True),
    ]


@pytest.mark.parametrize(("workers", "servers", "named"), [(0, 1, "--workers"), (1, 0, "--ps")])
def test_cluster_without_members_is_refused(workers: int, servers: int, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} must be at least 1, not 0"):
        cluster_size("parameter_server", workers, servers)


def test_every_setting_has_an_option() -> None:
    parser = argparse.ArgumentParser()
    add_local_options(parser)
    options = parser.parse_args(
        ["--program", "a:b", "--checkpoint-steps", "7", "--steps-per-execution", "auto", "--seed", "3"]
    )
    assert (options.checkpoint_steps, options.steps_per_execution, options.seed) == (7, "auto", 3)
    assert not hasattr(options, "steps")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("steps", "3", 3), ("steps_per_execution", "auto", "auto"), ("checkpoint_seconds", "1.5", 1.5), ("run", "3", "3")],
)
def test_option_text_becomes_the_settings_type(key: str, text: str, value: object) -> None:
    assert setting(key, text) == value


def test_tasks_get_what_hosts_get_and_none_of_our_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.delenv("DATA_DIR", raising=False)
    config = Config(program="a:b", run="r")
    tasks = make_tasks(config, Path("/tmp/run.json"), local_cluster(2, 1), evaluator=True)
    assert [item.name for item in tasks] == ["ps-0", "worker-0", "worker-1", "evaluator-0", "chief-0"]
    environment = tasks[0]._environment
    assert environment["TRAINER_SETTINGS"] == "/tmp/run.json"
    assert environment["DATA_DIR"] == "/srv/trainer/data"
    assert "NOTIFY_SOCKET" not in environment


def test_a_coordinator_that_the_program_ends_with_0_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    script = (
        f"import pathlib; done = pathlib.Path({str(done)!r}); done.with_suffix('.once').exists() and done.touch(); "
    )
    script += "done.with_suffix('.once').touch()"
    assert LocalSupervisor([task("chief-0", script)], is_done=done.exists).run() == 0
    assert done.exists()
    assert capsys.readouterr().out.count("ended with 0 before the run was finished: does the program call") == 1


HIDDEN_OF = {"evaluator-0": "-1", "chief-0": "-1"}


@pytest.mark.parametrize(
    ("gpus", "tasks", "shares"),
    [
        (["0", "1", "2", "3"], 2, ["0,1", "2,3"]),
        (["0", "1", "2"], 2, ["0", "1"]),  # each task that trains has as many
        (["0"], 2, ["0", "0"]),
        (["GPU-a", "GPU-b"], 3, ["GPU-a", "GPU-b", "GPU-a"]),
    ],
)
def test_gpus_are_dealt_out_to_the_tasks_that_train(gpus: list[str], tasks: int, shares: list[str]) -> None:
    assert share_gpus(gpus, tasks) == shares


@pytest.mark.parametrize(
    ("strategy", "visible"),
    [
        (
            "parameter_server",
            {"ps-0": "-1", "worker-0": "GPU-a", "worker-1": "GPU-b", "evaluator-0": "-1", "chief-0": "-1"},
        ),
        ("mirrored", {**HIDDEN_OF, "chief-0": "GPU-a,GPU-b"}),
    ],
)
def test_a_task_sees_its_own_gpus_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, visible: dict[str, str]
) -> None:
    """nvidia-smi is a stand-in: there is no GPU here."""
    program = put_program(tmp_path / "nvidia-smi", "#!/bin/sh\nprintf 'GPU-a\\nGPU-b\\n'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = Config(program="a:b", strategy=strategy)
    jobs = local_cluster(*cluster_size(strategy, None, None))

    def environments() -> dict[str, str | None]:
        tasks = make_tasks(config, Path("/tmp/run.json"), jobs, evaluator=True)
        return {made.name: made._environment.get("CUDA_VISIBLE_DEVICES") for made in tasks}

    assert environments() == visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert set(environments().values()) == {"-1"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert set(environments().values()) == {None}


def test_the_end_says_where_the_page_and_the_curves_are(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a b", "first")
    curves = f"curves      tensorboard --logdir '{tmp_path}/a b/runs'"
    assert where_to_look(directory) == curves
    directory.path.mkdir(parents=True)
    directory.report.touch()
    assert where_to_look(directory) == f"page        {directory.path}/report.html, for a browser\n{curves}"
