"""What a test needs that makes a package."""

from __future__ import annotations

import shutil

import pytest

from bitport.errors import ExportError
from bitport.export.compile import ARCHIVE, check_compiler


def missing() -> str | None:
    try:
        check_compiler()
    except ExportError as error:
        return str(error)
    if not shutil.which("g++"):
        return "needs g++"
    return None if ARCHIVE.is_file() else "needs the native kernels as an archive"


needs_packages = pytest.mark.skipif(missing() is not None, reason=str(missing()))
