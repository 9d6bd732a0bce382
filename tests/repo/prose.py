"""The measure of prose: words per sentence of each file, in docstrings, comments, texts of errors, pages and notebooks.

    python -m tests.repo.prose [PATHS ...] [--worst 20]

prints the mean per folder (per file if you name PATHS), the share of sentences with a relative clause, and the worst sentences.
`test_prose.py` fails for a file with a mean above MOST_WORDS. The other figures only guide. Never chop a sentence to please
them.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "notebooks/*.ipynb")
GENERATED = re.compile(r"writes this page|[Gg]enerated (?:by|from)")  # in the first ten lines of a page

MOST_WORDS = 17
RELATIVE = re.compile(r"\b(?:which|who|whom|whose|where)\b", re.IGNORECASE)
"""What counts as a relative clause. "that" is left out: it is a conjunction as often. Aims: 20 % with one, 3 % with two."""

ERRORS = {
    "a docstring opens with What or Who": re.compile(r"\A\s*(?:What|Who)\b"),
    # "there is no room" and "is no longer" are right; "is no rank" is "is not a rank".
    "X is no Y": re.compile(
        r"(?<!there )\b(?:is|are|was|were|be) no\b(?! (?:longer|more|fewer|less|larger|smaller|later)\b)", re.IGNORECASE
    ),
    "processes are which": re.compile(r"\bwhom?\b", re.IGNORECASE),
}
"""What is wrong -> the words. The first is for docstrings only."""

# ---------------------------------------------------------------- texts of a file

STRINGS_AND_COMMENTS = re.compile(
    r'"""(?:\\.|[^\\])*?"""' + r"|'''(?:\\.|[^\\])*?'''" + r'|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'" + r"|#[^\n]*",
    re.DOTALL,
)
DIRECTIVE = re.compile(r"#\s*(?:noqa|type|pyright|fmt|ruff|pragma)\b:?|#!|#\s*-{3,}")
RAISING = re.compile(r"(?i)error|warn|mismatch|fail")


@dataclass(frozen=True)
class Text:
    line: int
    """Of its beginning; in a notebook, the number of the cell."""
    text: str
    docstring: bool = False


def joined(node: ast.AST) -> str:
    """The text of a string expression. The expressions in it are "{}"."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(joined, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return joined(left) + joined(right)
    return "{}"


def python_texts(source: str) -> Iterator[Text]:
    """Docstrings, also of attributes; texts of errors and other strings that end with a full stop; comments."""

    def visit(node: ast.AST, raising: bool) -> Iterator[Text]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, cleandoc(node.value.value), docstring=True)
            return
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            if len((text := joined(node)).split()) >= 5:
                if raising or text.rstrip().endswith("."):
                    yield Text(node.lineno, text.replace("\n", "\n\n"))
                return
            if isinstance(node, ast.Constant):
                return
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            raising = raising or bool(RAISING.search(name))
        raising = raising or isinstance(node, ast.Raise)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.Name | ast.expr_context | ast.operator | ast.cmpop):
                yield from visit(child, raising)

    yield from visit(ast.parse(source), raising=False)
    comments, goes_on = list[Text](), 0
    for match in STRINGS_AND_COMMENTS.finditer(source):
        if source[match.start()] == "#" and not DIRECTIVE.match(match[0]):
            begin = source.rfind("\n", 0, match.start()) + 1
            line, words = source.count("\n", 0, begin) + 1, match[0].lstrip("# ")
            alone = not source[begin : match.start()].strip()
            if alone and line == goes_on:
                comments[-1] = Text(comments[-1].line, f"{comments[-1].text}\n{words}")
            else:
                comments.append(Text(line, words))
            goes_on = line + 1 if alone else 0
    yield from comments


@cache
def texts(path: Path) -> tuple[Text, ...]:
    """Texts of a Python file or a page, or the Markdown cells of a notebook."""
    source = path.read_text()
    if path.suffix == ".py":
        return tuple(python_texts(source))
    if path.suffix == ".ipynb":
        cells = enumerate(json.loads(source)["cells"], 1)
        return tuple(Text(n, "".join(cell["source"])) for n, cell in cells if cell["cell_type"] == "markdown")
    return (Text(1, source),)


