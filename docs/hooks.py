"""What the site does with links out of docs/: files of the project must exist; the site has only their names."""

import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]*)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = (ROOT / "docs" / page.file.src_path).parent

    def name_alone(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise SystemExit(f"docs/{page.file.src_path}: {match[2]} does not exist.")
        return match[1]

    return LINK.sub(name_alone, markdown)
