"""A program shaped like Voxtral: what it takes as a package, without Python, in bf16 and quantized."""
