"""Builds the source distribution and the wheel into dist/, and checks all that can be checked before an upload.

make release
make release RELEASE_ARGS="--tag v0.1.0 --tests"    # also compares the tag, and runs the quick tests of the sdist
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints-dev.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag of the release, which must be v and the version")
    parser.add_argument("--tests", action="store_true", help="run the quick tests of the source distribution")
    arguments = parser.parse_args()
    version = checked_version(arguments.tag)
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)  # the wheel is built from the source distribution
    built = [DIST / f"autoremat-{version}.tar.gz", DIST / f"autoremat-{version}-py3-none-any.whl"]
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    for distribution in built:
        smoke_test(distribution, version)
    if arguments.tests:
        quick_tests(built[0])
    print(f"autoremat {version} can be uploaded: {', '.join(str(path.relative_to(ROOT)) for path in built)}")


def checked_version(tag: str | None) -> str:
    """Returns the version in pyproject.toml. Ends the program if the tree is not clean, or changelog or tag differ."""
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest, *_ = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if changed := run("git", "status", "--porcelain").strip():
        sys.exit(f"The working tree is not clean:\n{changed}")
    if newest != version:
        sys.exit(f"pyproject.toml has version {version}, and the newest section of CHANGELOG.md is {newest}.")
    if tag not in (None, f"v{version}"):
        sys.exit(f"The tag is {tag}, and pyproject.toml has version {version}.")
    return version


def smoke_test(distribution: Path, version: str) -> None:
    """Installs ``distribution`` alone into an empty environment and trains the README's model there."""
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), str(distribution))
        (Path(folder) / "smoke.py").write_text(block)
        assert run(python.parent / "autoremat", "--version", cwd=folder).strip().endswith(version)
        assert "least possible" in run(python, "smoke.py", cwd=folder)
    print(f"{distribution.name}: installed, and trains the README's model", flush=True)


def quick_tests(sdist: Path) -> None:
    """Unpacks ``sdist`` into an empty folder and runs its quick tests there, with it and the extra ``dev`` installed."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        python = environment(Path(folder), f"{sdist}[dev]")
        root = Path(folder) / sdist.name.removesuffix(".tar.gz")
        run(python, "-m", "pytest", "-q", "-m", "not slow", cwd=root)
    print(f"{sdist.name}: its quick tests pass")


def environment(folder: Path, requirement: str) -> Path:
    """Returns the Python of a new environment in ``folder`` with ``requirement`` installed."""
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, requirement)
    return python


def run(*command: object, cwd: Path | str = ROOT) -> str:
    """Returns what ``command`` prints. Ends the program with its output if it fails."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"AUTOREMAT_COST_MODEL": "roofline"}  # no calibration in between
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
