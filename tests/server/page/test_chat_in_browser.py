"""The chat page in a real browser: talking, stopping, branching, keeping, settings and failures."""

import json

import pytest

from tests.server.page.conftest import PHONE
from tests.server.page.fake_server import KEY

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ANSWERS = ".message.assistant"
DONE = f"{ANSWERS} .foot [data-action=again]:enabled"


def send(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")


def ask(page, text):
    """Sends a message and waits until its answer has ended."""
    send(page, text)
    page.locator(".message.user .text", has_text=text).last.wait_for()
    settled(page)


def until(page, condition):
    """Waits in the page: its policy refuses playwright's wait_for_function, which evaluates text again and again."""
    limit = "Date.now() + 10000"
    page.evaluate(f"""async () => {{
        for (const end = {limit}; !({condition}); await new Promise(done => setTimeout(done, 20)))
            if (Date.now() > end) throw new Error("not within 10 s: {condition}");
    }}""")


def settled(page):
    until(page, "state.jobs.size === 0")


def shown(page):
    """Texts of the messages on the page."""
    return page.eval_on_selector_all(
        ".message", "all => all.map(one => one.querySelector('.text, .markdown').innerText)"
    )


def stored(page):
    return page.evaluate(
        "Object.keys(localStorage).filter(k => k.startsWith('jaxinfer.chat.')).map(k => JSON.parse(localStorage[k]))"
    )


def test_a_question_is_answered_and_its_request_has_only_what_is_set(page, server):
    ask(page, "What is JAX?")
    assert shown(page) == ["What is JAX?", "Answer 1 to “What is JAX?”. ✓"]
    assert server.requests == [
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is JAX?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert page.inner_text(".stats").startswith("5 tokens · ")
    assert "first token" in page.inner_text(".stats")
    ask(page, "And XLA?")
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert page.title() == "What is JAX? – jaxinfer"
    assert page.evaluate("document.activeElement.id") == "input"


def test_an_answer_is_announced_once_it_is_there(page):
    ask(page, "Hello")
    assert page.inner_text("#status") == "Answer: Answer 1 to “Hello”. ✓"
    assert page.get_attribute("#messages", "aria-live") == "off"  # not each chunk


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_is_stopped(page, server, how):
    send(page, "slow")
    page.wait_for_selector("text=word3")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    page.click("#send") if how == "button" else page.keyboard.press("Escape")
    settled(page)
    assert page.inner_text(".stats").startswith("Stopped")
    assert page.get_attribute("#send", "aria-label") == "Send"
    text = shown(page)[1]
    page.wait_for_timeout(300)
    assert shown(page)[1] == text
    assert "word299" not in text
    page.wait_for_timeout(300)
    assert server.num_disconnects == 1
    ask(page, "next")
    assert server.requests[1]["messages"][1]["content"].strip() == text.strip()


def test_regenerated_answers_are_versions(page, server):
    ask(page, "Again?")
    page.click(DONE)
    settled(page)
    assert shown(page)[1].startswith("Answer 2")
    assert server.requests[0] == server.requests[1]
    branches = page.locator(f"{ANSWERS} .branches")
    assert branches.inner_text() == "2 / 2"
    page.click("[aria-label='Previous version']")
    assert shown(page)[1].startswith("Answer 1")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Next version"
    ask(page, "After the first")
    assert server.requests[2]["messages"][1]["content"].startswith("Answer 1")
    page.click("[aria-label='Next version']")
    assert len(shown(page)) == 2
    page.click("[aria-label='Previous version']")
    assert shown(page)[2] == "After the first"


def test_an_edited_question_is_a_branch(page, server):
    ask(page, "Frist")
    page.hover(".message.user")
    page.click(".message.user [data-action=edit]")
    area = page.locator(".edit textarea")
    assert area.input_value() == "Frist"
    area.fill("First\nline")
    area.press("Enter")
    settled(page)
    assert shown(page)[0] == "First\nline"
    assert server.requests[1]["messages"] == [{"role": "user", "content": "First\nline"}]
    page.hover(".message.user")
    page.click(".message.user [aria-label='Previous version']")
    assert shown(page) == ["Frist", "Answer 1 to “Frist”. ✓"]


def test_an_edited_answer_is_a_branch_that_the_next_request_has(page, server):
    ask(page, "Name a colour")
    page.click(f"{ANSWERS} [data-action=edit]")
    page.locator(".edit textarea").fill("Blue")
    page.click(".edit .primary")
    assert shown(page)[1] == "Blue"
    assert page.inner_text(".stats") == "Edited"
    ask(page, "Why?")
    assert [one["content"] for one in server.requests[1]["messages"]] == ["Name a colour", "Blue", "Why?"]


def test_the_keyboard(page, server):
    page.fill("#input", "one")
    page.press("#input", "Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    settled(page)
    assert server.requests[0]["messages"][0]["content"] == "one\ntwo"
    page.keyboard.press("ArrowUp")
    assert page.locator(".edit textarea").input_value() == "one\ntwo"
    page.keyboard.press("Escape")
    assert page.locator(".edit").count() == 0
    page.keyboard.press("Control+Shift+O")
    assert shown(page) == []
    assert page.evaluate("document.activeElement.id") == "input"
    page.press("#input", "Enter")  # nothing to send
    assert len(server.requests) == 1


def test_a_reload_keeps_conversation_branch_and_draft(page, server):
    ask(page, "Keep me")
    page.click(DONE)
    settled(page)
    page.click("[aria-label='Previous version']")
    page.fill("#input", "not sent")
    before = shown(page)
    page.reload()
    page.wait_for_selector(ANSWERS)
    assert shown(page) == before
    assert page.inner_text(f"{ANSWERS} .branches") == "1 / 2"
    assert page.input_value("#input") == "not sent"
    assert len(server.requests) == 2


def test_a_reload_in_the_middle_keeps_the_part_and_offers_a_retry(page):
    send(page, "slow")
    page.wait_for_selector("text=word5")
    page.reload()
    page.wait_for_selector(".failure:visible")
    assert "word5" in shown(page)[1]
    # Whichever comes first: the end of the page or that of its connection.
    assert page.inner_text(".failure span").startswith(("This answer has not ended", "The connection was lost"))
    page.click("[data-action=retry]")
    page.wait_for_selector("text=word3")
    page.keyboard.press("Escape")
    settled(page)
    assert page.inner_text(f"{ANSWERS} .branches") == "2 / 2"


def test_conversations_are_listed_renamed_deleted_and_brought_back(page):
    for name in ("First", "Second"):
        page.click("#new-chat")
        ask(page, name)
    titles = page.locator(".row-title")
    assert titles.all_inner_texts() == ["Second", "First"]
    titles.last.click()
    assert shown(page)[0] == "First"
    page.go_back()
    assert shown(page)[0] == "Second"
    page.hover(".row.current")
    page.click(".row.current [aria-label=Rename]")
    page.fill(".row input", "Renamed <b>")
    page.press(".row input", "Enter")
    assert titles.first.inner_text() == "Renamed <b>"
    page.hover(".row.current")
    page.click(".row.current [aria-label=Delete]")
    assert titles.all_inner_texts() == ["First"]
    assert len(stored(page)) == 1
    page.click("#toast button")
    assert titles.all_inner_texts() == ["Renamed <b>", "First"]
    assert len(stored(page)) == 2


def test_an_answer_goes_on_while_another_conversation_is_open(page):
    send(page, "slow")
    page.wait_for_selector("text=word3")
    page.click("#new-chat")
    send(page, "Meanwhile")
    page.wait_for_selector("text=Answer 2")
    page.locator(".row-title", has_text="slow").click()
    page.wait_for_selector("text=word8")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    page.keyboard.press("Escape")


def exported(page, click):
    with page.expect_download() as download:
        page.click(click)
    return json.loads(download.value.path().read_text())


def upload(page, text):
    page.set_input_files("#import-file", {"name": "c.json", "mimeType": "application/json", "buffer": text.encode()})


def test_an_export_is_imported_as_it_was(page, opened):
    ask(page, "Export me")
    page.click(DONE)
    settled(page)
    file = exported(page, "#export")
    before = shown(page)
    page.click("#open-settings")
    page.click("#delete-all")
    assert stored(page) == []
    upload(page, json.dumps(file))
    page.wait_for_selector(ANSWERS)
    assert shown(page) == before
    assert stored(page) == file["conversations"]
    upload(page, json.dumps(file))  # a second time: nothing is doubled
    page.wait_for_timeout(100)
    assert stored(page) == file["conversations"]


GOOD = {"id": "a1", "role": "user", "content": "Hi"}


def conversation(*messages, **more):
    return json.dumps(
        {
            "format": "jaxinfer-conversations",
            "version": 1,
            "conversations": [{"id": "c1", "messages": messages, **more}],
        }
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not JSON"),
        ("[]", "does not hold conversations"),
        ('{"format": "jaxinfer-conversations", "version": 2, "conversations": []}', "version 2"),
        (
            '{"format": "jaxinfer-conversations", "version": 1, "conversations": [null]}',
            "Conversation 1 is not an object",
        ),
        (conversation(GOOD | {"role": "system"}), 'Conversation 1, message 1, has the role "system"'),
        (conversation(GOOD | {"content": ["Hi"]}), "has a content that is not text"),
        (conversation(GOOD, GOOD), "message 2, has no id of its own"),
        (conversation(GOOD | {"parent": "a2"}), "has a parent that does not come before it"),
        (conversation(GOOD | {"parent": "a1"}), "has a parent that does not come before it"),
        (conversation(GOOD, id="../x"), "has no valid id"),
        (conversation(GOOD, title=3), "has a title that is not text"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(page, text, sentence):
    upload(page, text)
    page.wait_for_selector("#notice:visible")
    assert "Nothing was imported." in page.inner_text("#notice")
    assert sentence in page.inner_text("#notice")
    assert stored(page) == []


def test_unknown_fields_of_a_file_are_dropped(page):
    upload(
        page,
        conversation(GOOD | {"__proto__": {"x": 1}, "onclick": "1", "stats": {"tokens": "many"}}, extra=1, leaf="no"),
    )
    page.wait_for_selector(".message.user")
    (one,) = stored(page)
    assert set(one) == {"id", "title", "created", "updated", "system", "leaf", "messages"}
    assert set(one["messages"][0]) == {"id", "parent", "role", "content", "created", "stats"}
    assert one["messages"][0]["stats"] == {}


def test_damaged_storage_is_skipped(page):
    ask(page, "Sound")
    page.evaluate("localStorage['jaxinfer.chat.bad'] = '{'; localStorage['jaxinfer.chat.worse'] = 'null'")
    page.evaluate('localStorage[\'jaxinfer.settings\'] = \'{"sampling": {"top_p": 7, "top_k": 5}}\'')
    page.reload()
    page.wait_for_selector(ANSWERS)
    assert page.locator(".row-title").all_inner_texts() == ["Sound"]
    assert page.evaluate("state.settings.sampling") == {"top_k": 5}


def test_a_full_storage_is_said_and_the_chat_goes_on(page):
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') } }"
    )
    ask(page, "Still there?")
    assert shown(page)[1].startswith("Answer 1")
    assert "storage is full" in page.inner_text("#notice")
    assert exported(page, "#notice .button")["conversations"][0]["title"] == "Still there?"


def test_a_browser_without_storage_still_chats(context, opened):
    no_storage = "{ get() { throw new DOMException('no', 'SecurityError') } }"
    for name in ("localStorage", "sessionStorage"):
        context.add_init_script(f"Object.defineProperty(window, '{name}', {no_storage})")
    page = opened()
    ask(page, "Private")
    assert shown(page)[1].startswith("Answer 1")
    assert "lost when the page is closed" in page.inner_text("#notice")


def test_sampling_settings_are_checked_and_sent(page, server):
    page.click("#open-settings")
    values = {"temperature": "0.7", "top_p": "0,9", "top_k": "40", "min_p": "0", "max_tokens": "100", "seed": "-7"}
    values |= {"presence_penalty": "-0.5", "frequency_penalty": "1", "repetition_penalty": "1.1"}
    for name, value in values.items():
        page.fill(f"#sampling-{name}", value)
    page.fill("#system", "Answer in French.")
    page.keyboard.press("Escape")
    ask(page, "Bonjour")
    request = server.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Answer in French."}
    sent = {name: request[name] for name in values}
    assert sent == {name: float(value.replace(",", ".")) for name, value in values.items()}
    assert "Seed -7" in page.get_attribute(".stats", "title")
    page.reload()
    page.wait_for_selector(ANSWERS)
    page.keyboard.press("Control+Shift+O")  # a new conversation starts with the same system prompt
    page.click("#open-settings")
    assert page.input_value("#system") == "Answer in French."
    page.click("#reset-sampling")
    page.keyboard.press("Escape")
    page.wait_for_selector("#model-picker:enabled")
    ask(page, "Encore")
    assert server.requests[1].keys() == {"model", "messages", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("name", "text"),
    [("temperature", "-1"), ("temperature", "warm"), ("top_p", "0"), ("top_k", "1.5"), ("min_p", "1.1"),
     ("max_tokens", "0"), ("seed", "9007199254740993"), ("presence_penalty", "2.1"),
     ("repetition_penalty", "Infinity")],
)  # fmt: skip
def test_a_setting_out_of_range_is_not_sent(page, name, text):
    page.click("#open-settings")
    page.fill(f"#sampling-{name}", text)
    assert page.inner_text(f"#sampling-{name}-wrong").endswith("Not used.")
    assert page.get_attribute(f"#sampling-{name}", "aria-invalid") == "true"
    assert page.evaluate("state.settings.sampling") == {}


def test_a_model_is_chosen_and_kept(page, server):
    page.select_option("#model-picker", "demo-large")
    page.reload()
    page.wait_for_selector("#model-picker:enabled")
    ask(page, "Hello")
    assert server.requests[0]["model"] == "demo-large"


def test_a_key_is_asked_for_sent_and_not_kept(opened, server, context):
    server.needs_key = True
    page = opened(is_ready=False)
    page.click("#notice >> text=Enter a key")
    assert page.evaluate("document.activeElement.id") == "api-key"
    page.fill("#api-key", KEY)
    page.keyboard.press("Tab")
    page.wait_for_selector("#model-picker:enabled")
    page.keyboard.press("Escape")
    ask(page, "Hello")
    assert shown(page)[1].startswith("Answer 1")
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    page.wait_for_selector("#model-picker:enabled")
    page.evaluate("store.setKey('wrong')")
    ask(page, "Still?")
    assert "does not accept this API key" in page.inner_text(".failure:visible")


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("busy", "The queue is full. Try again in 3 seconds."),
        ("too large", "Demo needs 20 GiB, and the budget is 10 GiB. Try again in 10 seconds."),
        ("broken", "The engine stopped."),
        ("lost", "The connection was lost in the middle of the answer."),
    ],
)
def test_a_failure_is_a_sentence_with_a_retry(page, server, question, sentence):
    ask(page, question)
    assert page.inner_text(".failure:visible span") == sentence
    assert page.inner_text("#status") == sentence
    num_before = len(server.requests)
    page.click("[data-action=retry]")
    page.wait_for_timeout(50)
    settled(page)
    assert len(server.requests) == num_before + 1
    assert server.requests[-1] == server.requests[-2]
    # An attempt without any text is replaced; one with a part of the answer stays as a version.
    assert page.locator(f"{ANSWERS} .branches").count() == (question in ("broken", "lost"))


def test_a_failure_that_would_come_again_has_no_retry(page, server):
    ask(page, "refused")
    assert page.inner_text(".failure:visible span") == "top_k=5 is not supported."
    assert page.inner_text(".failure:visible") == "top_k=5 is not supported."  # no button
    page.reload()
    page.wait_for_selector(".failure:visible")
    assert page.locator(".failure [data-action=retry]").count() == 0
    page.click(DONE)  # with other settings it may succeed
    settled(page)
    assert page.locator(".failure:visible").count() == 1
    page.click("#new-chat")
    ask(page, "busy")
    assert page.locator(".failure [data-action=retry]").count() == 1


def test_it_says_which_models_are_loaded(opened, server):
    state = {"status": {"value": "unloaded", "error": None}}
    server.statuses = {"demo": state, "demo-large": {"status": {"value": "ready", "error": None}}}
    page = opened()
    options = "#model-picker option"
    assert page.locator(options).all_inner_texts() == ["demo (not loaded)", "demo-large (loaded)"]
    assert page.input_value("#model-picker") == "demo-large"  # nothing has to be loaded for it
    page.wait_for_selector("text=demo-large is ready.")
    page.select_option("#model-picker", "demo")
    page.wait_for_selector("text=demo is loaded by the first message.")
    server.load_seconds = 1.0
    send(page, "slow")
    page.wait_for_selector("text=Loading demo…")
    page.wait_for_selector("text=word1")
    assert page.locator("text=Loading demo…").is_hidden()
    state["status"]["value"] = "ready"
    page.click("#send")
    page.wait_for_selector(f"{options} >> text=demo (loaded)", state="attached")  # it looked again
    state["status"] = {"value": "failed", "error": "demo/config.json is not JSON"}
    page.click("#new-chat")
    page.hover("#model-picker")
    page.wait_for_selector("text=demo could not be loaded: demo/config.json is not JSON")


def test_the_readers_own_markdown_is_shown_and_sent_as_it_was_written(page, server):
    text = "**Compare** `a*b*c` in __init__.py, 2*3*x:\n\n- one\n- two\n\n```python\n# comment\n    x = 1\n```"
    send(page, text)
    settled(page)
    bubble = page.locator(".message.user .text")
    assert bubble.locator("strong").all_inner_texts() == ["Compare"]
    assert bubble.locator("p").first.inner_text() == "Compare a*b*c in __init__.py, 2*3*x:"
    assert bubble.locator("li").all_inner_texts() == ["one", "two"]
    assert bubble.locator("pre").inner_text() == "# comment\n    x = 1"
    assert server.requests[0]["messages"][0]["content"] == text
    assert page.inner_text(".row-title") == "Compare a*b*c in __init__.py, 2*3*x:"
    assert page.evaluate("state.settings.isPlain = true, showConversation(), null") is None
    assert bubble.text_content() == text
    page.keyboard.press("ArrowUp")
    assert page.input_value(".edit textarea") == text


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("```python\n\ndef f(x):\n```\nwhy?", "def f(x):"),
        ("# A *title*", "A title"),
        ("\n> - [ ] **first**\nsecond", "first"),
        ("12. see [here](https://a.b)", "see here"),
        ("| a | b |\n|---|---|", "a | b |"),
        ("😀", "😀"),
        ("***", "***"),
        ("x" * 56 + "😀😀😀😀😀", "x" * 56 + "😀…"),
        ("<b>bold</b> a < b && c", "<b>bold</b> a < b && c"),
    ],
)
def test_titles_have_no_marks_of_markdown(page, text, title):
    assert page.evaluate("titleFrom", text) == title


