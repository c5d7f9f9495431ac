"""The chat page's pure parts, called in a real browser: Markdown, what it refuses, and the reader of events."""

import json
import random
import re

import pytest

from tests.server.page.test_chat_in_browser import ask, upload

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RENDER = "text => { const view = new MarkdownView(text); return view.node.innerHTML; }"


def code(text, language="text"):
    """The HTML of a code block, without the copy button's icon."""
    return f"<code-block {language}>{text}</code-block>"


@pytest.fixture(scope="module")
def tab(browser):
    """One page for all calls of pure functions."""
    from tests.server.page import fake_server

    with fake_server.running() as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        yield page
        context.close()


# The page's own element for a code block is long: it is read as <code-block language>.
SHORT = """text => {
  const view = new MarkdownView(text);
  for (const block of view.node.querySelectorAll(".code")) {
    const language = block.querySelector(".code-head span").textContent;
    block.replaceWith(`<code-block ${language}>${block.querySelector("pre code").textContent}</code-block>`);
  }
  for (const table of view.node.querySelectorAll(".table")) table.replaceWith(table.firstChild);
  for (const link of view.node.querySelectorAll("a")) {
    if (link.rel === "noopener noreferrer nofollow" && link.target === "_blank" && link.title === link.href)
      for (const name of ["rel", "target", "title"]) link.removeAttribute(name);
  }
  const html = view.node.innerHTML;
  return html.replaceAll(' class=""', "").replaceAll("&lt;/code-block&gt;", "</code-block>")
    .replace(/&lt;(code-block [^&]*)&gt;/g, "<$1>");
}"""


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("two\nlines\n\nnext", "<p>two<br>lines</p><p>next</p>"),
        ("def f():\n    pass", "<p>def f():<br>    pass</p>"),
        ("# One\n###### Six ##\n####### Seven", "<h1>One</h1><h6>Six</h6><p>####### Seven</p>"),
        ("# C#", "<h1>C#</h1>"),
        ("#nothing", "<p>#nothing</p>"),
        ("a\n***\nb\n---", "<p>a</p><hr><p>b</p><hr>"),
        ("**bold** *it* __b__ _i_ ***both***",
         "<p><strong>bold</strong> <em>it</em> <strong>b</strong> <em>i</em> <em><strong>both</strong></em></p>"),
        ("~~gone~~ ~5", "<p><del>gone</del> ~5</p>"),
        ("snake_case_name 2*3*4", "<p>snake_case_name 2<em>3</em>4</p>"),
        ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
        ("**open", "<p>**open</p>"),
        ("*a**b*", "<p><em>a**b</em></p>"),
        (r"\*no\* \\ \a", r"<p>*no* \ \a</p>"),
        ("`a*b*` ``c`d`` `e", "<p><code>a*b*</code> <code>c`d</code> `e</p>"),
        ("`<b>`", "<p><code>&lt;b&gt;</code></p>"),
        ("```python\nx = 1\n\ty\n```\nafter", code("x = 1\n\ty", "python") + "<p>after</p>"),
        ("~~~\n```\n~~~", code("```")),
        ("````\n```\n````", code("```")),
        ("```js\nopen", code("open", "js")),
        ("```\n", code("")),
        ("- a\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("1. a\n   - b\n   - c\n2. d",
         "<ol><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li><li><p>d</p></li></ol>"),
        ("1. a\n  - b", "<ol><li><p>a</p><ul><li><p>b</p></li></ul></li></ol>"),
        ("* a\n\n  second\n\n* b\n\nend", "<ul><li><p>a</p><p>second</p></li><li><p>b</p></li></ul><p>end</p>"),
        ("1. a\n   ```\n   x\n   ```\n2. b", "<ol><li><p>a</p>" + code("x") + "</li><li><p>b</p></li></ol>"),
        ("- a\nlazy", "<ul><li><p>a<br>lazy</p></li></ul>"),
        ("- [ ] todo\n- [x] done", "<ul><li><p>☐ todo</p></li><li><p>☑ done</p></li></ul>"),
        ("- a\n1. b", "<ul><li><p>a</p></li></ul><ol><li><p>b</p></li></ol>"),
        ("In 2019. It\n1986. Was", "<p>In 2019. It<br>1986. Was</p>"),
        ("> q\n> > r\n\nend", "<blockquote><p>q</p><blockquote><p>r</p></blockquote></blockquote><p>end</p>"),
        ("|a|b|\n|-|:-:|\n|1|2|\nend",
         '<table><thead><tr><th>a</th><th class="to-center">b</th></tr></thead>'
         '<tbody><tr><td>1</td><td class="to-center">2</td></tr></tbody></table><p>end</p>'),
        ("a | b\n--- | --:\n`x\\|y` | **2** | 3\n1 |",
         '<table><thead><tr><th>a</th><th class="to-right">b</th></tr></thead>'
         '<tbody><tr><td><code>x|y</code></td><td class="to-right"><strong>2</strong></td></tr>'
         '<tr><td>1</td><td class="to-right"></td></tr></tbody></table>'),
        ("a | b", "<p>a | b</p>"),
        ("[t](https://a.b/c)", '<p><a href="https://a.b/c">t</a></p>'),
        ("[**t**](<https://a.b/c_(d)> 'x')", '<p><a href="https://a.b/c_(d)"><strong>t</strong></a></p>'),
        ("[t](https://a.b/c_(d))!", '<p><a href="https://a.b/c_(d)">t</a>!</p>'),
        ("see https://a.b/c?d=1.", '<p>see <a href="https://a.b/c?d=1">https://a.b/c?d=1</a>.</p>'),
        ("(https://a.b/c_(d))", '<p>(<a href="https://a.b/c_(d)">https://a.b/c_(d)</a>)</p>'),
        ("<http://a.b/>", '<p><a href="http://a.b/">http://a.b/</a></p>'),
        ("![cat](https://a.b/cat.png)", '<p><a href="https://a.b/cat.png">cat</a></p>'),
        ("[ref][1] [x]", "<p>[ref][1] [x]</p>"),
        ("[a [b](https://c.d/)](https://e.f/)", '<p>[a <a href="https://c.d/">b</a>](<a href="https://e.f/">https://e.f/</a>)</p>'),
        ("a<br>b &amp; <i>", "<p>a<br>b &amp;amp; &lt;i&gt;</p>"),
        ("\r\n# a\r\nb\rc", "<h1>a</h1><p>b<br>c</p>"),
    ],
)  # fmt: skip
def test_markdown(tab, text, html):
    assert tab.evaluate(SHORT, text) == html


