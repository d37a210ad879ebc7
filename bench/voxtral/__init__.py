"""A program shaped like Voxtral, as a package that runs without Python, in bf16 and quantized."""
