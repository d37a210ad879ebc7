"""What was done to a model, as data first and text second."""

from bitport.report.quantized import LayerReport, Report

__all__ = ["LayerReport", "Report"]
