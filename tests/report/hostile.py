"""A report whose names try to break out of the page."""

from __future__ import annotations

from bitport.report import LayerReport, Report

NAMES = (
    "<script>alert(1)</script>.0.weight",
    "a\"onmouseover='alert(1)' x=\".1.weight",
    "</title></svg></style><img src=x onerror=alert(1)>",
    "&lt;b&gt; &amp; model.layers.2.<b>.weight",
    "right\u202eto left\x00\x1b[31m\ud800.3.weight",
    "javascript:alert(1)//http://example.com/x.js",
    "x" * 5000,
    "",
)

REPORT = Report(
    tuple(
        LayerReport(name, f"{name}-scheme" if at % 2 else None, f"rule {name}", 1000, 300, sqnr=10.0 + at, note=name)
        for at, name in enumerate(NAMES)
    ),
    10_000,
    3000,
    algorithm=NAMES[0],
)
