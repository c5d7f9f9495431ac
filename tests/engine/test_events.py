"""What an engine tells of itself: every dispatch to its observers, and a snapshot between steps."""

import pytest

from jaxinfer import LLM, SamplingParams

OPTIONS = {"max_seqs": 2, "max_model_len": 64, "prefill_chunk": 16, "steps_per_dispatch": 4, "page_size": 8}


def generate(llm, lengths, num_tokens=9):
    """Requests of so many prompt tokens each, stepped to their end; what each step left."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    requests = [llm.prepare([3 + number] * length, params) for number, length in enumerate(lengths)]
    answers = [answer for request in requests for answer in llm.submit(request)]
    snapshots = []
    while llm.engine.has_work:
        llm.engine.step()
        snapshots.append(llm.engine.snapshot())
    return answers, snapshots


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, **OPTIONS) as llm:
        yield llm


@pytest.mark.slow
def test_an_observer_hears_of_every_prompt_token_and_every_step(llm):
    heard = []
    with llm.engine.observe(heard.append):
        answers, _ = generate(llm, [20, 5])
        assert len(heard) > 3
    for answer, length in zip(answers, (20, 5), strict=True):
        mine = [(one, work) for one in heard for work in one.work if work.sequence is answer]
        chunks = [(work.start, work.num_prompt_tokens) for _, work in mine if not work.is_decoding]
        assert sum(count for _, count in chunks) == length
        assert [start for start, _ in chunks] == [sum(count for _, count in chunks[:i]) for i in range(len(chunks))]
        # The prompt's last step makes the first token; the loop may have steps to spare.
        assert sum(one.num_steps for one, work in mine if work.is_decoding) >= 9 - 1
        starts = [work.start for _, work in mine if work.is_decoding]
        assert starts == sorted(starts)
        assert starts[0] >= length
    for one in heard:
        one.wait()
        assert one.kind == ("step" if any(not work.is_decoding for work in one.work) else "decode")
        assert one.output.is_ready()
        assert one.busy_since <= one.sent_at
        assert one.num_rows >= sum(work.num_prompt_tokens or 1 for work in one.work)
        assert len({work.slot for work in one.work}) == len(one.work)
    assert [one.sent_at for one in heard] == sorted(one.sent_at for one in heard)


@pytest.mark.slow
def test_who_has_left_hears_nothing(llm):
    heard, others = [], []
    with llm.engine.observe(others.append):
        with pytest.raises(RuntimeError, match="planned"), llm.engine.observe(heard.append):
            raise RuntimeError("planned")
        generate(llm, [3])
    assert heard == []
    assert others
    count = len(others)
    generate(llm, [4])
    assert len(others) == count


def test_a_snapshot_has_slots_pages_and_totals(llm):
    before = llm.engine.snapshot()
    answers, snapshots = generate(llm, [17, 6, 11])
    assert before.running == ()
    assert {one.sequence for found in snapshots for one in found.running} == set(answers)
    assert snapshots[0].num_waiting == 3 - len(snapshots[0].running) > 0
    for found in snapshots:
        assert len({one.slot for one in found.running}) == len(found.running)
        for one in found.running:
            assert 0 < one.num_stored <= len(one.pages) * OPTIONS["page_size"]
    after = snapshots[-1]
    assert after.num_free_pages == before.num_free_pages
    computed = after.counters.computed_prompt_tokens - before.counters.computed_prompt_tokens
    reused = after.counters.reused_tokens - before.counters.reused_tokens
    assert computed + reused == 17 + 6 + 11
    assert before.counters is not llm.engine.snapshot().counters


@pytest.mark.slow
def test_rounds_are_told_as_such(tiny):
    heard = []
    with LLM(tiny, draft="layers:1", num_draft_tokens=2, **OPTIONS) as llm, llm.engine.observe(heard.append):
        generate(llm, [6])
    rounds = [one for one in heard if one.kind == "rounds"]
    assert rounds
    assert {one.num_rows for one in rounds} == {2 * 3}


@pytest.mark.slow
def test_replicas_are_heard_and_shown_together(tiny):
    heard = []
    with LLM(tiny, mesh="data=2", **OPTIONS) as llm:
        with llm.engine.observe(heard.append):
            answers, snapshots = generate(llm, [9, 10, 11, 12, 13])
        counters = llm.engine.snapshot().counters
    assert {one.replica for one in heard} == {0, 1}
    assert max(len(found.running) for found in snapshots) == 4
    assert {one.replica for found in snapshots for one in found.running} == {0, 1}
    assert max(found.num_waiting for found in snapshots) == 1
    assert (counters.num_added, counters.num_finished) == (5, 5)
    told = sum(work.num_prompt_tokens for one in heard for work in one.work)
    assert told == counters.computed_prompt_tokens == sum(one.num_prompt for one in answers)
