"""Reports on what was done to a model, as data first and text second."""

from bitport.report.explain import Explanation, LayerExplanation
from bitport.report.quantized import LayerReport, Report

__all__ = ["Explanation", "LayerExplanation", "LayerReport", "Report"]
