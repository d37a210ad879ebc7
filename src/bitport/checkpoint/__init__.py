"""Checkpoints: safetensors shards that hold the canonical parts of every tensor, and a manifest that describes them."""

from bitport.checkpoint.arranged import Arrangement
from bitport.checkpoint.dcp import ModelState
from bitport.checkpoint.load import load
from bitport.checkpoint.manifest import Entry, Manifest, Part
from bitport.checkpoint.parse import read_manifest
from bitport.checkpoint.quantize import plan_files, quantize_files
from bitport.checkpoint.save import save
from bitport.checkpoint.writer import Writer

__all__ = [
    "Arrangement",
    "Entry",
    "Manifest",
    "ModelState",
    "Part",
    "Writer",
    "load",
    "plan_files",
    "quantize_files",
    "read_manifest",
    "save",
]
