"""Reading and writing checkpoints, tokenizers and chat templates; files from strangers are safe."""
