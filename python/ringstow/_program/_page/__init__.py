"""``ringstow report``: one page of a run, as a self-contained HTML file.

`_gather` reads manifests and compares checksums; `_charts` and `_html` are pure: they turn values
into text.
"""
