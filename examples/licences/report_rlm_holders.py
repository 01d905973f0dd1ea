#!/usr/bin/env python3
"""Tells opencue-sched who holds licences of an RLM server (Nuke, Katana, Mari and others).

    report_rlm_holders.py --server 5053@lic01 nuke=nuke_r,nuke_i katana=katana_r

Each limit of opencue-sched is given the products whose licences it stands for. RLM is asked once, with
`rlmutil rlmstat -a`. Whatever fails, or does not add up, ends this script before it has reported anything: an empty
report would open the limit, while silence opens it only after its time to live. Needs rlmutil and opencue-sched in the
PATH, and OPENCUE_SCHED_DATABASE_URL; a systemd service and a timer are beside this file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime

RLMUTIL_SECONDS = 20
"""RLM's own tool waits much longer for a server that is away than anybody needs an answer from then."""

# A product's pool is its name and version on a line, and its numbers on the next one that has them.
POOL = re.compile(r"^\s+(?P<product>\S+) v(?P<version>\S+)\s*$")
NUMBERS = re.compile(r"^\s+count: .*\binuse: (?P<inuse>\d+)\b")
# Who holds some: product, version, user, machine and how many.
HOLDER = re.compile(r"^\s+(?P<product>\S+) v(?P<version>\S+): (?P<user>.+)@(?P<host>[^\s@]+) (?P<tokens>\d+)/\d+ at ")


class Unclear(Exception):
    """What RLM says cannot be reported."""


def ask(server: str) -> str:
    """What rlmstat prints of a server."""
    command = ["rlmutil", "rlmstat", "-a", "-c", server]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=RLMUTIL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unclear(f"rlmutil failed: {error}") from error
    if ended.returncode:
        raise Unclear(f"rlmutil ended with {ended.returncode}: {(ended.stderr or ended.stdout).strip()[-500:]}")
    return ended.stdout


def holders_of(said: str, products: set[str]) -> dict[str, list[dict[str, object]]]:
    """Who holds each product. Raises Unclear for a product without a pool, and for one of which its pool says that
    more, or less, is in use than its holders have."""
    in_use: Counter[str] = Counter()
    held: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    pool = ""
    for line in said.splitlines():
        if found := HOLDER.match(line):
            held[found["product"]][found["host"], found["user"]] += int(found["tokens"])
        elif found := POOL.match(line):
            pool = found["product"]
        elif pool and (found := NUMBERS.match(line)):
            in_use[pool] += int(found["inuse"])
            pool = ""
    for product in sorted(products):
        if product not in in_use:
            raise Unclear(f"the server has no licences of {product}, or its vendor's server does not answer")
        if in_use[product] != (known := sum(held[product].values())):
            raise Unclear(f"{in_use[product]} licences of {product} are in use, but their holders have {known}")
    return {
        product: [
            {"host": host, "tokens": tokens, "user": user} for (host, user), tokens in sorted(held[product].items())
        ]
        for product in products
    }


def report(words: list[str], lines: str = "") -> None:
    """Run `opencue-sched limit report`, and end as it does where it fails."""
    command = ["opencue-sched", "limit", "report", *words]
    try:
        subprocess.run(command, input=lines, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"opencue-sched took no report: {error}")


def together(holders: list[dict[str, object]]) -> list[dict[str, object]]:
    """One line for a machine, with all that it holds and the user who has the most of that."""
    machines: defaultdict[object, list[dict[str, object]]] = defaultdict(list)
    for holder in holders:
        machines[str(holder["host"]).lower()].append(holder)
    return [
        {
            **max(of_one, key=lambda holder: int(str(holder["tokens"]))),
            "tokens": sum(int(str(h["tokens"])) for h in of_one),
        }
        for of_one in machines.values()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, metavar="PORT@HOST", help="the RLM server")
    parser.add_argument("limits", nargs="+", metavar="LIMIT=PRODUCT[,PRODUCT...]")
    given = parser.parse_args()
    limits = {name: products.split(",") for name, _, products in (word.partition("=") for word in given.limits)}
    if not all(name and all(products) for name, products in limits.items()):
        parser.error("say LIMIT=PRODUCT")
    try:
        asked_at = datetime.now(UTC).isoformat()
        held = holders_of(ask(given.server), {product for products in limits.values() for product in products})
        words = ["--asked-at", asked_at, "--source", f"rlm {given.server}"]
        found = {
            name: together([line for product in products for line in held[product]])
            for name, products in limits.items()
        }
        if lines := [json.dumps({"limit": name, **line}) for name, machines in found.items() for line in machines]:
            report(words, "\n".join(lines))
        for name in (name for name, machines in found.items() if not machines):
            report([name, "--nobody", *words])
    except Unclear as error:
        sys.exit(f"nothing was reported: {error}")


if __name__ == "__main__":
    main()
