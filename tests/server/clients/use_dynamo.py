"""Dynamo's index of cached blocks over ZMQ: the workers of sys.argv[1], then on each line of the input what it should
say of token ids: `workers`, blocks by worker on the device and in host memory."""

import asyncio
import json
import sys

from dynamo._core import SelectionService


async def scores(service, asked):
    request = {"model_name": "demo", "token_ids": asked["token_ids"]}
    if asked.get("cache_salt"):
        request["cache_salt"] = asked["cache_salt"]
    found = await service.overlap_scores(request)
    return {str(one["worker_id"]): [one["device_blocks"], one["host_pinned_blocks"]] for one in found["workers"]}


async def main():
    service = SelectionService(indexer_threads=1)
    for number, worker in enumerate(json.loads(sys.argv[1])):
        about = {"worker_id": number, "model_name": "demo", "max_num_batched_tokens": 8192, "total_kv_blocks": 1000}
        ranks = {"data_parallel_start_rank": 0, "data_parallel_size": 1, "kv_events_endpoints": {0: worker["events"]}}
        await service.upsert_worker({**about, **ranks, **worker["more"]})
    print("listening", flush=True)
    for line in iter(sys.stdin.readline, ""):
        for asked in json.loads(line):
            found = None
            for _ in range(300):
                if (found := await scores(service, asked)) == asked["workers"]:
                    break
                await asyncio.sleep(0.1)
            else:
                print(f"{found} blocks, not {asked['workers']}, of {asked['token_ids'][:3]}...", flush=True)
                break
        else:
            print("equal", flush=True)
    service.shutdown()


asyncio.run(main())
