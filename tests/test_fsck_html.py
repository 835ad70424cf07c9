"""The report of `kvstore-fsck --report` in a real browser: legible, no script, no network, nothing executed.

Whatever stands in a key, a path or a detail came out of damaged files. The pages are opened by Debian's chromium.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.fsck.findings import KINDS, Finding, Summary
from kvstore.fsck.pagemap import FORMS
from kvstore.tools.fsck_html import MAX_SHOWN, page, write_report
from kvstore.tools.fsck_map import LEGEND, MAX_CELLS, FileMap, Place, cells, file_map
from kvstore.tools.fsck_markup import Markup, el
from kvstore.tools.fsck_outcome import Checked, Run
from kvstore.tools.fsck_style import STYLE
from tests.support import block_hashes, make_cache, open_store

HOSTILE = '"><script>document.title="owned"</script><img src=x onerror=alert(1)>\u202e\x1b[2J&amp;\ud800'
QUIET = (
    "--headless",
    "--disable-gpu",
    "--no-sandbox",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
"""The last one keeps the browser's own requests on this machine."""
PROBE = """
<script>
const of = (query) => [...document.querySelectorAll(query)];
const shown = (e) => e.getClientRects().length > 0;
const found = JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth, scripts: of("script").length,
  outside: of("main *:not(thead, thead *)").filter(
    (e) => shown(e) && e.getBoundingClientRect().right > innerWidth + 0.5
  ).length,
  damaged: of(".map i.damaged").length, cells: of(".map i").length,
  side: Math.min(...of(".map i").map((e) => e.getBoundingClientRect().width)),
  colours: [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color],
});
parent.postMessage(found, "*");
</script>
"""
"""Measures the page that it is added to, and tells the page around it."""
FRAME = """
<!doctype html>
<script>onmessage = (said) => { document.title = said.data; };</script>
<iframe src="measured.html" style="border: 0; width: WIDTHpx; height: 900px"></iframe>
"""
"""A page around it: a window has a least width, a frame has none."""
Browse = Callable[..., tuple[str, str, list[str]]]


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Browse:
    """Opens a page: its DOM, what the browser logged of it, and the addresses that it asked for."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs chromium")
    profile = tmp_path_factory.mktemp("profile")

    def open_page(path: Path, *options: str) -> tuple[str, str, list[str]]:
        log = path.with_suffix(".netlog")
        options = (f"--user-data-dir={profile}", f"--log-net-log={log}", *options)
        done = subprocess.run(
            [browser, *QUIET, *options, "--dump-dom", path.as_uri()], capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        logged = "\n".join(line for line in done.stderr.decode().splitlines() if "CONSOLE" in line)
        return done.stdout.decode(), logged, requests(log)

    return open_page


def requests(log: Path) -> list[str]:
    """What a page asked the network for, by the browser's log; what the browser itself asks for has no origin."""
    found = (event.get("params") or {} for event in json.loads(log.read_text(errors="replace"))["events"])
    asked = [(params["url"], params["initiator"]) for params in found if "url" in params and "initiator" in params]
    return sorted({url for url, origin in asked if origin != "not an origin" and not url.startswith("file:")})


def measured(browse: Browse, tmp_path: Path, text: str, width: int, *options: str) -> dict[str, Any]:
    """The page's measures in a window of a width. The probe runs in place of the page's policy."""
    path = tmp_path / "measured.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    path.write_text(text.replace("</main>", f"</main>{PROBE}"), encoding="utf-8", errors="backslashreplace")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    dom, logged, _ = browse(frame, "--window-size=1400,1000", *options)
    assert logged == ""
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    result = json.loads(found[1])
    assert result["width"] == width
    return dict(result)


def key(number: int) -> bytes:
    return bytes(range(16)) + b"\0\0" + block_hashes(number + 1)[number]


def damaged_run(store: Path = Path("/var/lib/kv store")) -> tuple[Run, dict[Path, FileMap | str]]:
    """A run with a finding of every kind, some of them hostile, on the first of two shards."""
    found = [
        Finding(kind, f"detail {number}: {HOSTILE}", key(number), 2**20 + number, 10 * number, 5, number % 2 == 0)
        for number, kind in enumerate(KINDS)
    ]
    found += [Finding("ORPHAN_CHUNK", "no place is known", nbytes=4096), Finding("ACCOUNTING", "12 instead of 13")]
    counts = dict.fromkeys(KINDS, 1)
    shards = [store / "tp0of2-pp0of1", store / "tp1of2-pp0of1"]
    run = Run(store, "default", 1_764_000_000.0)
    run.shards = [
        Checked(shards[0], found, Summary(1234, 5 * 2**30, 1300, 4.5, counts, [f"not this: {HOSTILE}"])),
        Checked(shards[1], [], Summary(77, 2**20, 77, 0.5)),
    ]
    forms = np.tile(np.arange(len(FORMS), dtype=np.uint8), 700)
    places = tuple(Place(f.kind, f.page, f.pages) for f in found if f.page is not None and f.damage)
    return run, {shards[0]: FileMap(4096, forms, places, 2), shards[1]: HOSTILE}


