from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "dagengine_kvstore"


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_only_the_arena_and_its_copies_need_torch_or_numpy_and_only_the_kit_needs_pytest() -> None:
    allowed = {
        "torch_arena.py": {"torch"},
        "torch_copies.py": {"torch", "numpy"},
        "torch_transfer.py": {"numpy"},
        "cuda_copies.py": {"torch", "numpy"},
        "extents.py": {"numpy"},
        "page_kernel.py": {"torch", "triton"},
        "conformance.py": {"pytest"},
    }
    for path in sorted(PACKAGE.glob("*.py")):
        assert imports(path) <= {"dagengine_kvstore"} | allowed.get(path.name, set()), path.name


def test_importing_the_package_loads_neither() -> None:
    code = (
        "import sys, dagengine_kvstore; assert not {'torch', 'triton', 'numpy', 'pytest'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE.parent)})
