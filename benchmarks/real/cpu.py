"""What a CPU is and which instruction sets it announces, for figures that depend on both."""

import platform
from pathlib import Path

# What our kernels and llama.cpp's use, by the names of Linux.
INSTRUCTION_SETS = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512_vnni",
    "AVX-VNNI": "avx_vnni",
    "AVX-512-BF16": "avx512_bf16",
    "AMX": "amx_tile",
}


def describe_cpu(text: str | None = None) -> dict[str, str | list[str]]:
    """The CPU's name and its instruction sets, from the text of /proc/cpuinfo; the architecture alone elsewhere."""
    source = Path("/proc/cpuinfo")
    if text is None:
        text = source.read_text(encoding="utf-8") if source.exists() else ""
    fields = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.machine()),
        "instruction_sets": [name for name, flag in INSTRUCTION_SETS.items() if flag in flags],
    }
