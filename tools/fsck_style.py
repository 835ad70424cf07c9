"""How the report looks: one style sheet, for light and dark screens, wide and narrow ones, and paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f4f5f7; --card: #ffffff; --line: #dfe2e8; --text: #1b2230; --soft: #566074; --code: #eef0f4;
  --bad: #b3261e; --bad-back: #fdecea; --good: #12703c; --good-back: #e6f4ec; --warn: #8a5300; --warn-back: #fdf1dd;
  --meta: #7a4fc4; --branch: #0f8a8a; --leaf: #2f6fde; --overflow: #9cbcf2; --free: #e3e6eb; --unused: #f6f7f9;
  --unknown: #b9a37a; --shadow: 0 1px 2px rgb(20 28 45 / 8%);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10141b; --card: #181e28; --line: #2c3442; --text: #e7ebf2; --soft: #a2adbf; --code: #222a37;
    --bad: #ff8d84; --bad-back: #3b1a1b; --good: #6fd79a; --good-back: #14301f; --warn: #f2bd6a; --warn-back: #362712;
    --meta: #a685e8; --branch: #35b3b0; --leaf: #5b93f5; --overflow: #34558f; --free: #2a313d; --unused: #1d2430;
    --unknown: #8d7a52; --shadow: none;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 28px 24px 48px; }
h1, h2, h3 { line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h1 { font-size: 26px; letter-spacing: -0.01em; }
h2 { font-size: 19px; }
h3 { font-size: 15px; margin: 26px 0 10px; }
p { margin: 6px 0; }
code, pre, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.tool { color: var(--soft); font-size: 13px; font-weight: 600; letter-spacing: 0.02em; }
.note { color: var(--soft); font-size: 13px; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; box-shadow: var(--shadow);
  padding: 22px 24px; margin-top: 18px;
}
.verdict { border-left: 6px solid var(--good); }
.verdict.bad { border-left-color: var(--bad); }
.verdict.warn { border-left-color: var(--warn); }
.verdict h1 { margin: 6px 0 4px; }
.verdict.bad h1 { color: var(--bad); }
.verdict.warn h1 { color: var(--warn); }
.verdict.good h1 { color: var(--good); }
.path { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0 0; }
.tiles div { background: var(--page); border-radius: 8px; padding: 10px 14px; }
.tiles dt { color: var(--soft); font-size: 12.5px; }
.tiles dd { margin: 0; font-size: 21px; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { display: inline-block; font-size: 13px; font-weight: 400; color: var(--soft); }
table { border-collapse: collapse; width: 100%; }
th { color: var(--soft); font-size: 12.5px; font-weight: 600; text-align: left; white-space: nowrap; }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td:last-child, th:last-child { padding-right: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.key { overflow-wrap: anywhere; min-width: 19ch; max-width: 38ch; }
.key span { user-select: all; }
.detail { overflow-wrap: anywhere; }
.again { white-space: nowrap; }
.kind {
  display: inline-block; padding: 1px 8px; border-radius: 6px; background: var(--bad-back); color: var(--bad);
  font-size: 12.5px; font-weight: 600; white-space: nowrap;
}
.kind.harmless { background: var(--warn-back); color: var(--warn); }
.state { float: right; padding: 2px 10px; border-radius: 999px; font-size: 12.5px; font-weight: 600; margin-left: 12px; }
.state.bad { background: var(--bad-back); color: var(--bad); }
.state.warn { background: var(--warn-back); color: var(--warn); }
.state.good { background: var(--good-back); color: var(--good); }
pre {
  background: var(--code); border-radius: 8px; padding: 12px 14px; margin: 8px 0; white-space: pre-wrap;
  overflow-wrap: anywhere; user-select: all;
}
.map { display: grid; grid-template-columns: repeat(auto-fill, minmax(13px, 1fr)); gap: 2px; margin: 10px 0; }
.map i { aspect-ratio: 1; }
.map i, .legend i { display: block; border-radius: 2px; position: relative; }
.map i.damaged, .legend i.damaged { background: var(--bad) !important; outline: 2px solid var(--bad); z-index: 1; }
.damaged::after {
  content: ""; position: absolute; inset: 0;
  background: linear-gradient(45deg, transparent 42%, var(--card) 42% 58%, transparent 58%),
    linear-gradient(-45deg, transparent 42%, var(--card) 42% 58%, transparent 58%);
}
i.meta { background: var(--meta); } i.branch { background: var(--branch); } i.leaf { background: var(--leaf); }
i.overflow { background: var(--overflow); } i.free { background: var(--free); }
i.unused { background: var(--unused); box-shadow: inset 0 0 0 1px var(--line); } i.unknown { background: var(--unknown); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 6px 18px; padding: 0; margin: 10px 0; font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 7px; color: var(--soft); }
.legend i { width: 13px; height: 13px; flex: none; }
details { margin: 8px 0; }
summary { cursor: pointer; color: var(--soft); font-size: 13px; }
.places, .steps { padding-left: 20px; margin: 6px 0; font-size: 14px; }
.places { columns: 2 340px; font-size: 13px; }
footer { color: var(--soft); font-size: 12.5px; margin-top: 22px; }
@media (max-width: 700px) {
  main { padding: 14px 12px 32px; }
  h1 { font-size: 21px; }
  .card { padding: 16px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .tiles dd { font-size: 18px; }
  .map { grid-template-columns: repeat(auto-fill, minmax(9px, 1fr)); gap: 1.5px; }
  thead { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden; }
  table, tbody, tr, td { display: block; }
  tr { padding: 12px 0; border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; padding-bottom: 0; }
  td { display: grid; grid-template-columns: 96px minmax(0, 1fr); gap: 10px; padding: 3px 0; border: 0; text-align: left; }
  td::before { content: attr(data-label); color: var(--soft); font-size: 12.5px; }
  td.empty { display: none; }
  .num { text-align: left; white-space: normal; }
  .key { max-width: none; min-width: 0; }
  .kind { justify-self: start; }
}
@media print { body { background: #fff; } .card { break-inside: avoid-page; } }
"""
