"""Requirements of tests that build a package."""

from __future__ import annotations

import shutil

import pytest

from bitport.errors import ExportError
from bitport.export.compile import check_compiler


def missing() -> str | None:
    try:
        check_compiler()
    except ExportError as error:
        return str(error)
    return None if shutil.which("g++") else "needs g++"


needs_packages = pytest.mark.skipif(missing() is not None, reason=str(missing()))
