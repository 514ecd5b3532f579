"""`python3 -m lab packages|prepare|clean`: what `make lab` and the Vagrantfile do on the lab machine."""

import argparse
import subprocess
import sys
from pathlib import Path

from lab import machine

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m lab", description="The lab machine's side of the lab.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    packages = verbs.add_parser("packages", help="install the Debian packages that the lab needs")
    packages.add_argument("names", nargs="*", help="only these")
    packages.add_argument("--vms", action="store_true", help="those of full VMs instead")
    packages.add_argument("--security", action="store_true", help="those of make test-security instead")
    packages.add_argument("--browser", action="store_true", help="those of make test-browser instead")
    prepare = verbs.add_parser("prepare", help="key, box, bridge and shared file system (the Vagrantfile calls this)")
    prepare.add_argument("--provider", default="lxc")
    prepare.add_argument("--dotfile", type=Path, default=ROOT / ".vagrant")
    prepare.add_argument("--shared-owner", type=int, default=0, help="number of the user who owns the shared path")
    prepare.add_argument("addresses", nargs="*", help="the hosts' addresses")
    clean = verbs.add_parser("clean", help="take away everything that a lab made")
    clean.add_argument("--anyones", action="store_true", help="also another checkout's hosts")
    args = parser.parse_args()
    try:
        if args.verb == "packages":
            suites = {
                "vms": machine.VM_PACKAGES,
                "security": machine.SECURITY_PACKAGES,
                "browser": machine.BROWSER_PACKAGES,
            }
            chosen = next((each for name, each in suites.items() if getattr(args, name)), machine.PACKAGES)
            machine.install_packages(tuple(args.names) or chosen)
        elif args.verb == "prepare":
            machine.prepare(ROOT, args.dotfile, args.provider, args.addresses, args.shared_owner)
        else:
            machine.clean(ROOT, anyones=args.anyones)
    except machine.LabError as error:
        sys.exit(f"lab: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"lab: `{' '.join(error.cmd)}` failed with exit code {error.returncode}")


if __name__ == "__main__":
    main()
