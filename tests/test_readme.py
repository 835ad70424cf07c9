"""The README's example runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run(tmp_path: Path) -> None:
    first, ranks, states, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = f"{first}\n{ranks}\nassert store.put_blocks(hashes, [1, 2, 3]).stored.all()\nstore.close()\n"
    code += f"{states}\nwith KVStore('states', cache, CacheIdentity(model='hybrid')) as store:\n"
    code += "    assert store.put_blocks(hashes, [1, 2, 3], group=1).stored.all()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[ True  True  True]", "[ True  True  True] [False False False] {}", "3"]
    assert (tmp_path / "kv-store" / "tp0of1-pp0of1" / "STORE").exists()


@pytest.mark.parametrize("document", sorted((README.parent / "docs").glob("*.md")), ids=lambda p: p.name)
def test_names_in_files_are_there(document: Path) -> None:
    for name, file in re.findall(r"`(\w+)`\s+in\s+`?(\w+\.py)`?", document.read_text()):
        found = [p for p in (README.parent / "kvstore").rglob(file) if re.search(rf"\b{name}\b", p.read_text())]
        assert found, f"{document.name}: {name} in {file}"


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert links
    assert all((README.parent / link).exists() for link in links), links