def test_a_lost_connection_is_taken_up_where_it_broke(page, server):
    """The server continues after the last event that arrived."""
    server.answers["resume"] = "One two three four five six seven."
    ask(page, "resume")
    assert shown(page)[1] == "One two three four five six seven."
    assert server.positions == [None, "p-2"]
    assert server.requests[0] == server.requests[1]
    assert "Seed 18446744073709551615" in page.get_attribute(".stats", "title")
    assert "tokens/s" not in page.inner_text(".stats")  # the pause is no time of the server
    assert "position" not in stored(page)[0]["messages"][1]


def test_a_server_that_starts_again_continues_the_answer(page, server):
    send(page, "slow")
    page.wait_for_selector("text=word5 ")
    server.is_down = True  # running streams break, new ones are refused
    page.locator(".reconnecting:visible").wait_for()
    server.is_down = False
    page.wait_for_selector("text=word40 ")
    page.keyboard.press("Escape")
    settled(page)
    words = shown(page)[1].split()
    assert words == [f"word{number}" for number in range(len(words))]


@pytest.mark.parametrize("how", ["stopped", "reloaded"])
def test_an_answer_that_was_cut_off_is_continued(page, server, how):
    send(page, "slow")
    page.wait_for_selector("text=word5 ")
    if how == "stopped":
        page.keyboard.press("Escape")
        settled(page)
    else:
        page.reload()
        page.wait_for_selector(".failure:visible")
    num_words = len(shown(page)[1].split())
    page.click("[data-action=resume]")
    page.wait_for_selector(f"text=word{num_words + 5} ")
    page.keyboard.press("Escape")
    settled(page)
    words = shown(page)[1].split()
    assert words == [f"word{number}" for number in range(len(words))]
    assert server.positions == [None, f"p-{num_words}"]