def test_emphasis_and_code_agree_with_commonmark(tab):
    """Random text of marks, letters and spaces, next to another implementation."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    draw = random.Random(0)
    texts = {"a" + "".join(draw.choices("***__`ab .\\", k=draw.randint(1, 14))) + "b" for _ in range(4000)}
    texts = [text for text in sorted(texts) if not re.search(r"\*{5}|_{5}", text)]  # longer runs are text here
    expected = [markdown.renderInline(text) for text in texts]
    found = tab.evaluate("all => all.map(text => el('p', {}, inline(text)).innerHTML)", texts)
    assert [pair for pair in zip(texts, found, expected, strict=True) if pair[1] != pair[2]] == []
    no_rule_of_three = """all => {
      const own = pairs;
      pairs = (opener, closer) => opener.run === closer.run;
      try { return all.map(text => el("p", {}, inline(text)).innerHTML) } finally { pairs = own }
    }"""
    assert tab.evaluate(no_rule_of_three, texts) != expected


def test_markdown_that_grows_is_what_it_would_be_at_once(tab):
    """Whatever prefixes were shown before; blocks that are complete keep their nodes."""
    from tests.server.page.fake_server import MARKDOWN

    grown, kept = tab.evaluate(
        """text => {
          const view = new MarkdownView();
          let heading, kept = true;
          for (let end = 0; end <= text.length; end += 3) {
            view.update(text.slice(0, end));
            if (end > 60) { heading ??= view.node.firstChild; kept &&= heading === view.node.firstChild; }
          }
          view.update(text);
          return [view.node.innerHTML, kept];
        }""",
        MARKDOWN,
    )
    assert grown == tab.evaluate(RENDER, MARKDOWN)
    assert kept


# Nothing of these may run, load, or become an element or attribute that can.
ATTACKS = [
    "<script>hacked=1</script>",
    "<img src=x onerror=hacked=1>",
    "<svg onload=hacked=1>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'>",
    "[x](javascript:hacked=1)",
    "[x](JaVaScRiPt:hacked=1)",
    "[x](java\tscript:hacked=1)",
    "[x](&#106;avascript:hacked=1)",
    "[x](\x01javascript:hacked=1)",
    "[x](data:text/html,<script>hacked=1</script>)",
    "[x](vbscript:hacked)",
    "[x](//evil.example/)",
    "[x](https:javascript:hacked=1)",
    '[x](https://a.b/"onmouseover="hacked=1)',
    '[x](https://a.b "t" onmouseover="hacked=1")',
    "<javascript:hacked=1>",
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:hacked=1)",
    "![](https://evil.example/pixel.png)",
    "```<script>hacked=1</script>\n</code></pre><script>hacked=1</script>\n```",
    "```\" onclick=hacked=1 x=\"\n```",
    "`</code><img src=x onerror=hacked=1>`",
    "|<img src=x onerror=hacked=1>|\n|-|\n|<b onclick=hacked=1>|",
    "> - <details open ontoggle=hacked=1>",
    "# <style>*{display:none}</style>",
    "</textarea></title><script>hacked=1</script>",
    "<a href=https://a.b onclick=hacked=1>x</a>",
    "{{constructor.constructor('hacked=1')()}} ${hacked=1}",
    "https://a.b/'onclick='hacked=1",
    "<form action=https://evil.example><button>x",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
]  # fmt: skip
TAGS = (
    "a blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr li ol p path pre rect span strong svg table tbody td "
    "th thead tr ul use"
)
ATTRIBUTES = "aria-hidden aria-label class dir href rel role start tabindex target title type"
DANGERS = f"""root => {{
  const tags = "{TAGS}".split(" "), names = "{ATTRIBUTES}".split(" "), found = [];
  for (const one of root.querySelectorAll("*")) {{
    if (!tags.includes(one.localName)) found.push(one.localName);
    for (const {{ name, value }} of one.attributes) {{
      if (!names.includes(name)) found.push(`${{one.localName}} ${{name}}`);
      if (name === "href" && !(one.localName === "use" ? /^#icon-/ : /^https?:\\/\\//).test(value)) found.push(value);
    }}
  }}
  return found;
}}"""
IN_MARKDOWN = f"text => ({DANGERS})(new MarkdownView(text).node)"


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_stays_text(tab, attack):
    assert tab.evaluate(IN_MARKDOWN, attack) == []
    assert tab.evaluate("typeof hacked") == "undefined"
    # Nothing of the text is lost where it is no markup: who reads it sees the attack.
    if attack.startswith("<") and "javascript" not in attack:
        assert tab.evaluate("text => new MarkdownView(text).node.textContent", attack) == attack


def test_the_check_for_attacks_finds_one(tab):
    unsafe = """text => {
      const own = link;
      link = (href, text) => el("a", { href }, text);
      try { return (%s)(text) } finally { link = own }
    }"""
    assert tab.evaluate(unsafe % IN_MARKDOWN, "[x](javascript:hacked=1)") == ["javascript:hacked=1"]
    made = (
        "() => { const root = document.createElement('div'); root.append(el('img', { alt: '' })); return (%s)(root) }"
    )
    assert tab.evaluate(made % DANGERS) == ["img", "img alt"]


def test_the_policy_refuses_html_made_from_text(tab):
    refused = tab.evaluate(
        "() => { try { document.createElement('p').innerHTML = '<b>'; return '' } catch (error) { return error.name } }"
    )
    assert refused == "TypeError"


def test_attacks_stay_text_everywhere_on_the_page(page, server):
    """In answers, reasoning, questions, titles, names of models, errors, files and addresses."""
    attack = "<img src=x onerror=hacked=1>"
    everything = "\n\n".join(ATTACKS)
    server.answers[attack] = everything
    ask(page, attack)
    ask(page, f"refused {attack}")
    page.evaluate(
        "attack => { const view = state.views.get(state.current.leaf); view.message.error = attack; view.update(); }",
        attack,
    )
    message = {
        "id": "a1",
        "role": "assistant",
        "content": everything,
        "reasoning": attack,
        "model": attack,
        "error": attack,
    }
    upload(page, json.dumps({"format": "jaxinfer-conversations", "version": 1, "conversations": [
        {"id": "c1", "title": attack, "system": attack, "messages": [message]},
    ]}))  # fmt: skip
    page.locator(".who", has_text=attack).wait_for()
    upload(page, json.dumps({"format": attack}))
    page.evaluate("attack => { location.hash = attack }", attack)
    page.evaluate("attack => { toast(attack, attack, () => {}); notice(attack) }", attack)
    page.wait_for_timeout(200)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img, script[src], iframe").count() == 0
    assert attack in page.inner_text("#conversations")


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, "[a](" * 15_000, "*a " * 20_000, "**a" * 20_000, "_a*" * 20_000, "`" * 50_000, "`a``b" * 10_000,
     "> " * 20_000, "- " * 20_000, "\n".join("  " * n + "- a" for n in range(300)), "|" * 50_000 + "\n" + "|-" * 20_000,
     "![" * 25_000, "<http://" * 8_000, "https://" * 8_000, "https://a" + ")" * 50_000, "#" * 50_000, "```\n" * 3_000,
     "\n" * 50_000, "- a\n\n\n" * 10_000, "a|b\n" * 15_000, "\\" * 50_000, "[a](https://b.c \"" * 3_000,
     "*" * 50_000, "1. " * 17_000, "".join("*_"[n % 2] + "a" for n in range(20_000))],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_no_text_takes_long_or_nests_deep(tab, text):
    """50 KB of any one construct. Plain text of that length takes a few milliseconds."""
    milliseconds, depth = tab.evaluate(
        """text => {
          const start = performance.now(), view = new MarkdownView(text), time = performance.now() - start;
          let depth = 0;
          for (let level = [view.node]; level.length; depth++) level = level.flatMap(one => [...one.children]);
          return [time, depth];
        }""",
        text,
    )
    assert milliseconds < 1500
    assert depth < 150


EVENTS = ["a", '{"x": "ü✓😀"}', "two\nlines", "", "[DONE]"]
READ = """([bytes, ...all]) => all.map(cuts => {
  const reader = new EventReader(), found = [];
  let start = 0;
  for (const end of [...cuts, bytes.length]) {
    found.push(...reader.feed(new Uint8Array(bytes.slice(start, end))));
    start = end;
  }
  return found.map(event => [event.id, event.data]);
})"""


def stream_of(events, ends):
    """Events as bytes, with comments and other fields between, and lines that end in each of `ends` by turns."""
    lines = [": comment", ""]
    for number, event in enumerate(events):
        lines += [
            f"id: {number}",
            "event: message",
            *(f"data: {line}" for line in event.split("\n")),
            "retry: 3",
            ":",
            "",
            "",
        ]
    return "".join(line + ends[number % len(ends)] for number, line in enumerate(lines)).encode()


@pytest.mark.parametrize("ends", [["\n"], ["\r\n"], ["\r"], ["\n", "\r\n"]], ids=repr)
def test_events_are_read_wherever_they_are_cut(tab, ends):
    stream = list(stream_of(EVENTS, ends))
    places, draw = range(len(stream)), random.Random(0)
    cuts = [*([cut] for cut in places), list(places), *(sorted(draw.sample(places, 12)) for _ in range(100))]
    for cut, found in zip(cuts, tab.evaluate(READ, [stream, *cuts]), strict=True):
        assert found == [[str(number), event] for number, event in enumerate(EVENTS)], cut


def test_an_event_without_its_blank_line_is_not_complete(tab):
    assert tab.evaluate(READ, [list(b"data: a\n\ndata: b\n"), []]) == [[["", "a"]]]
    assert tab.evaluate(READ, [list(b"\xef\xbb\xbfdata:a\ndata\n\n"), []]) == [[["", "a\n"]]]


def test_ages_are_grouped(tab):
    group = "days => ageGroup(new Date(2026, 10, 23 - days, 23, 59), new Date(2026, 10, 23, 0, 1))"
    assert [tab.evaluate(group, days) for days in (0, 1, 7, 8, 30, 31)] == [
        "Today", "Yesterday", "Last 7 days", "Last 30 days", "Last 30 days", "Older",
    ]  # fmt: skip
