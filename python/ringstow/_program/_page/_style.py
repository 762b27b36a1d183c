"""The page's style: light and dark, wide and narrow."""

STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1c2126; --soft: #66717c; --line: #d5dbe0; --paper: #fff;
  --bar: #c44e00; --bad: #b00020; --good: #1b7f3b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8ecef; --soft: #98a4ae; --line: #39424a; --paper: #14181b;
    --bar: #ff8a3d; --bad: #ff6b7d; --good: #5fd188;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 64rem; padding: 0 1rem; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin-bottom: 0; }
.soft { color: var(--soft); }
.bad { color: var(--bad); }
.good { color: var(--good); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; overflow-wrap: normal; }
th, td {
  text-align: left; padding: .25rem .7rem .25rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line);
}
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; }
code { font-size: .9em; }
details { margin: .4rem 0; }
svg { width: 100%; min-width: 38rem; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg .end { text-anchor: end; fill: var(--soft); }
svg .under { text-anchor: middle; fill: var(--soft); }
svg .bar, svg .dot { fill: var(--bar); }
svg rect.bad { fill: var(--bad); }
svg .axis { stroke: var(--line); }
svg .line { fill: none; stroke: var(--bar); stroke-width: 2; }
svg g text { fill: #fff; pointer-events: none; }
/* On a phone a chart is whole, with larger words. A map of tensors scrolls: names need its room. */
@media (max-width: 40rem) {
  .wide:has(.axis), .wide svg:has(.axis) { min-width: 0; overflow: visible; }
  .wide svg:has(.axis) text { font-size: 24px; }
  .wide svg .under:nth-last-of-type(even) { display: none; }
  svg .line { stroke-width: 4; }
}
.t0 { fill: #b34700; }
.t1 { fill: #3b6ea5; }
.t2 { fill: #4c7a31; }
.t3 { fill: #7d549a; }
.t4 { fill: #8a6220; }
.t5 { fill: #3d7878; }
"""
