"""The program, the locks and the keys are looked at before any host is."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fleet.site.preflight import inventory_problems
from fleet.site.schema.control_files import key_problem
from tests.unit.hostile import inventory

ROOT = Path(__file__).resolve().parents[2]
HASH = "--hash=sha256:" + 64 * "0"
OURS = "".join(f"{name}==1.0 {HASH}\n" for name in ("tensorflow", "tf-keras", "uv"))
LOCK = f"# by make lock\nnumpy==2.0 \\\n    {HASH} \\\n    {HASH}\nmy-models[a]==1.0 {HASH}\n{OURS}"
METHODS = "".join(f"    def {name}(self, *args): ...\n" for name in ("build_model", "train_dataset", "eval_dataset"))
MODULE = f"""import missing_library
from elsewhere import Borrowed
if True:
    class Net:
{METHODS.replace("    def", "        def")}
class Heir(Borrowed): pass
class Taking:
    def __init__(self, rate, *, layers=()): ...
{METHODS}
class Anything:
    def __init__(self, **more): ...
{METHODS}
class Bare:
    def build_model(self): ...
class Outer:
    class Inner:
{METHODS.replace("    def", "        def")}
class Needs:
    def __init__(self, size, *, depth=2): ...
class Offers:
    def __init__(self, size=3, *, depth=2): ...
class Short:
    def build_model(self): ...
    def train_dataset(self): ...
    def eval_dataset(self, context, *, size=1): ...
