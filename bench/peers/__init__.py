"""Other engines as contestants, each in a process and, if need be, an environment of its own.

`engines` starts the processes, and `serving` is the loop inside them.  `llama`, whose files
`gguf_file` writes, and `openvino_ai` are the engines.  What runs in the processes imports neither
jax nor specjax.
"""
