"""Export to programs that run without Python: a module compiled ahead of time, with its weights in one file; and models
for other runtimes (docs/deploy.md)."""

from bitport.export.decompose import decomposed
from bitport.export.executorch import executorch
from bitport.export.generate import generate
from bitport.export.load import Program, load
from bitport.export.onnx import onnx
from bitport.export.package import package
from bitport.export.trace import Method

__all__ = ["Method", "Program", "decomposed", "executorch", "generate", "load", "onnx", "package"]
