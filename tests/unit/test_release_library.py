"""The release role's modules, in the parts that need neither a host nor the index."""

import base64
import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import python_environment
import release_archive
import release_prune
import wheelhouse

from tests.unit.stand_ins import result_of

LOCK = """\
# made by hand
my-tool==1.0 \\
    --hash=sha256:{digest} \\
    --hash=sha256:{other}
"""


@pytest.fixture
def kit(tmp_path):
    """A kit with one module and one lock."""
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("stale")
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "cpu-3.11.txt").write_text("a==1\n")
    return {"kit": str(package), "lock": str(tmp_path / "locks" / "cpu")}


def names(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getnames()


def test_the_same_content_gives_the_same_release(kit):
    first, archive = release_archive.build(program="", **kit)
    Path(kit["kit"], "__init__.py").touch()
    assert release_archive.build(program="", **kit) == (first, archive)
    assert names(archive) == ["SHA256SUMS", "locks/cpu-3.11.txt", "release.json", "trainer/__init__.py"]
    assert first["environments"]["3.11"]["name"].startswith("cpu-3.11-")


def test_a_cluster_without_gpus_has_the_release_that_it_always_had(kit, tmp_path):
    """As the kit built it before there was a second lock, from the description of what a release is."""
    (tmp_path / "locks" / "cuda-3.11.txt").write_text("a==1\nnvidia==1\n")
    release, archive = release_archive.build(program="", **kit)
    files = {"locks/cpu-3.11.txt": b"a==1\n", "trainer/__init__.py": b""}
    digest = hashlib.sha256(b"".join(f"{name}\0{len(data)}\0".encode() + data for name, data in files.items()))
    environment = f"cpu-3.11-{hashlib.sha256(files['locks/cpu-3.11.txt']).hexdigest()[:12]}"
    written = {"id": digest.hexdigest()[:12]} | {
        "environments": {"3.11": {"name": environment, "lock": "locks/cpu-3.11.txt"}}
    }
    assert release == written
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.extractfile("release.json").read().decode() == json.dumps(written, indent=2) + "\n"


def test_gpus_bring_a_second_lock_into_the_one_release(kit, tmp_path):
    (tmp_path / "locks" / "cuda-3.11.txt").write_text("a==1\nnvidia==1\n")
    alone, _ = release_archive.build(program="", **kit)
    release, archive = release_archive.build(program="", **kit, lock_gpu=str(tmp_path / "locks" / "cuda"))
    listed = ["SHA256SUMS", "locks/cpu-3.11.txt", "locks/cuda-3.11.txt", "release.json", "trainer/__init__.py"]
    assert names(archive) == listed
    assert release["environments"] == alone["environments"]
    assert release["gpu_environments"]["3.11"]["lock"] == "locks/cuda-3.11.txt"
    assert release["gpu_environments"]["3.11"]["name"].startswith("cuda-3.11-")
    assert release["id"] != alone["id"]


def test_a_missing_lock_is_refused_by_its_setting(kit, tmp_path):
    with pytest.raises(release_archive.ReleaseError, match=r"release_lock_gpu: no file .*mine-cuda-<python>\.txt"):
        release_archive.build(program="", **kit, lock_gpu=str(tmp_path / "locks" / "mine-cuda"))


def test_two_locks_of_one_name_are_refused(kit, tmp_path):
    (tmp_path / "cpu-3.11.txt").write_text("a==2\n")
    with pytest.raises(release_archive.ReleaseError, match="has the name of another lock"):
        release_archive.build(program="", **kit, lock_gpu=str(tmp_path / "cpu"))


def test_a_changed_program_changes_the_release_and_not_the_environment(kit, tmp_path):
    program = tmp_path / "mine"
    (program / "models").mkdir(parents=True)
    (program / "models" / "wide.py").write_text("x = 1\n")
    first, archive = release_archive.build(program=str(program), **kit)
    assert "models/wide.py" in names(archive)
    # Tried there by `python -m trainer local`, the program is the same.
    (program / "psfleet-runs" / "runs").mkdir(parents=True)
    (program / "psfleet-runs" / "runs" / "status.json").write_text("{}")
    assert release_archive.build(program=str(program), **kit)[1] == archive
    (program / "models" / "wide.py").write_text("x = 2\n")
    second, _ = release_archive.build(program=str(program), **kit)
    assert second["id"] != first["id"]
    assert second["environments"] == first["environments"]


def test_a_package_is_shipped_under_its_own_name(kit, tmp_path):
    package = tmp_path / "wide"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert "wide/__init__.py" in names(release_archive.build(program=str(package), **kit)[1])


def test_a_wheel_is_unpacked(kit, tmp_path):
    wheel = tmp_path / "wide-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("wide/__init__.py", "")
        file.writestr("wide-1.0.dist-info/RECORD", "")
    assert "wide/__init__.py" in names(release_archive.build(program=str(wheel), **kit)[1])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"trainer/__init__.py": ""}, "brings 'trainer'"),
        ({"trainer.py": ""}, "brings 'trainer.py'"),
        ({"README.md": ""}, "holds no Python file"),
        ({"a.py": "", "data.bin": "0" * (65 * 2**20)}, "larger than 64 MiB"),
    ],
)
def test_a_program_that_cannot_be_shipped_is_refused(kit, tmp_path, files, message):
    program = tmp_path / "program"
    for name, text in files.items():
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text(text)
    with pytest.raises(release_archive.ReleaseError, match=message):
        release_archive.build(program=str(program), **kit)


