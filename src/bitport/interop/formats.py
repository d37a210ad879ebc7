"""The registries of formats that can be read and written."""

from __future__ import annotations

from bitport.interop import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    codec,
    compressed_tensors,
    dense,
    fbgemm,
    float8,
    gemma,
    gptq,
    hqq,
    mlx,
    modelopt,
    mxfp4,
    quanto,
    quark,
    torchao,
)

READERS: dict[str, type[codec.Reader]] = {
    "gptq": gptq.Reader,
    "awq": awq.Reader,
    "auto-round": auto_round.Reader,
    "intel/auto-round": auto_round.Reader,
    "compressed-tensors": compressed_tensors.Reader,
    "torchao": torchao.Reader,
    "bitsandbytes": bitsandbytes.Reader,
    "fp8": float8.Reader,
    "mxfp8": float8.Reader,
    "fbgemm_fp8": fbgemm.Reader,
    "modelopt": modelopt.Reader,
    "mxfp4": mxfp4.Reader,
    "mlx": mlx.Reader,
    "metal": mlx.Reader,
    "hqq": hqq.Reader,
    "quanto": quanto.Reader,
    "quark": quark.Reader,
    "gemma": gemma.Reader,
    "bitnet": bitnet.Reader,
}
"""The formats that can be read, by the quant_method of config.json (docs/interop.md)."""

WRITERS: dict[str, type[codec.Writer]] = {
    writer.name: writer
    for writer in (
        compressed_tensors.Writer,
        gptq.Writer,
        gptq.WriterV2,
        awq.Writer,
        bitsandbytes.Writer,
        torchao.Writer,
        float8.Writer,
        mxfp4.Writer,
        mlx.Writer,
        hqq.Writer,
        quanto.Writer,
        dense.Writer,
    )
}
"""The formats that can be written, by the name that users give (docs/interop.md)."""
