"""What pip is told of the package, as far as it depends on the torch that it is built with.

A library of C++ fits one torch only, so the version names it: tessera-0.2.0+torch2.13. scikit-build-core asks for it (pyproject.toml).
"""

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def dynamic_metadata(
    field: str, settings: Mapping[str, Any], _project: Mapping[str, Any] | None = None
) -> str | list[str]:
    if settings:
        raise RuntimeError(f"wheel_metadata takes no settings, but got {dict(settings)}")
    torch = importlib.metadata.version("torch").partition("+")[0]
    if field == "dependencies":
        return [f"torch=={torch}"]
    if field == "version":
        cmake = (Path(__file__).parent.parent / "CMakeLists.txt").read_text()
        found = re.search(r"^project\(Tessera VERSION ([0-9.]+)", cmake, re.MULTILINE)
        if found is None:
            raise RuntimeError("CMakeLists.txt does not name the version of Tessera in project()")
        return f"{found[1]}+torch{'.'.join(torch.split('.')[:2])}"
    raise RuntimeError(f"wheel_metadata knows the fields dependencies and version, not {field}")
