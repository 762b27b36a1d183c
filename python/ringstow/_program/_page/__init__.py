"""``ringstow report``: one page of a run, as an HTML file that needs nothing else.

`_gather` reads manifests and compares checksums; `_charts` and `_html` are pure: they make text of
values.
"""
