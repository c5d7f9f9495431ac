"""Totals of a scheduler. Plain Python: no JAX here."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the start; tokens unless said otherwise."""

    num_added: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    reused_tokens: int = 0
    copied_pages: int = 0
    host_hit_tokens: int = 0  # of the reused ones, those whose pages came back from host memory
    disk_read_tokens: int = 0  # whose pages were read from `prefix_store`
    host_bytes_out: int = 0
    host_bytes_in: int = 0