def test_a_server_that_is_away_and_comes_back(page, server):
    server.is_down = True
    ask(page, "Anyone?")
    assert page.inner_text(".failure:visible span") == "The server cannot be reached. Is it running?"
    page.reload()
    page.wait_for_selector("#notice:visible")
    server.is_down = False
    page.click("#notice >> text=Try again")
    page.wait_for_selector("#model-picker:enabled")
    page.click("[data-action=retry]")
    page.wait_for_selector("text=Answer 1")
    settled(page)
    assert page.locator(".failure:visible").count() == 0
    ask(page, "Good")
    assert [one["role"] for one in server.requests[1]["messages"]] == ["user", "assistant", "user"]


def test_a_question_waits_until_the_model_is_loaded(opened, server):
    server.is_loading = True
    page = opened()
    page.wait_for_selector("text=The model is being loaded.")
    send(page, "Early")
    page.wait_for_selector("text=The server is not ready. Waiting…")
    server.is_loading = False
    page.wait_for_selector("text=Answer 1")
    settled(page)
    page.click("#new-chat")
    page.wait_for_selector("text=demo is ready.")


def test_answers_are_shown_as_plain_text(page):
    ask(page, "markdown")
    assert page.locator(f"{ANSWERS} h2").count() == 1
    page.click("#open-settings")
    page.check("#plain")
    page.keyboard.press("Escape")
    assert page.locator(f"{ANSWERS} h2").count() == 0
    assert "\n\n1. Look up" in page.inner_text(f"{ANSWERS} pre")
    page.reload()
    page.wait_for_selector(f"{ANSWERS} pre")
    assert page.locator(f"{ANSWERS} h2").count() == 0