def test_a_missing_program_is_refused(kit):
    with pytest.raises(release_archive.ReleaseError, match="neither a directory nor a wheel"):
        release_archive.build(program="/no/such/place", **kit)


def test_wheels_are_proven_against_the_lock(tmp_path):
    (tmp_path / "my_tool-1.0-py3-none-any.whl").write_bytes(b"right")
    digest = hashlib.sha256(b"right").hexdigest()
    lock = wheelhouse.read_lock(LOCK.format(digest=digest, other="0" * 64))
    assert lock == {"my-tool==1.0": {digest, "0" * 64}}
    assert wheelhouse.compare(lock, tmp_path) == ([], [])
    (tmp_path / "my_tool-1.0-py3-none-any.whl").write_bytes(b"wrong")
    assert wheelhouse.compare(lock, tmp_path) == (["my-tool==1.0"], ["my_tool-1.0-py3-none-any.whl"])
    assert wheelhouse.compare(lock, tmp_path / "absent") == (["my-tool==1.0"], [])


def test_a_wheel_of_another_set_is_taken_from_there(tmp_path):
    cpu, cuda = tmp_path / "3.11", tmp_path / "cuda-3.11"
    for directory in (cpu, cuda):
        directory.mkdir()
    (cpu / "my_tool-1.0-py3-none-any.whl").write_bytes(b"right")
    (cpu / "another-1.0-py3-none-any.whl").write_bytes(b"of no use here")
    lock = wheelhouse.read_lock(LOCK.format(digest=hashlib.sha256(b"right").hexdigest(), other="0" * 64))
    wheelhouse.adopt(lock, ["my-tool==1.0"], cuda)
    assert wheelhouse.compare(lock, cuda) == ([], [])
    assert [file.name for file in cuda.iterdir()] == ["my_tool-1.0-py3-none-any.whl"]


def test_only_what_is_missing_is_asked_for():
    text = "# made by hand\na==1 \\\n    --hash=sha256:00\nmy-tool==1.0 ; x \\\n    --hash=sha256:11\nz==2\n"
    assert wheelhouse.excerpt(text, ["my-tool==1.0"]) == "my-tool==1.0 ; x \\\n    --hash=sha256:11\n"
    assert wheelhouse.excerpt(text, ["z==2"]) == "z==2\n"


