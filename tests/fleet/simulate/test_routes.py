"""Routing from an index of loads is that of `PrefixRouter`, which looks at all replicas."""

import random

from jaxinfer.fleet.routing import PrefixRouter
from jaxinfer.fleet.simulate.routes import IndexedPrefixRouter, LoadIndex


def test_the_index_chooses_as_the_router():
    numbers = random.Random(1)
    plain, indexed, index = PrefixRouter[int](40, 3), IndexedPrefixRouter(40, 3), LoadIndex()
    loads = dict.fromkeys(range(12), 0)
    for name in loads:
        index.set(name, 0)
    for _ in range(3000):
        family = numbers.randrange(6)  # prompts of a family begin alike
        length = numbers.randrange(8)
        keys = [family * 100 + block for block in range(length)] + [
            10_000 * (10 * family + length + 1) + numbers.randrange(9)
        ]
        if numbers.random() < 0.01:
            lost = numbers.choice(list(loads))
            for router in (plain, indexed):
                router.remove(lost)
            del loads[lost]
            index.remove(lost)
            loads = dict(sorted({**loads, lost: 0}.items()))
            index.set(lost, 0)
        chosen = indexed.choose_from(keys, index)
        assert chosen == plain.choose(keys, loads)
        assert loads[index.least()] == min(loads.values())
        loads[chosen] += 1
        index.set(chosen, loads[chosen])
        ended = numbers.choice([name for name, load in loads.items() if load])
        if numbers.random() < 0.95:
            loads[ended] -= 1
            index.set(ended, loads[ended])
