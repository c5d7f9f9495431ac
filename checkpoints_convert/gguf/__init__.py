"""GGUF, the files of llama.cpp: weights, configuration and tokenizer in one."""

from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint
from checkpoints_convert.gguf.index import find_gguf
from checkpoints_convert.gguf.kept_tokenizer import tokenizer_files

__all__ = ["GGUFCheckpoint", "find_gguf", "tokenizer_files"]
