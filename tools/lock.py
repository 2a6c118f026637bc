"""Write requirements.lock, what constraints.txt pins with the hashes of the wheels: ``python tools/lock.py INDEX``.

The hashes are those that a package index publishes. torch is left out: which of its builds fits depends on the machine,
and they come from different indexes, so only its version is pinned.
"""

from __future__ import annotations

import argparse
import html
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
LEFT_OUT = ("torch",)
HEAD = """\
# Written by `python tools/lock.py` from constraints.txt: versions, and the hashes of their wheels for CPython 3.11+.
# `make install` installs exactly these, and then torch, whose build depends on the machine and has no hash here.
--only-binary :all:
"""
OLD = re.compile(r"-(cp2\d+|cp3\d|cp310|pp\d+)-(?!abi3)")
"""Wheels for Pythons that the package does not support."""


def pins() -> dict[str, str]:
    """Names and versions in constraints.txt, without those left out."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    found = dict(line.split("==", 1) for line in lines if line)
    return {name: version for name, version in found.items() if name not in LEFT_OUT}


def hashes(name: str, version: str, index: str) -> list[str]:
    """The SHA-256 of every wheel of a version that the index lists; what follows a semicolon says where it is used."""
    version = version.split(";")[0].strip()
    normal = re.sub(r"[-_.]+", "-", name).lower()
    with urllib.request.urlopen(f"{index}/{normal}/") as answer:
        page = answer.read().decode()
    wheel = re.compile(f"{normal.replace('-', '[-_.]')}-{re.escape(version)}-.*[.]whl", re.IGNORECASE)
    found = {
        digest
        for link, file in re.findall(r'<a href="([^"]*)"[^>]*>\s*([^<]*?)\s*</a>', page)
        for digest in re.findall(r"#sha256=([0-9a-f]{64})", html.unescape(link))
        if wheel.fullmatch(file) and not OLD.search(file)
    }
    if not found:
        raise SystemExit(f"{index} has no wheel of {name} {version}.")
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", help="address of a package index (PEP 503), such as the one that pip uses")
    given = parser.parse_args()
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda pin: hashes(*pin, given.index), pins().items())
    entries = [
        f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in digests)
        for (name, version), digests in zip(pins().items(), found, strict=True)
    ]
    LOCK.write_text(HEAD + "\n".join(entries) + "\n")


if __name__ == "__main__":
    main()
