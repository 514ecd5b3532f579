"""The list of sources that the role adds, beside those that machines come with. Real apt reads them, offline."""

import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest
from apt_signers import find_signers, read_entries

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "roles" / "nvidia_driver" / "templates" / "psfleet-nvidia.sources.j2"
OURS = "etc/apt/sources.list.d/psfleet-nvidia.sources"
DEBIAN, SECURITY = "http://deb.debian.org/debian", "http://deb.debian.org/debian-security"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PGP = "/usr/share/keyrings/debian-archive-keyring.pgp"
# As Debian 13's installer and its container images write it.
TRIXIE = f"""\
Types: deb
URIs: {DEBIAN}/
Suites: trixie trixie-updates
Components: main
Signed-By: {PGP}

# Security
Types: deb
URIs: {SECURITY}
Suites: trixie-security
Components: main
Signed-By: {PGP}
"""
INLINE = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: trixie
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBFit
 -----END PGP PUBLIC KEY BLOCK-----
"""


def wanted(release):
    return [
        {"uri": DEBIAN, "suite": release},
        {"uri": DEBIAN, "suite": f"{release}-updates"},
        {"uri": SECURITY, "suite": f"{release}-security"},
    ]


def ask(root, release):
    return find_signers(read_entries(root, root / OURS), wanted(release), KEYRING)


def lay(root, files):
    for name, text in files.items():
        path = root / "etc/apt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def add_ours(root, archives):
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False)
    text = environment.from_string(TEMPLATE.read_text()).render(
        __nvidia_driver_archives={"archives": archives}, ansible_managed="ours"
    )
    lay(root, {OURS.removeprefix("etc/apt/"): text + "\n"})


def read_by_apt(root):
    where = [
        f"Dir::Etc::sourcelist={root}/etc/apt/sources.list",
        f"Dir::Etc::sourceparts={root}/etc/apt/sources.list.d",
    ]
    options = [word for each in where for word in ("-o", each)]
    return subprocess.run(
        ["apt-get", *options, "indextargets", "--no-release-info", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("release", "files"),
    [
        ("trixie", {"sources.list.d/debian.sources": TRIXIE}),
        ("trixie", {"sources.list.d/debian.sources": INLINE}),
        ("bookworm", {"sources.list": f"deb {DEBIAN} bookworm main\ndeb {SECURITY} bookworm-security main\n"}),
        ("bookworm", {"sources.list.d/zz.list": f"deb {DEBIAN} bookworm main\n"}),
        ("bookworm", {"sources.list": f"deb [arch=amd64 signed-by={PGP}] {DEBIAN}/ bookworm main\n"}),
        ("bookworm", {"sources.list": ""}),
    ],
)
@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt, to hear what it says")
def test_apt_reads_the_machines_lists_with_ours_beside_them(tmp_path, release, files):
    lay(tmp_path, files)
    add_ours(tmp_path, ask(tmp_path, release))
    read = read_by_apt(tmp_path)
    assert read.returncode == 0, read.stderr
    assert f"{release}/non-free amd64" in read.stdout
    ours = (tmp_path / OURS).read_text()
    add_ours(tmp_path, ask(tmp_path, release))
    assert (tmp_path / OURS).read_text() == ours  # a second run changes nothing


@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt, to hear what it says")
def test_another_name_of_the_same_key_is_what_apt_refuses(tmp_path):
    lay(tmp_path, {"sources.list.d/debian.sources": TRIXIE})
    add_ours(tmp_path, [archive | {"signed_by": KEYRING} for archive in wanted("trixie")])
    assert "Conflicting values set for option Signed-By" in read_by_apt(tmp_path).stderr


def test_the_key_is_repeated_as_it_stands():
    entries = [(DEBIAN, "trixie", PGP), (DEBIAN, "trixie", ""), (DEBIAN, "trixie-updates", "")]
    assert [each["signed_by"] for each in find_signers(entries, wanted("trixie"), KEYRING)] == [PGP, "", KEYRING]


def test_what_is_switched_off_or_ours_does_not_count(tmp_path):
    off = TRIXIE.replace("Types: deb", "Enabled: no\nTypes: deb")
    commented = f"# deb [signed-by=/x] {DEBIAN} trixie main\n"
    lay(tmp_path, {"sources.list": commented, "sources.list.d/debian.sources": off})
    add_ours(tmp_path, [archive | {"signed_by": "/old"} for archive in wanted("trixie")])
    assert [each["signed_by"] for each in ask(tmp_path, "trixie")] == [KEYRING] * 3
