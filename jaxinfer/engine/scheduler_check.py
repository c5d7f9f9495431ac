"""What must hold of a scheduler between its steps. Plain Python: no JAX here."""

from typing import Any


def check_scheduler(scheduler: Any) -> None:
    """Raises RuntimeError where pages, slots or lists of a `Scheduler` do not agree."""
    scheduler.pools.check(scheduler.running)
    scheduler.compaction.check(scheduler.running)
    scheduler.saved.check(scheduler.running)
    scheduler.prefixes.check()
    slots = [one.slot for one in scheduler.running]
    if sorted([*scheduler._free_slots, *(slot for slot in slots if slot is not None)]) != list(
        range(scheduler.options.max_seqs)
    ):
        raise RuntimeError(f"slots {slots} are held and {sorted(scheduler._free_slots)} are free")
    for one in scheduler.waiting:
        if one.slot is not None or any((*one.tables, *one.prompt_tables)) or one.saved or one.is_finished:
            raise RuntimeError(f"sequence {one.order} waits with {len(one.pages)} pages, slot {one.slot}")
    if scheduler.waiting != sorted(scheduler.waiting, key=lambda one: one.rank):
        raise RuntimeError("the queue is out of order")
    for one in scheduler.running:
        if scheduler.pools.pages_of(one, min(one.num_reserved, one.num_storable)) > len(one.pages):
            raise RuntimeError(f"{one.num_reserved} tokens may be stored in {len(one.pages)} pages")
        if one.num_stored > min(one.num_reserved, one.num_storable):
            raise RuntimeError(f"{one.num_stored} tokens are stored, at most {one.num_reserved} are planned")
        first = one.num_confirmed // scheduler.options.page_size
        for index, pool in enumerate(scheduler.pools.all):
            for page in [
                page for tables in (one.tables, one.prompt_tables) if tables for page in tables[index][first:]
            ]:
                if pool.num_owners(page) > 1 or pool.is_kept(page):
                    raise RuntimeError(f"page {page} is still written, but it is shared or known")