# Stands for pip: it waits for as many others as TOGETHER says, and writes its wheels, or does as BROKEN and SLOW say.
PIP = """
import os, sys, tempfile, time
from pathlib import Path
notes, place = Path(os.environ["NOTES"]), Path(sys.argv[-1])
(notes / place.name).write_text(tempfile.gettempdir())
end = time.monotonic() + 30
while len(list(notes.iterdir())) < int(os.environ["TOGETHER"]) and time.monotonic() < end:
    time.sleep(0.01)
asked = Path(sys.argv[sys.argv.index("--requirement") + 1]).read_text().split()
if os.environ.get("BROKEN") in asked:
    sys.exit("no " + os.environ["BROKEN"])
if os.environ.get("SLOW") in asked:
    time.sleep(60)
    (notes / "end").touch()
for name in asked:
    (place / (name.partition("==")[0] + "-1.0-py3-none-any.whl")).write_bytes(b"right")
"""


class Module:
    """What the module `wheelhouse` is given."""

    params = {"lock": "locks/mine", "python": "3.13"}  # noqa: RUF012

    def fail_json(self, **result):
        raise RuntimeError(result["msg"])


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that is PIP; the directory that it notes in."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path/pip.py").write_text(PIP)
    notes = tmp_path / "notes"
    notes.mkdir()
    for name, value in {"PYTHONPATH": tmp_path / "path", "NOTES": notes, "TOGETHER": 1}.items():
        monkeypatch.setenv(name, str(value))
    return notes


def test_downloads_are_held_beside_the_wheels(tmp_path, pip):
    wheels = tmp_path / "3.13"
    wheels.mkdir()
    wheelhouse._download(Module(), ["my_tool==1.0\n"], wheels)
    assert [note.read_text() for note in pip.iterdir()] == [str(tmp_path / "3.13.partial/0")]
    assert [path.name for path in tmp_path.rglob("*.whl")] == ["my_tool-1.0-py3-none-any.whl"]
    assert not (tmp_path / "3.13.partial").exists()