number: int = 5
made = Net()
""".replace("Needs:\n", f"Needs:\n{METHODS}").replace("Offers:\n", f"Offers:\n{METHODS}")
DEEP = "made = " + "-" * 200_000 + "1\n"


OTHERS = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGzbTJnP8kEhbaqAJ0Wm0fZ1c6YgnmAIVw3ZAqt3rSgD"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "locks/cpu-3.11.txt": LOCK,
        "trainer/__init__.py": "",
        "trainer/examples/digits.py": f"class Digits:\n{METHODS}",
        "mine/nets/__init__.py": "",
        "mine/nets/resnet.py": MODULE,
        "mine/nets/broken.py": "class Net:\n  def\n",
        "mine/nets/deep.py": DEEP,
        "mine/nets/nul.py": "class Net:\0\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def problems(
    project: Path,
    program: str = "trainer.examples.digits:Digits",
    program_args: dict[str, Any] | None = None,
    **site: Any,
) -> list[str]:
    variables = {"all": {"trainer_run": {"program": program, "program_args": program_args or {}}} | site}
    return list(map(str, inventory_problems(*inventory({}, variables), project)))


@pytest.mark.parametrize(
    "program", [f"nets.resnet:{name}" for name in ("Net", "Heir", "Outer.Inner", "made", "Borrowed", "Offers", "Needs")]
)
def test_a_program_is_found_without_its_libraries(project: Path, program: str) -> None:
    assert problems(project, program, release_program="mine") == []
    if "resnet" in program:  # one package by itself is named as its directory, too
        assert problems(project, program, release_program="mine/nets") == []


def test_a_whole_machine_is_no_program(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("release_archive.MAX_PROGRAM_FILES", 2)
    assert "mine' is larger than 2 files" in "".join(problems(project, "nets.resnet:Net", release_program="mine"))
    assert "is the whole machine" in "".join(problems(project, "nets.resnet:Net", release_program="/"))


def test_a_program_is_found_in_a_wheel_and_in_a_lock(project: Path) -> None:
    with zipfile.ZipFile(project / "w.whl", "w") as wheel:
        wheel.writestr("nets/resnet.py", MODULE)
    assert problems(project, "nets.resnet:Net", release_program="w.whl") == []
    assert problems(project, "my_models.x:Net") == []
    (project / "w.whl").write_text("no zip")
    assert "w.whl' is no wheel: File is not a zip file" in problems(project, release_program="w.whl")[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"trainer.py": ""}, "brings 'trainer.py', a name that psfleet uses itself"),
        ({"locks/x.txt": "", "a.py": ""}, "brings 'locks', a name that"),
        ({"env/x.py": ""}, "brings 'env', a name that"),
        ({"release.json": "", "a.py": ""}, "brings 'release.json', a name that"),
        ({"README": ""}, "holds no Python file"),
        ({"a.py": "", "b.bin": "0" * 3000}, "larger than 64 MiB"),
        (
            {"tensorflow/__init__.py": ""},
            "'tensorflow', which every `import tensorflow` on the hosts would get instead",
        ),
        ({"numpy.py": ""}, "brings 'numpy.py', which every `import numpy` on"),
        ({"keras/__init__.py": ""}, "brings 'keras', which"),
        ({"tf_keras.py": ""}, "brings 'tf_keras.py', which"),
        ({"queue.py": ""}, "brings 'queue.py', which every `import queue`"),
    ],
)
@pytest.mark.parametrize("wheel", [False, True])
def test_a_program_that_no_release_may_have_is_refused_before_any_host(
    project: Path, files: dict[str, str], message: str, wheel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("release_archive.MAX_PROGRAM_BYTES", 2000)
    (problem,) = problems(project, release_program=_program(project, files, wheel))
    assert "release_program: " in problem
    assert message in problem


def test_a_link_to_a_directory_is_refused_where_it_has_code(project: Path) -> None:
    (project / "own").mkdir()
    (project / "own/net.py").write_text("")
    (project / "data").mkdir()
    (project / "own/data").symlink_to("../data")
    assert problems(project, release_program="own") == []
    (project / "own/nets").symlink_to("../mine/nets")
    (problem,) = problems(project, release_program="own")
    assert "own/nets' is a link to a directory with Python files, which a release does not follow" in problem


def test_a_wheel_with_compiled_code_is_refused_before_any_host(project: Path) -> None:
    (problem,) = problems(project, release_program=_program(project, {"a.py": "", "a/b.so": ""}, wheel=True))
    assert "is no pure-Python wheel (it holds a/b.so)" in problem


@pytest.mark.parametrize("wheel", [False, True])
def test_directories_that_python_imports_nothing_from_may_have_any_name(project: Path, wheel: bool) -> None:
    files = {"nets/queue.py": "", "test/__init__.py": "", "code/run.sh": "", "types/a.py": "", "conftest.py": ""}
    assert problems(project, release_program=_program(project, files, wheel)) == []


def _program(project: Path, files: dict[str, str], wheel: bool) -> str:
    if wheel:
        with zipfile.ZipFile(project / "p.whl", "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return "p.whl"
    for name, text in files.items():
        path = project / "program" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return "program"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("nets.resnt:Net", "release_program (mine) has no module nets.resnt. Did you mean nets.resnet?"),
        ("nets.resnet:Nett", "nets/resnet.py has no Nett. Did you mean Net?"),
        ("nets.resnet:Outer.Iner", "has no Iner. Did you mean Inner?"),
        ("nets.resnet:Bare", "has no train_dataset, eval_dataset; expected build_model, train_dataset"),
        ("nets.resnet:Outer.Inner.build_model", "is a function; expected a class or an object with build_"),
        ("nets.resnet:number", "is a plain value; expected a class"),
        ("nets.resnet:Short", "expected train_dataset(self, context) in nets/resnet.py:"),
        ("nets.broken:Net", "nets/broken.py:2 is no Python: invalid syntax"),
        ("nets.nul:Net", "nets/nul.py is no Python: source code string cannot contain null bytes"),
        ("nets.deep:made", "nets/deep.py"),
        ("trainer.examples.digit:Digits", "the kit has no module trainer.examples.digit. Did you mean trainer.ex"),
        ("trainer.examples.digits:Digit", "trainer/examples/digits.py has no Digit. Did you mean Digits?"),
        ("trainer.task:Net", "has no module trainer.task. A package trainer is psfleet's own: give yours another name"),
        ("os.path:join", "has no module os.path"),
    ],
)  # fmt: skip
def test_a_misspelt_program_is_refused(project: Path, program: str, message: str) -> None:
    (problem,) = problems(project, program, release_program="mine")
    assert message in problem
    assert "<unknown>" not in problem


def test_a_notebook_is_named_as_what_no_task_can_import(project: Path) -> None:
    (project / "mine/nets/tried.ipynb").write_text("{}")
    (problem,) = problems(project, "nets.tried:Net", release_program="mine")
    assert problem.endswith("has no module nets.tried. tried.ipynb is a notebook: write its class into tried.py")


@pytest.mark.parametrize(("evaluation", "wrong"), [("none", 0), ("inline", 1)])
def test_a_program_needs_evaluation_data_only_where_it_evaluates(project: Path, evaluation: str, wrong: int) -> None:
    own = "class Net:\n    def build_model(self): ...\n    def train_dataset(self, context): ...\n"
    (project / "mine/nets/trains.py").write_text(own)
    run = {"program": "nets.trains:Net", "evaluation": evaluation}
    assert len(problems(project, trainer_run=run, release_program="mine")) == wrong


@pytest.mark.parametrize(
    ("program", "argument", "message"),
    [
        ("Net", "rate", "program_args has 'rate', and the constructor of nets.resnet:Net takes none"),
        ("Taking", "rates", "program_args has 'rates', and the constructor of nets.resnet:Taking takes rate, layers"),
        ("Taking", "self", "takes rate, layers"),
        ("Taking", "rate", ""),
        ("Taking", "layers", ""),
        ("Anything", "rates", ""),
        ("Heir", "rates", ""),
        ("made", "rates", ""),
    ],
)
def test_an_argument_that_the_constructor_does_not_take_is_refused(
    project: Path, program: str, argument: str, message: str
) -> None:
    found = problems(project, f"nets.resnet:{program}", {argument: 1}, release_program="mine")
    assert bool(found) == bool(message)
    assert message in "".join(found)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"release_program": "nowhere"}, "nowhere' is neither a directory nor a wheel"),
        ({"release_lock": "locks/nope"}, "`psfleet lock locks/nope` writes them"),
        ({"release_lock": "locks/cpu-3.11.txt"}, "Leave out -<python>.txt: locks/cpu"),
        ({"release_lock": "locks/[c]pu"}, "and there is no file"),
        ({"release_lock": "~nobody-here/cpu"}, "~nobody-here/cpu-<python>.txt"),
        ({"release_program": "~nobody-here/nets"}, "~nobody-here/nets' is neither a directory nor a wheel"),
        ({"ansible_ssh_private_key_file": "~nobody-here/key"}, "~nobody-here/key. Name the key that opens the host"),
    ],
)
def test_a_missing_file_is_refused(project: Path, site: dict[str, Any], message: str) -> None:
    (problem,) = problems(project, **site)
    assert message in problem


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        (LOCK + "loose==1.0\n", "cpu-3.11.txt:9: 'loose==1.0' has no hash"),
        (LOCK + f"loose>=1.0 {HASH}\n", "has no version"),
        (LOCK + f"loose==1.* {HASH}\n", "has no version"),
        (LOCK + "short==1.0 --hash=sha256:abc\n", "has a hash that is none of sha256"),
        (LOCK + "weak==1.0 --hash=md5:" + 32 * "0" + "\n", "has a hash that is none of sha256"),
        (LOCK + "-r other.txt\n", "'-r other.txt' has its requirements in another place"),
        (LOCK + "-e .\n", "has its requirements in another place"),
        ("# nothing\n", "cpu-3.11.txt is empty"),
        ("git+https://example.org/x\n", "has no version"),
        ("\udcff", "can't be read"),
    ],
)
def test_a_lock_without_hashes_is_refused(project: Path, lock: str, message: str) -> None:
    (project / "locks" / "cpu-3.11.txt").write_bytes(lock.encode(errors="surrogateescape"))
    (problem,) = problems(project)
    assert message in problem


def test_hosts_with_gpus_need_their_lock(project: Path) -> None:
    variables = {"gpu_count": 1, "release_lock_gpu": "locks/gpus"}
    groups, hostvars = inventory({"gpu": ["worker-0", "worker-1"]}, {"all": variables})
    assert "locks/gpus" in "".join(map(str, inventory_problems(groups, hostvars, project)))
    (project / "locks" / "gpus-3.11.txt").write_text(LOCK)
    assert inventory_problems(groups, hostvars, project) == []


def test_a_cluster_without_gpus_needs_its_own_lock_to_be_right(project: Path) -> None:
    (project / "locks" / "cpu-no-gpu-3.11.txt").write_text("loose==1.0\n")
    (problem,) = problems(project)
    assert "locks/cpu-no-gpu-3.11.txt:1: 'loose==1.0' has no hash" in problem
    groups, hostvars = inventory(
        {"gpu": ["worker-0", "worker-1"]}, {"all": {"gpu_count": 1, "release_lock_gpu": "locks/cpu"}}
    )
    assert inventory_problems(groups, hostvars, project) == []


def test_a_lock_with_both_wheels_of_tensorflow_is_refused(project: Path) -> None:
    both = "".join(f"{name}==2.21.0 {HASH}\n" for name in ("tensorflow", "tensorflow-cpu", "tf-keras", "uv"))
    (project / "locks" / "cpu-3.11.txt").write_text(both)
    (problem,) = problems(project)
    assert "locks/cpu-3.11.txt has both tensorflow and tensorflow-cpu, which bring the same files" in problem
    assert "Leave tensorflow-cpu out of your list: `psfleet lock` puts it in tensorflow's place" in problem


def test_a_lock_of_the_users_packages_alone_is_refused(project: Path) -> None:
    (project / "locks" / "cpu-3.11.txt").write_text(f"pandas==2.3.0 {HASH}\nuv==1.0 {HASH}\n")
    (problem,) = problems(project)
    assert "cpu-3.11.txt lacks tensorflow, tf-keras, which every host needs; expected psfleet's own" in problem
    assert f"Add the lines of {ROOT}/locks/cpu.in to your list, and lock it again" in problem
    (project / "locks" / "cpu-3.11.txt").write_text(OURS.replace("tensorflow", "tensorflow-cpu"))
    assert problems(project) == []


def test_the_locks_and_examples_that_we_ship_are_right() -> None:
    for example in ("digits:Digits", "heroes:Heroes", "sync_digits:SyncDigits"):
        assert problems(ROOT, f"trainer.examples.{example}") == []
    groups, hostvars = inventory({"gpu": ["worker-0", "worker-1"]}, {"all": {"gpu_count": 1}})
    assert inventory_problems(groups, hostvars, ROOT) == []


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", f"{path}-shut"], check=True)
    return path


def test_a_key_that_opens_is_right_with_a_passphrase_too(key: Path) -> None:
    assert key_problem(key) is None
    assert key_problem(Path(f"{key}-shut")) is None


def test_the_key_that_signs_is_looked_at_before_any_host(key: Path, project: Path) -> None:
    public = Path(f"{key}.pub").read_text().strip()
    for right in ({"release_key": str(key)}, {"release_key": f"{key}.pub", "release_signers": [public]}):
        assert problems(project, **right) == []
    wrong = [
        ({"release_key": "nowhere"}, "release_key: there is no file"),
        ({"release_key": "~nobody-here/key"}, "release_key: there is no file"),
        ({"release_key": "locks"}, "release_key: there is no file"),
        ({"release_key": "locks/cpu-3.11.txt"}, "can't be read"),
        ({"release_key": str(key), "release_signers": [OTHERS]}, "release_signers in the inventory has not"),
        ({"release_signers": [OTHERS]}, "names others' keys, and this machine's own"),
    ]
    for site, message in wrong:
        (problem,) = problems(project, **site)
        assert message in problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o NoSuchOption=1", "Bad configuration option: nosuchoption"),
        ("-o ConnectTimeout=soon", "invalid time value"),
        ("-o StrictHostKeyChecking=maybe", "unsupported option"),
        ("-c nothing", "Unknown cipher type"),
    ],
)
def test_what_ssh_would_refuse_is_refused(project: Path, options: str, message: str) -> None:
    (problem,) = problems(project, ansible_ssh_common_args=options)
    assert f"ansible_ssh_common_args is '{options}', and ssh refuses it" in problem
    assert message in problem
    assert problems(project, ansible_ssh_extra_args="-4 -o StrictHostKeyChecking=no -o LogLevel=ERROR") == []


def test_a_cache_that_is_no_directory_is_refused(project: Path) -> None:
    assert problems(project, release_cache="new/cache") == []
    for cache in ("locks/cpu-3.11.txt", "locks/cpu-3.11.txt/deep"):
        (problem,) = problems(project, release_cache=cache)
        assert "locks/cpu-3.11.txt is no directory; expected a directory of this machine" in problem


def test_a_key_that_opens_nothing_is_refused(key: Path, project: Path) -> None:
    spoilt = project / "spoilt"
    spoilt.write_bytes(key.read_bytes().replace(b"a", b"b"))
    spoilt.chmod(0o600)
    assert "ssh-keygen can't open it" in str(key_problem(spoilt))
    assert "public key" in str(key_problem(Path(f"{key}.pub")))
    spoilt.chmod(0o644)
    assert "chmod 600" in str(key_problem(spoilt))
    (problem,) = problems(project, ansible_ssh_private_key_file="keys/none")
    assert (
        "hosts head, ps-0, worker-0 and 1 more: ansible_ssh_private_key_file is 'keys/none', and there is no" in problem
    )
