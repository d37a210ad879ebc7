"""The peers on a GPU, with the interface of ``bench.peers.base``. Weights are on the device already."""

PEERS = {
    "torch": "bench.gpu.peers.cublas",
    "bitport": "bench.gpu.peers.own",
    "tinygemm": "bench.gpu.peers.tinygemm",
    "torchao": "bench.gpu.peers.torchao_gpu",
    "gemlite": "bench.gpu.peers.gemlite_peer",
    "bitsandbytes": "bench.gpu.peers.bitsandbytes_gpu",
}
"""Name -> module. Each runs in its own process."""
