"""The peers that bitport is compared with, itself included: one file each, with the interface in ``base``."""

PEERS = {
    "torch": "bench.peers.torch_bf16",
    "bitport": "bench.peers.own",
    "aten": "bench.peers.aten",
    "onednn": "bench.peers.onednn",
    "torchao": "bench.peers.torchao_peer",
    "onnxruntime": "bench.peers.onnxruntime_peer",
    "openvino": "bench.peers.openvino_peer",
    "xnnpack": "bench.peers.xnnpack",
    "bitsandbytes": "bench.peers.bitsandbytes_peer",
    "quanto": "bench.peers.quanto",
    "ggml": "bench.peers.ggml",
    "ggml-amx": "bench.peers.ggml_amx",
}
"""Name -> module. Each runs in its own process."""

BASE = ("torch", "bf16")
"""Peer and variant that all times are relative to: eager F.linear in bfloat16."""
