"""Patterns as users write them, for the tests of automata and tables."""

STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
INTEGER = r"-?(0|[1-9][0-9]{0,9})"
OBJECT = (
    r'\{"name":'
    + STRING
    + r',"age":'
    + INTEGER
    + r',"email":'
    + STRING
    + r',"active":(true|false),"score":'
    + INTEGER
    + r"(\.[0-9]+)?\}"
)
ITEM = r'\{"id":' + INTEGER + r',"label":' + STRING + r"\}"

# The four of the table in the reference, by name.
SIZED = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "5-field object": OBJECT,
    "array of objects": r"\[(" + ITEM + r"(," + ITEM + r")*)?\]",
    "string of 64": STRING.replace("*", "{0,64}"),
}

COMMON = (
    *SIZED.values(),
    r"(0[1-9]|[12][0-9]|3[01])/(0[1-9]|1[0-2])/[0-9]{4}",
    r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2})",
    r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
    r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    r"[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    r"#([0-9a-fA-F]{3}){1,2}",
    r"https?://[a-z0-9.-]+(:[0-9]{1,5})?(/[^\s?#]*)?(\?[^\s#]*)?",
    r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    r"-?(0|[1-9]\d*)",
    r"\$[1-9][0-9]{0,2}(,[0-9]{3})*(\.[0-9]{2})?",
    r"\+?[0-9]{1,3}[ -]?\(?[0-9]{3}\)?[ -]?[0-9]{3}[ -]?[0-9]{4}",
    "yes|no|maybe",
    "red|green|blue|dark red|dark green|",
    "positive|negative|neutral|très positif|非常好",
    "(true|false|null)",
    r"(?i)(yes|no)",
    r"[A-Z][a-z]+( [A-Z][a-z]+){0,3}",
    r"\w+( \w+){0,5}",
    r"\w+",
    r".{1,40}",
    r".*",
    r"(?s).*\n\n",
    r"[^\n]{0,20}\n?",
    r"[а-яё]+",
    r"[一-龥]{1,8}",
    r"\p{Lu}\p{Ll}*",
    r"[😀-🙏]{1,3}",
    r"(a|b)*abb",
    r"(a|b)*a(a|b){5}",
    r"((ab){2}c){1,3}",
    r"([0-9a-f]{2}:){5}[0-9a-f]{2}",
    r"(\(([^()]|\([^()]*\))*\))?",
    r"(the|a|an) (quick|lazy) (fox|dog)( (jumps|runs)( (over|under) (the|a) (fox|dog))?)?\.",
    r"Answer: [A-E]\nBecause: [^\n]{1,60}\n",
    r"<b>[^<]*</b>(<i>[^<]*</i>)*",
    r"```(python|json)?\n([^`]|`[^`]|``[^`])*```",
    r"\s*\{\s*\}\s*",
    r"^[\w.-]{3,16}$",
    r"x{3,}y{0,2}z",
    r"",
)
