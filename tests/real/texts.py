"""60 texts for tokenizers: plain English, chats, scripts, emoji, code, spaces, odd characters; and two for losses."""

from pathlib import Path

# A text that is longer than Gemma's windows of 512 tokens: the last of its first LONG tokens are scored.
LICENSE = Path(__file__).parents[2] / "LICENSE"
LONG, LONG_START = 640, 576

PLAIN = (
    "The capital of France is Paris.",
    "Hello, world!",
    "It's what they've said: we'll see, I'm sure, you'd agree; he's right.",
    "The quick brown fox jumps over the lazy dog, 12 times in 34 days.",
    "WHY ARE YOU SHOUTING? I am NOT, McDonald's iPhone eBay.",
    "a",
    " a",
    "a ",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
    "e.g. Mr. Smith (b. 1970), Ph.D., earned $1,234.56 - i.e. 12.5% - in Q3/2024...",
    "“Curly quotes” and ‘single ones’ — dashes – and an ellipsis…",
    "https://www.example.com/path/to/page.html?query=value&other=1#anchor",
)
CHATS = (
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n",
    "<start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n",
    "text<|endoftext|>more<|im_end|> <|im_start|>",
    "<bos>text<eos><pad><unused3>",
    "<|im_start |> <|im_ end|> <| im_start|> <start_of_turn",
    "<table><tr><td>1</td></tr></table>",
)
SCRIPTS = (
    "Größe, Straße, Übung: Fünf Mädchen aßen süße Äpfel.",
    "L'été dernier, j'ai mangé une crêpe à Nîmes où il pleuvait.",
    "¿Dónde está el niño? ¡Mañana por la mañana!",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň.",
    "Съешь же ещё этих мягких французских булок.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το σκυλί.",
    "שלום עולם, מה שלומך היום?",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก วันนี้เป็นอย่างไรบ้าง",
    "你好，世界！今天天气怎么样？",
    "こんにちは世界。カタカナとひらがな、漢字。",
    "안녕하세요 세계! 오늘 날씨가 어때요?",
    "Tiếng Việt có nhiều dấu thanh điệu.",
    "አማርኛ ქართული Հայերեն ᓄᓇᕗᑦ",
)
SYMBOLS = (
    "😀😃😄 I ❤️ Python 🐍!",
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇫🇷🇩🇪",
    "∀x ∈ ℝ: ∑ᵢ xᵢ² ≥ 0 ⇒ √(x²) = |x|",
    "①②③ ½ ¾ ™ © ® € £ ¥ ° ± µ",
    "e\u0301 is not \u00e9, and \ufb01 is not fi",
    "\u200bzero\u200d\u200cwidth\ufeff",
    "0 1 12 123 1234 12345 1234567890 3.14159265358979 1e-10 0xFF",
    "\U0001d54f\U0001d556 \U00010348 \U0002070e",
    "▁▁ Ġ Ċ <0x0A> ▁the",
    "!!!??? ... ---- ==== #### **** ____ ////",
)
CODE = (
    "def f(x):\n    return x + 1\n\n\nclass A(B):\n    def __init__(self, *args, **kwargs):\n        pass\n",
    "for (int i = 0; i < n; ++i) {\n\tif (a[i] != b[i]) {\n\t\treturn false;\n\t}\n}\n",
    '{"name": "x", "values": [1, 2.5, null, true], "nested": {"a": "\\n\\u00e9"}}',
    "SELECT * FROM users WHERE id = 42 AND name LIKE '%o''brien%';",
    '<div class="a"><p>Text &amp; more</p><!-- comment --></div>',
    "#!/bin/sh\nset -eu\nfind . -name '*.py' | xargs grep -n \"TODO\" > /dev/null 2>&1 || true\n",
    "\\begin{equation} \\frac{a}{b} = \\sqrt{c^2} \\end{equation}",
)
SPACES = (
    "a" + " " * 33 + "b",
    " " * 16,
    "x" + " " * 2 + "y" + " " * 3 + "z" + " " * 31 + "w" + " " * 64 + "v",
    "line\n\n\n\nline\n \n  \n\t\n\r\nend",
    "\n" * 35 + "a",
    "tabs\t\t\tand\t spaces \t mixed" + "\t" * 20,
    " leading and trailing ",
    "no-break\u00a0space, em\u2003space, ideographic\u3000space",
    "a\n" + " " * 8 + "b\n" + " " * 100 + "c\n",
)
TEXTS = (*PLAIN, *CHATS, *SCRIPTS, *SYMBOLS, *CODE, *SPACES)

# Written for these tests.
HELD_OUT = """The lighthouse keeper at Farrow Point had two rules for visitors. The first was that nobody touched \
the lamp. The second was that anyone who stayed past supper washed the dishes. In thirty years only one guest broke \
the first rule, a boy of nine who wanted to know whether the glass was warm. It was. He was forgiven, given a towel, \
and shown how to dry a plate without leaving marks. When he came back as an old man, the lamp had been replaced by \
an electric one that turned by itself, and the kitchen was a museum with a rope across the door. He asked the guide \
if he might stand at the sink for a minute. She looked at the rope, then at him, and went to find the key."""