def test_questions_after_a_failed_answer_are_one_message(page, server):
    ask(page, "busy now?")
    ask(page, "and now?")
    assert server.requests[1]["messages"] == [{"role": "user", "content": "busy now?\n\nand now?"}]


def test_reasoning_is_folded_and_not_sent_back(page, server):
    ask(page, "think")
    details = page.locator("details.reasoning")
    assert details.get_attribute("open") is None
    assert details.locator("summary").inner_text() == "Reasoning"
    details.locator("summary").click()
    assert "each step is weighed" in page.inner_text(".thoughts")
    ask(page, "next")
    assert "weighed" not in json.dumps(server.requests[1])


def test_an_end_at_the_limit_is_said(page):
    ask(page, "long")
    assert page.inner_text(".stats").startswith("Ended at the length limit")


def test_two_tabs_keep_the_messages_of_both(page, opened):
    ask(page, "From the first tab")
    other = opened(page.evaluate("location.hash"))
    ask(other, "From the second tab")
    until(page, "state.current.messages.length === 4")
    ask(page, "Back in the first")
    (one,) = stored(page)
    assert [message["content"] for message in one["messages"] if message["role"] == "user"] == [
        "From the first tab", "From the second tab", "Back in the first",
    ]  # fmt: skip


def test_a_code_block_is_copied(page, context):
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "markdown")
    page.click(".code-head button")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def gather(")
    page.click(f"{ANSWERS} [data-action=copy]")
    assert page.evaluate("navigator.clipboard.readText()").startswith("## Paged attention")


def test_a_phone_shows_everything_in_its_width(page):
    page.set_viewport_size(PHONE)
    ask(page, "markdown " + "w" * 200)
    overflow = (
        "document.documentElement.scrollWidth > innerWidth || $('scroller').scrollWidth > $('scroller').clientWidth"
    )
    assert not page.evaluate(overflow)
    assert not page.is_visible("#new-chat")
    page.click("#open-sidebar")
    page.wait_for_selector("#new-chat", state="visible")
    page.wait_for_timeout(250)
    page.click("#new-chat")
    page.wait_for_selector("#new-chat", state="hidden")
    page.click("#open-settings")
    assert page.evaluate("$('settings').scrollWidth <= innerWidth")
    boxes = page.eval_on_selector_all(
        "button:not([tabindex='-1'])",
        "all => all.map(one => [one.ariaLabel || one.innerText, one.offsetWidth, one.offsetHeight])",
    )
    small = [name for name, width, height in boxes if width and min(width, height) < 24]
    assert small == []


def test_a_reader_who_scrolls_up_is_not_moved(page):
    page.set_viewport_size({"width": 390, "height": 500})
    ask(page, "markdown")
    send(page, "slow")
    page.wait_for_selector("text=word3")
    page.evaluate("$('scroller').scrollTop = 0")
    page.wait_for_timeout(400)
    assert page.evaluate("$('scroller').scrollTop") == 0
    page.click("#to-latest")
    page.wait_for_timeout(400)
    assert page.evaluate("$('scroller').scrollHeight - $('scroller').scrollTop - $('scroller').clientHeight") < 40
    page.keyboard.press("Escape")


CONTRAST = """names => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const probe = document.body.appendChild(document.createElement("span"));
  const luminance = name => {
    probe.style.color = `var(--${name})`;
    context.fillStyle = getComputedStyle(probe).color;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)].map(v => v / 255);
    const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = names.map(luminance).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""
# WCAG 2.2 AA: 4.5 for text, 3 for the edges of fields.
PAIRS = [(*pair, 4.5) for back in ("bg", "side", "soft", "code") for pair in (("text", back), ("muted", back))]
PAIRS += [("accent", "bg", 4.5), ("on-accent", "accent", 4.5), ("danger", "danger-soft", 4.5), ("edge", "bg", 3)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_read(page, scheme):
    page.emulate_media(color_scheme=scheme)
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(28, 28, 27)'"
    assert page.evaluate(dark) == (scheme == "dark")
    low = {(a, b): page.evaluate(CONTRAST, [a, b]) for a, b, least in PAIRS if page.evaluate(CONTRAST, [a, b]) < least}
    assert low == {}
    page.click("#theme")  # from the system's to light
    assert not page.evaluate(dark)
    page.click("#theme")
    assert page.evaluate(dark)
    page.reload()
    assert page.evaluate(dark)


def test_everything_has_a_name(page):
    ask(page, "markdown")
    page.click("#open-settings")
    has_name = "one.ariaLabel || one.innerText?.trim() || one.labels?.length"
    nameless = page.eval_on_selector_all(
        "button, input, select, textarea, [tabindex='0']",
        f"all => all.filter(one => one.checkVisibility() && !({has_name})).map(one => one.outerHTML)",
    )
    assert [one for one in nameless if "<pre" not in one] == []
    assert page.eval_on_selector_all("[id]", "all => all.length - new Set(all.map(one => one.id)).size") == 0
