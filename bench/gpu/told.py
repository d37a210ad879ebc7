"""A plugin of pytest (``-p bench.gpu.told``): what failed is told at once, not at the end, to which a piece that is
stopped may not come."""

from __future__ import annotations

import pytest


class Told:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid}\n{report.longreprtext}")
            self._terminal.flush()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Told(terminal))
