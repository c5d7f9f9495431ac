"""stub"""
LAYOUT = "interleaved"

def unsupported(spec, platform):
    return "not written yet"

def make_schedule(spec, page_table, query_starts, query_lengths, kv_lengths): ...
def attention(operands, spec, schedule): ...