# ---------------------------------------------------------------- sentences of a text

FENCE = re.compile(r"(```+|~~~+)(?!\{(?:note|tip|warning|important|admonition))\S* *\S*$")
BULLET = re.compile(r"(?:[-*+]|\d+[.)])\s+")
SECTION = re.compile(r"(?:Args|Arguments|Returns|Raises|Yields|Attributes|Example|Examples|Note|Notes|References):$")
ARGUMENT = re.compile(r"[`*\w., ]+(?: \([^)]*\))?: ")
NOT_PROSE = re.compile(r"[|+#<@]|:::|```|\.\. |\(\S+\)=$|\[[^]]+\]: |[-=]{3,}|>>>")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)|https?://[^\s)>\]]+|\{\}", re.DOTALL)
LINK = re.compile(r"(?<=\])(?:\([^)\s]*\)|\{[^}]*\})")
END = re.compile(r"[.!?:]*[.!?][\"'”’)\]*_]*(?=\s|$)")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|[Ff]ig|[Ss]ec|[Nn]o|[Ee]q|resp|approx|ca)|(?:^|[\s(])[A-Z])\.$")
MAYBE_END = re.compile(r"(?:\b(?:etc|al)\.|\.\.\.)\W*$")  # it is one if a capital letter follows
PLAIN = re.compile(r"[A-Za-z][a-z]*(?:['’-][a-z]+)*")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of paragraphs, items and descriptions of arguments, without code, tables and headings."""
    begin, block, fence, section, code = 0, [], "", False, False
    for number, raw in enumerate([*re.sub(r"(?s)\A---\n.*?\n---\n", lambda m: "\n" * m[0].count("\n"), text).split("\n"), ""]):
        raw = re.sub(r"^>\s?", "", raw)
        line, indent = raw.strip(), len(raw) - len(raw.lstrip())
        if fence:
            fence = "" if line.startswith(fence) and not line.strip("`~") else fence
            continue
        opened, bullet, header = FENCE.match(line), BULLET.match(line), SECTION.match(line)
        section = bool(header) or (section and (not line or indent > 0))
        argument = ARGUMENT.match(line) if section and indent == 4 else None
        starts = bullet or argument
        not_prose = not line or opened or header or (not bullet and NOT_PROSE.match(line))
        indented = indent >= 4 and not block and not section
        code = bool(line) and not starts and (code or indented or line.startswith(">>>"))
        if block and (starts or not_prose or code):
            yield begin, "\n".join(block)
            block = []
        if opened:
            fence = opened[1]
        elif not (not_prose or code):
            begin = begin if block else number
            block.append(line[starts.end() :] if starts else line)


@dataclass(frozen=True)
class Sentence:
    line: int
    text: str
    words: int

    @property
    def clauses(self) -> int:
        return len(RELATIVE.findall(masked(self.text)))


def masked(text: str) -> str:
    """The text at its length, with each piece of code as one word and without the targets of links."""
    return LINK.sub(lambda m: " " * len(m[0]), CODE.sub(lambda m: "C" * len(m[0]), text))


def sentences(text: str) -> Iterator[Sentence]:
    """Sentences of a text. Those of names and code only, with fewer than two plain words, do not count."""
    for first, block in blocks(text):
        mask, begin = masked(block), 0
        for match in [*END.finditer(mask), None]:
            end = match.end() if match else len(mask)
            before, after = mask[begin:end].rstrip("\"'”’)]*_"), mask[end:].lstrip(" \n\"'“([*_")
            if match and (ABBREVIATION.search(before) or (MAYBE_END.search(before) and not after[:1].isupper())):
                continue
            words = [word for word in mask[begin:end].split() if re.search(r"\w", word)]
            if sum(bool(PLAIN.fullmatch(word.strip("\"'“”‘’()[].,;:!?*_"))) for word in words) >= 2:
                start = begin + len(mask[begin:end]) - len(mask[begin:end].lstrip())
                yield Sentence(first + block.count("\n", 0, start), " ".join(block[start:end].split()), len(words))
            begin = end


def file_sentences(path: Path) -> list[Sentence]:
    """Sentences of a file, with their lines in it."""
    cell = path.suffix == ".ipynb"
    return [
        Sentence(text.line + (0 if cell else sentence.line), sentence.text, sentence.words)
        for text in texts(path)
        for sentence in sentences(text.text)
    ]


def mean(found: Iterable[Sentence]) -> float:
    words = [sentence.words for sentence in found]
    return sum(words) / max(len(words), 1)


def prose_errors(path: Path) -> list[tuple[int, str, str]]:
    """(line, rule, words around) of what ERRORS forbid in a Python file or a notebook. Pages speak of people, too."""
    found = []
    if path.suffix == ".md":
        return found
    for text in texts(path):
        for number, (rule, pattern) in enumerate(ERRORS.items()):
            for match in pattern.finditer(text.text) if number or text.docstring else ():
                words = text.text[max(0, match.start() - 40) : match.end() + 40]
                found.append((text.line + text.text.count("\n", 0, match.start()), rule, " ".join(words.split())))
    return sorted(found)


# ---------------------------------------------------------------- files and the report


def files(paths: Iterable[Path] = ()) -> list[Path]:
    """The files that have a measure: of these files and folders, or of the package, the pages and the notebooks."""
    named = [
        found
        for path in paths
        for found in ([path] if path.is_file() else [p for kind in ("*.py", "*.md", "*.ipynb") for p in path.rglob(kind)])
    ]
    found = named or [*(ROOT / "funccoll").rglob("*.py"), *(path for page in PAGES for path in ROOT.glob(page))]
    return sorted(path for path in set(found) if not is_generated(path))


def is_generated(path: Path) -> bool:
    if {"_build", ".ipynb_checkpoints"} & set(path.parts):
        return True
    return path.suffix == ".md" and bool(GENERATED.search("\n".join(path.read_text().split("\n")[:10])))


def name(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def table(groups: dict[str, list[Sentence]]) -> Iterator[str]:
    """A line for each group: its sentences, their mean, and the figures that are only reported."""
    yield f"{'':38}sentences  words  relative %  two %  if+when  where"
    for group, found in groups.items():
        clauses = [sentence.clauses for sentence in found]
        text, n = " ".join(masked(sentence.text) for sentence in found).lower(), max(len(found), 1)
        ifs, wheres = (len(re.findall(rf"\b(?:{words})\b", text)) for words in ("if|when", "where"))
        one, two = 100 * sum(c > 0 for c in clauses) / n, 100 * sum(c > 1 for c in clauses) / n
        yield f"{group:38}{len(found):9}  {mean(found):5.1f}  {one:10.0f}  {two:5.1f}  {ifs:7}  {wheres:5}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.repo.prose", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--worst", type=int, default=20, metavar="N", help="how many sentences are printed (20)")
    arguments = parser.parse_args()
    groups: dict[str, list[Sentence]] = {}
    everything: list[tuple[str, Sentence]] = []
    for path in files(arguments.paths):
        found = file_sentences(path)
        folder = path.resolve().parent
        short = "/".join(name(folder).split("/")[:2]) if folder != ROOT else name(path)
        groups.setdefault(name(path) if arguments.paths else short, []).extend(found)
        everything += [(name(path), sentence) for sentence in found]
    groups["all"] = [sentence for _, sentence in everything]
    print(*table(groups), sep="\n")
    everything.sort(key=lambda at: -at[1].words - 10 * max(at[1].clauses - 1, 0))
    for path, sentence in everything[: arguments.worst]:
        print(f"\n{path}:{sentence.line}: {sentence.words} words, {sentence.clauses} relative clauses\n  {sentence.text}")


if __name__ == "__main__":
    main()
