"""The formats that are read and written."""

from __future__ import annotations

from bitport.interop import awq, bitsandbytes, codec, compressed_tensors, float8, gptq, mxfp4

READERS: dict[str, type[codec.Reader]] = {
    "gptq": gptq.Reader,
    "awq": awq.Reader,
    "compressed-tensors": compressed_tensors.Reader,
    "bitsandbytes": bitsandbytes.Reader,
    "fp8": float8.Reader,
    "mxfp4": mxfp4.Reader,
}
"""By the quant_method of config.json."""

WRITERS: dict[str, type[codec.Writer]] = {
    writer.name: writer for writer in (compressed_tensors.Writer, gptq.Writer, gptq.WriterV2, awq.Writer, float8.Writer)
}
"""By the name that users give."""
