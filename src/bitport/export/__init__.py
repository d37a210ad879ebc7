"""Programs that run without Python: a module, compiled ahead of time, with its weights in one file (docs/deploy.md)."""

from bitport.export.compile import Method
from bitport.export.decompose import decomposed
from bitport.export.load import Program, load
from bitport.export.package import package

__all__ = ["Method", "Program", "decomposed", "load", "package"]
