"""Those bitport is compared with on a GPU, in the form of ``bench.peers.base``. Weights arrive on the device."""

PEERS = {
    "torch": "bench.gpu.peers.cublas",
    "bitport": "bench.gpu.peers.own",
    "tinygemm": "bench.gpu.peers.tinygemm",
    "torchao": "bench.gpu.peers.torchao_gpu",
    "gemlite": "bench.gpu.peers.gemlite_peer",
    "bitsandbytes": "bench.gpu.peers.bitsandbytes_gpu",
}
"""Name -> module. Each runs in a process of its own."""
