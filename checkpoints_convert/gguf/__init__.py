"""GGUF, the files of llama.cpp: weights, configuration and tokenizer in one."""