def test_each_processor_fetches_a_part(tmp_path, pip, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("TOGETHER", "2")  # each waits for the other
    wheels = tmp_path / "3.13"
    wheels.mkdir()
    wheelhouse._download(Module(), ["a==1\n", "b==1\n", "c==1\n"], wheels)
    assert sorted(path.name[0] for path in wheels.iterdir()) == ["a", "b", "c"]
    assert sorted(note.name for note in pip.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("slow", ["a==1", "none"])
def test_a_part_that_can_not_be_fetched_is_an_error_and_ends_the_others(tmp_path, pip, monkeypatch, slow):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("TOGETHER", "2")
    monkeypatch.setenv("BROKEN", "b==1")
    monkeypatch.setenv("SLOW", slow)
    with pytest.raises(RuntimeError, match=r"could not fetch the wheels of locks/mine(.|\n)*no b==1"):
        wheelhouse._download(Module(), ["a==1\n", "b==1\n"], tmp_path / "3.13")
    assert not (pip / "end").exists()


@pytest.fixture
def environment(tmp_path):
    """An environment with one installed distribution, as a wheel's record describes it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    code = b"answer = 42\n"
    (site / "my_tool.py").write_bytes(code)
    digest = base64.urlsafe_b64encode(hashlib.sha256(code).digest()).rstrip(b"=").decode()
    (site / "my_tool-1.0.dist-info").mkdir()
    (site / "my_tool-1.0.dist-info" / "RECORD").write_text(
        f"my_tool.py,sha256={digest},{len(code)}\nmy_tool-1.0.dist-info/RECORD,,\n"
    )
    return tmp_path / "env", site


def problems(environment, lock="my-tool==1.0 \\\n    --hash=sha256:00\n"):
    return python_environment.find_problems(environment, python_environment.read_lock(lock))


def test_an_environment_as_locked_has_no_problems(environment):
    assert problems(environment[0]) == {}


def test_a_damaged_file_is_found_though_its_size_is_right(environment):
    (environment[1] / "my_tool.py").write_bytes(b"answer = 43\n")
    assert json.dumps(problems(environment[0])).count("my_tool.py is not as its wheel has it") == 1


def test_a_missing_file_is_found(environment):
    (environment[1] / "my_tool.py").unlink()
    assert "is missing" in problems(environment[0])["my-tool"][0]


def add_header(site):
    """Give the distribution a header of TensorFlow's, with its row in the record."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"int op;").digest()).rstrip(b"=").decode()
    with (site / "my_tool-1.0.dist-info/RECORD").open("a") as record:
        record.write(f"tensorflow/include/op.h,sha256={digest},7\n")
    header = site / "tensorflow/include/op.h"
    header.parent.mkdir(parents=True)
    header.write_bytes(b"int op;")
    return header


def test_headers_may_be_missing_and_are_compared_where_they_are_not(environment):
    header = add_header(environment[1])
    assert problems(environment[0]) == {}
    header.write_bytes(b"int po;")
    assert "op.h is not as its wheel has it" in problems(environment[0])["my-tool"][0]
    header.unlink()
    assert problems(environment[0]) == {}
    assert thorough(environment[0]) == {}


def write_wheel(place, name, *paths):
    """Write a wheel with these files, as the compressed ones of an index are; returns its line of a lock."""
    wheel = place / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    texts = {path: f"# {path}\n".encode() * 100 for path in paths}
    texts[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    texts[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(text).digest()) for path, text in texts.items()}
    rows = [f"{path},sha256={digests[path].decode().rstrip('=')},{len(text)}\n" for path, text in texts.items()]
    texts[f"{about}/RECORD"] = "".join([*rows, f"{about}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, text in texts.items():
            packed.writestr(path, text)
    return f"{name.replace('_', '-')}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install TensorFlow's wheel and another one into a new environment, by uv."""
    (wheels := tmp_path / "wheels").mkdir()
    header = "tensorflow/include/op.h"
    lines = [
        write_wheel(wheels, "tensorflow_cpu", "tensorflow/first.py", header, "tensorflow/second.py"),
        write_wheel(wheels, "my_tool", "my_tool.py"),
    ]
    (tmp_path / "lock.txt").write_text("".join(lines))
    monkeypatch.setattr(python_environment, "_unpack_uv", lambda *_: shutil.which("uv"))
    asked = {"dest": str(tmp_path / "env"), "lock": str(tmp_path / "lock.txt"), "wheels": str(wheels)}
    return lambda **more: result_of(python_environment, **asked, **more)


def test_an_installation_leaves_the_headers_out(install, tmp_path, monkeypatch):
    monkeypatch.setattr(python_environment, "PART_BYTES", 16)  # less than a file
    assert install()["changed"]
    assert (tmp_path / "env/bin/python").resolve() == Path(sys.executable).resolve()  # whose version the lock is of
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    assert sorted(path.name for path in site.glob("tensorflow/*")) == ["__pycache__", "first.py", "second.py"]
    assert install(thorough=True)["problems"] == []


def test_an_installation_that_was_broken_off_begins_again(install, tmp_path):
    (tmp_path / ".env.cache/wheels").mkdir(parents=True)
    assert install()["changed"]
    assert not (tmp_path / ".env.cache").exists()


def test_a_wheel_of_tensorflow_that_is_not_as_locked_is_refused(install, tmp_path):
    write_wheel(tmp_path / "wheels", "tensorflow_cpu", "tensorflow/third.py")
    said = install()["msg"]
    assert "uv could not install" in said
    assert "Hash mismatch for `tensorflow-cpu==1.0`" in said


@pytest.mark.parametrize("at", ["_unpack_uv", "take_headers_out"])
def test_a_disk_that_is_full_before_uv_begins_is_said_in_the_first_words(install, monkeypatch, at):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(python_environment, at, refuse)
    assert install()["msg"].startswith("an environment does not fit into")


def test_a_wrong_version_a_missing_and_an_extra_distribution_are_found(environment):
    found = problems(environment[0], "my-tool==2.0\nother==1\n")
    assert found["my-tool"] == ["my_tool 1.0 is installed, the lock says 2.0"]
    assert found["other"] == ["other 1 is not installed"]
    assert "lock says none of it" in problems(environment[0], "other==1\n")["my-tool"][0]


def thorough(environment):
    lock = python_environment.read_lock("my-tool==1.0 \\\n    --hash=sha256:00\n")
    return python_environment.find_problems(environment, lock, thorough=True)


def test_every_byte_of_a_large_file_is_compared_where_that_is_asked_for(environment, monkeypatch):
    monkeypatch.setattr(python_environment, "HASHED_BYTES", 1)
    assert thorough(environment[0]) == {}
    (environment[1] / "my_tool.py").write_bytes(b"answer = 43\n")
    assert problems(environment[0]) == {}
    assert "is not as its wheel has it" in thorough(environment[0])["my-tool"][0]


@pytest.mark.parametrize("name", ["sitecustomize.py", "planted.pth", "my_tool/__pycache__/x.so", "a/b.py"])
def test_a_module_that_no_wheel_has_brought_is_found_where_that_is_asked_for(environment, name):
    site = environment[1]
    (site / "__pycache__").mkdir()
    (site / "__pycache__/my_tool.cpython-311.pyc").write_bytes(b"")
    assert thorough(environment[0]) == {}
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text("")
    assert problems(environment[0]) == {}
    assert thorough(environment[0]) == {"": [f"{site}/{name} is in no wheel's record"]}


def test_what_the_tasks_user_could_not_read_is_found_with_the_mode_that_it_needs(environment):
    root, site = environment
    assert python_environment.find_shut(root) == {}
    (site / "my_tool.py").chmod(0o600)
    site.chmod(0o700)
    (root / "bin/activate").chmod(0o700)
    shut = python_environment.find_shut(root)
    assert shut == {str(site): 0o755, str(site / "my_tool.py"): 0o644, str(root / "bin/activate"): 0o755}
    for path, mode in shut.items():
        Path(path).chmod(mode)
    assert python_environment.find_shut(root) == {}


@pytest.fixture
def compare(environment, monkeypatch, tmp_path):
    """Compare an environment as the module does, all of whose files have been as they are for a while."""
    lock = tmp_path / "lock.txt"
    lock.write_text("my-tool==1.0 \\\n    --hash=sha256:00\n")
    monkeypatch.setattr(python_environment, "TICK_SECONDS", 0.05)
    time.sleep(0.1)

    def compare(check=False, **asked):
        arguments = {"dest": str(environment[0]), "lock": str(lock), "wheels": "/nonexistent", **asked}
        return result_of(python_environment, check, **arguments)["problems"]

    return compare


def test_check_mode_notes_no_times(compare, monkeypatch):
    assert compare(check=True) == []
    monkeypatch.setattr(python_environment, "find_problems", lambda *_: {"a": ["is read"]})
    assert compare(check=True, quick=True) == ["is read"]  # check mode has noted nothing


def test_an_environment_with_the_times_of_the_last_comparison_is_read_only_where_that_is_asked_for(
    compare, monkeypatch
):
    assert compare() == []
    monkeypatch.setattr(python_environment, "find_problems", lambda *_: {"a": ["is read"]})
    assert compare(check=True, quick=True) == []
    assert compare(check=True) == ["is read"]


def edit(file):
    file.write_bytes(b"answer = 43\n")


def edit_and_set_the_time_back(file):
    before = file.stat()
    file.write_bytes(b"answer = 43\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_with_an_older_file(file):
    older = file.parent.parent / "older.py"  # made before the comparison, and moved over the file after it
    older.replace(file)


@pytest.mark.parametrize("change", [edit, edit_and_set_the_time_back, replace_with_an_older_file])
def test_a_change_by_hand_is_found_after_a_quick_look(environment, compare, change):
    file = environment[1] / "my_tool.py"
    edit(file.parent.parent / "older.py")
    time.sleep(0.1)
    assert compare() == []
    assert compare(check=True, quick=True) == []
    change(file)
    assert file.stat().st_size == len("answer = 42\n")
    assert compare(check=True, quick=True) == [f"{file} is not as its wheel has it"]


def test_modes_and_missing_files_are_found_after_a_quick_look(environment, compare):
    file = environment[1] / "my_tool.py"
    assert compare() == []
    file.chmod(0o600)
    assert "has mode 0600" in compare(check=True, quick=True)[0]
    file.chmod(0o644)
    file.unlink()
    assert compare(check=True, quick=True) == [f"{file} is missing"]


def test_an_environment_is_on_disk_before_it_counts_as_compared(environment, compare, monkeypatch):
    noted = []
    monkeypatch.setattr(
        python_environment, "sync_files", lambda place: noted.append(python_environment.read_times(place))
    )
    assert compare() == []
    assert noted == [None]
    assert compare() == []
    assert len(noted) == 1  # nothing was written since


def test_what_can_not_be_brought_to_disk_is_an_error(environment):
    python_environment.sync_files(environment[0])
    with pytest.raises(OSError, match="No such file"):
        python_environment.sync_files(environment[0] / "gone")


def test_what_was_changed_just_now_is_not_noted(environment, compare, monkeypatch):
    """It could change once more within the same tick of the clock."""
    monkeypatch.setattr(python_environment, "TICK_SECONDS", 60.0)
    assert compare() == []
    assert python_environment.read_times(environment[0]) is None


def test_what_changes_during_a_comparison_is_not_noted(environment, compare, monkeypatch):
    whole = python_environment.find_problems

    def find_problems(*given):
        found = whole(*given)
        edit(environment[1] / "my_tool.py")
        return found

    monkeypatch.setattr(python_environment, "find_problems", find_problems)
    monkeypatch.setattr(python_environment, "TICK_SECONDS", -60.0)
    assert compare() == []
    assert python_environment.read_times(environment[0]) is None


def test_no_environment_is_a_problem(tmp_path):
    assert "" in problems(tmp_path / "env")


def test_recent_current_and_used_releases_stay(tmp_path):
    for age, name in enumerate(["newest", "newer", "used", "current", "previous", "oldest"]):
        release = tmp_path / "releases" / name
        release.mkdir(parents=True)
        environment = tmp_path / "envs" / ("shared" if name != "oldest" else "lonely")
        environment.mkdir(parents=True, exist_ok=True)
        (release / "env").symlink_to(f"../../envs/{environment.name}")
        os.utime(release, (1e9 - age, 1e9 - age))
    (tmp_path / "envs" / ".shared.cache").mkdir()
    for name in ("current", "previous"):
        (tmp_path / name).symlink_to(f"releases/{name}")
    found = release_prune.superfluous(tmp_path, 2, {tmp_path / "releases" / "used"})
    assert [path.name for path in found] == ["oldest", ".shared.cache", "lonely"]
    (tmp_path / "previous").unlink()
    kept = {path.name for path in (tmp_path / "releases").iterdir()} - {
        path.name for path in release_prune.superfluous(tmp_path, 1, set())
    }
    assert kept == {"newest", "newer", "current"}  # a host without the link may have switched to the newest


@pytest.mark.parametrize(
    ("error", "full"),
    [
        ("error: Failed to download `tensorflow`\n  cause: No space left on device (os error 28)", True),
        ("cause: Disk quota exceeded (os error 122)", True),
        ("error: no matching distribution", False),
    ],
)
def test_a_disk_that_was_full_is_said_first(tmp_path, error, full):
    said = python_environment.say_full(tmp_path / "cpu-3.11-abc", error)
    assert said.startswith(f"an environment does not fit into {tmp_path}: ") is full
    assert bool(said) is full