@pytest.fixture(scope="module")
def damaged() -> str:
    return page(*damaged_run())


@pytest.fixture
def written(damaged: str, tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(damaged, encoding="utf-8", errors="backslashreplace")
    return path


def visible(dom: str) -> str:
    """The text of a DOM, without its style sheet."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", dom, flags=re.DOTALL))


def test_a_browser_shows_what_was_found_and_says_nothing(browse: Browse, written: Path) -> None:
    dom, logged, asked = browse(written)
    assert logged == ""
    assert asked == []
    text = visible(dom)
    for kind in KINDS:
        assert kind in text
        assert KINDS[kind].meaning in text
    assert "Damaged: " in text
    assert "1,311 of 1,377" in re.sub(r"\s+", " ", text)
    assert "kvstore-fsck --repair '/var/lib/kv store'" in text
    assert "What was not checked" in text
    assert key(3).hex() in text
    assert "2025-11-24 16:00:00 UTC" in text
    assert "tp1of2-pp0of1" in text


def test_nothing_of_the_files_becomes_an_element_or_runs(browse: Browse, written: Path) -> None:
    dom, _, _ = browse(written)
    assert "owned" in visible(dom)
    assert "<title>owned" not in dom
    assert {name.lower() for name in re.findall(r"<([a-zA-Z][\w-]*)", dom)} & {"script", "img", "a", "link"} == set()
    assert "\u202e" not in dom
    assert "\x1b" not in dom


def test_the_browser_check_sees_errors_and_requests(browse: Browse, tmp_path: Path) -> None:
    """The tests above are not blind."""
    path = tmp_path / "bad.html"
    path.write_text('<img src="http://127.0.0.1:9/x.png"><script>undefined_name()</script>')
    _, logged, asked = browse(path)
    assert "undefined_name" in logged
    assert "http://127.0.0.1:9/x.png" in asked


def test_the_policy_lets_nothing_run_or_load(browse: Browse, tmp_path: Path, damaged: str) -> None:
    """Even where an element slipped through."""
    path = tmp_path / "slipped.html"
    slipped = '<script>document.title="owned"</script><img src="http://127.0.0.1:9/x.png">'
    path.write_text(damaged.replace("</main>", f"{slipped}</main>"), encoding="utf-8", errors="backslashreplace")
    dom, logged, asked = browse(path)
    assert "<title>owned" not in dom
    assert "Content Security Policy" in logged
    assert asked == []


@pytest.mark.parametrize("width", [1280, 700, 400])
def test_it_fits_wide_and_narrow_windows(browse: Browse, tmp_path: Path, damaged: str, width: int) -> None:
    found = measured(browse, tmp_path, damaged, width)
    assert found["scroll"] <= width
    assert found["outside"] == 0
    assert found["scripts"] == 1, "the probe's alone"
    assert found["side"] >= 8


def test_the_map_has_the_damage_in_its_place(browse: Browse, tmp_path: Path, damaged: str) -> None:
    found = measured(browse, tmp_path, damaged, 1280)
    file = damaged_run()[1][Path("/var/lib/kv store/tp0of2-pp0of1")]
    assert isinstance(file, FileMap)
    expected = list(cells(file))
    assert found["cells"] == len(expected)
    assert found["damaged"] == sum(bool(cell.found) for cell in expected) > 10


def test_dark_and_light_are_different_and_both_legible(browse: Browse, tmp_path: Path, damaged: str) -> None:
    light = measured(browse, tmp_path, damaged, 1280)["colours"]
    dark = measured(browse, tmp_path, damaged, 1280, "--force-dark-mode")["colours"]
    assert light != dark
    for colours in (light, dark):
        back, ink = (tuple(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert contrast(back, ink) > 10


def luminance(colour: tuple[int, ...]) -> float:
    parts = [c / 255 for c in colour]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Of WCAG 2: 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[scheme]
    colours = {name: tuple(bytes.fromhex(code)) for name, code in re.findall(r"--([\w-]+): #([0-9a-f]{6})", block)}
    pairs = [(ink, back) for ink in ("text", "soft") for back in ("page", "card")] + [("text", "code")]
    pairs += [(tone, f"{tone}-back") for tone in ("bad", "good", "warn")] + [
        (tone, "card") for tone in ("bad", "good", "warn")
    ]
    low = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < 4.5} == {}
    assert contrast(colours["bad"], colours["overflow"]) > 2, "damage stands out of the map"


def test_a_screenshot_can_be_taken(browse: Browse, written: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(written, f"--screenshot={shot}", "--window-size=1280,2000")
    assert shot.stat().st_size > 50_000, "a blank page is a tenth of that"


def test_a_clean_run_is_short(browse: Browse, tmp_path: Path) -> None:
    run, _ = damaged_run()
    run.shards = run.shards[1:]
    path = tmp_path / "clean.html"
    path.write_text(page(run, {}))
    dom, logged, asked = browse(path)
    text = visible(dom)
    assert (logged, asked) == ("", [])
    assert "Clean" in text
    assert "How to repair it" not in text
    assert "Findings" not in text


def test_a_hundred_thousand_findings_make_a_page_that_opens(browse: Browse, tmp_path: Path) -> None:
    run, maps = damaged_run()
    many = [Finding("STORAGE_HASH", "chunk 1", key(n % 50), 4096, n % 5000, 3, True) for n in range(100_000)]
    run.shards[0].findings = [*many, Finding("ACCOUNTING", "the last one")]
    path = tmp_path / "many.html"
    path.write_text(page(run, maps))
    assert path.stat().st_size < 2**20
    dom, logged, _ = browse(path)
    assert logged == ""
    assert "the last one" in dom
    assert f"{100_000 - MAX_SHOWN:,} findings more" in dom


# --- without a browser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<b>", '"', "'", "&", HOSTILE, "]]>", "</style>", "\0"])
def test_every_string_is_escaped(text: str) -> None:
    made = el("p", text, title=text)
    assert re.fullmatch(r'<p title="[^"<>\x00-\x1f]*">[^"<>\x00-\x1f]*</p>', made)


def test_markup_is_not_escaped_again() -> None:
    assert el("p", el("b", "<"), Markup("<i></i>")) == "<p><b>&lt;</b><i></i></p>"


def test_the_page_names_no_other_file(damaged: str) -> None:
    outside = re.sub(r"<style>.*?</style>", "", damaged, flags=re.DOTALL)
    assert not re.search(r"<(script|link|img|iframe|object|embed|a|form|base)\b", outside)
    assert not re.search(r"(?<!&quot;)\b(src|href|style|on\w+)=\"", outside)
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_every_form_of_a_page_has_its_words_and_its_colour() -> None:
    assert set(LEGEND) == set(FORMS)
    for form in FORMS:
        assert f"i.{form} {{" in STYLE


@pytest.mark.parametrize("pages", [1, 2, MAX_CELLS, MAX_CELLS + 1, 100_000])
def test_the_cells_cover_the_file_once(pages: int) -> None:
    places = (Place("TREE", pages - 1, 1), Place("HEADER", 0, 2**60), Place("KEY", pages + 5000, 1))
    found = list(cells(FileMap(4096, np.zeros(pages, np.uint8), places)))
    assert len(found) <= MAX_CELLS
    assert found[0].first == 0
    assert [cell.first for cell in found[1:]] == [cell.last + 1 for cell in found[:-1]]
    assert found[-1].last == pages - 1
    assert all("HEADER" in cell.found for cell in found)
    assert ["TREE" in cell.found for cell in found] == [False] * (len(found) - 1) + [True]


def test_the_map_of_a_real_store_shows_where_its_records_lie(tmp_path: Path) -> None:
    with open_store(tmp_path, make_cache(), io="inline") as store:
        hashes = block_hashes(4)
        store.put_blocks(hashes, range(4))
        name = store.identity.digest() + b"\0\0" + hashes[2]
        shard = store.folder
    found = file_map(shard, [Finding("STORAGE_HASH", "", name, 100), Finding("ACCOUNTING", "")])
    assert isinstance(found, FileMap)
    assert found.lost == 1
    assert {place.kind for place in found.places} == {"STORAGE_HASH"}
    assert all(0 < place.first < len(found.forms) for place in found.places)
    drawn = page(Run(tmp_path, "quick", 0.0, shards=[Checked(shard)]), {shard: found})
    assert drawn.count('class="damaged ') >= 1


@pytest.mark.parametrize("content", [None, b"", b"x" * 10_000, b"\xff" * 4096])
def test_a_file_that_is_none_has_no_map_and_a_report(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "data.mdb").write_bytes(content)
    run = Run(tmp_path, "quick", 0.0, shards=[Checked(tmp_path, [Finding("META", "none")], Summary(0, 0, 0, 0.0))])
    write_report(run, tmp_path / "report.html")
    assert "META" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == (["data.mdb"] if content is not None else []) + ["report.html"]


def test_a_report_replaces_an_older_one_or_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    run, _ = damaged_run()
    monkeypatch.setattr("kvstore.tools.fsck_html.page", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(run, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
