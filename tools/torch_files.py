"""Prints, as a JSON list, the top-level paths of torch and of every distribution that it requires.

Run by the Python whose torch is meant. Nothing but torch's own declared requirements is in the list.
"""

from __future__ import annotations

import importlib.metadata
import json
import re


def distributions(root: str) -> list[importlib.metadata.Distribution]:
    """`root` and the installed distributions that it requires, directly or not, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in found[key].requires or []:
            if "extra ==" not in requirement:
                waiting.append(re.split(r"[\s\[\](<>=!~;]", requirement, maxsplit=1)[0])
    return list(found.values())


def top_level_paths(distribution: importlib.metadata.Distribution) -> list[str]:
    tops = dict.fromkeys(file.parts[0] for file in distribution.files or [])
    return [str(distribution.locate_file(top)) for top in tops if top not in ("..", "__pycache__")]


if __name__ == "__main__":
    paths = [path for distribution in distributions("torch") for path in top_level_paths(distribution)]
    print(json.dumps(list(dict.fromkeys(paths))))
