"""The formats that are read and written."""

from __future__ import annotations

from bitport.interop import codec, gptq

READERS: dict[str, type[codec.Reader]] = {
    "gptq": gptq.Reader,
}
"""By the quant_method of config.json."""

WRITERS: dict[str, type[codec.Writer]] = {writer.name: writer for writer in (gptq.Writer, gptq.WriterV2)}
"""By the name that users give."""
