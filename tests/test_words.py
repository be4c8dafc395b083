"""README, topics, `--help` and errors in plain English: short sentences, and no odd phrases."""

import ast
import pathlib
import re

import click
import pytest

from reshard.cli import command as program

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "reshard" / "cli" / "topics").glob("*.md"))]
MOST_WORDS = 25
# Phrases that a reader has to read twice, in documents and messages.
ODD = re.compile(
    r"\b(tells|(is|are) told|is said|goes (without|by|with|on)|for one\b[.,)]|but for|of which"
    r"|so much as|in one another|would have to have|is of no use|has it that|as many as|anew"
    r"|what is there|there twice|than it is|in want of|on the way (of|back)|has no part in"
    r"|exclude each other|no model does|was to be made|run backwards|half[- ]written|takes it away"
    r"|was asked to be|lies? beside|holds what|way back|what is split|not one each"
    r"|stays as it is|no such leaves|taken, too)\b"
    r"|(?<!there )\bis no "
    r"(regex|codec|number|function|list|tree|box|share|path|file|step|mesh|name)\b",
    re.IGNORECASE,
)


def prose(text: str) -> list[str]:
    """Sentences, list items and table cells of Markdown, with a word for each piece of code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "Code", text)
    found = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith(("    ", "#", "!")):
            continue
        pieces = re.split(r"^\s*(?:- |\d+\. )", block, flags=re.MULTILINE)
        if block.startswith("|"):
            pieces = [cell for row in block.splitlines() for cell in row.split("|")]
        for piece in pieces:
            words = " ".join(piece.replace("**", "").split())
            found += [s for s in re.split(r"(?<=[.!?:])\s+(?=[A-Za-z(\[])", words) if s]
    return found


def helps() -> list[tuple[str, str]]:
    """Each help text of the command line, with its command or option."""
    found = []
    context = click.Context(program)
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        found.append((name, command.help or ""))
        options = (each for each in command.params if isinstance(each, click.Option))
        found += [(f"{name} {option.opts[0]}", option.help or "") for option in options]
    return found


def messages() -> list[tuple[str, str]]:
    """Each string in `reshard/` of three words or more that is no docstring, with its file and
    line: errors, warnings, hints and labels. An `X` stands for each expression in it."""
    found = []
    for path in sorted((ROOT / "reshard").rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        apart |= {id(v) for node in nodes if isinstance(node, ast.JoinedStr) for v in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in apart:
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                values = [v.value if isinstance(v, ast.Constant) else "X" for v in parts]
                if len((text := "".join(map(str, values))).split()) > 2:
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return found


def problems(text: str) -> list[str]:
    found = [f"odd: {match[0]}" for match in ODD.finditer(" ".join(prose(text)))]
    return found + [f"long: {s}" for s in prose(text) if len(s.split()) > MOST_WORDS]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_documents(path):
    assert problems(path.read_text()) == []


def test_help():
    assert [(name, said) for name, text in helps() if (said := problems(text))] == []


def test_errors():
    texts = messages()
    assert len(texts) > 400
    odd = [(where, text) for where, text in texts if ODD.search(text)]
    assert odd + [(w, text) for w, text in texts if any("long" in p for p in problems(text))] == []


def test_a_long_sentence_and_an_odd_phrase_are_found():
    text = "- A job, of which `x` is\n  told.\n\n| a | " + "word " * 26 + "|\n"
    assert [each.partition(":")[0] for each in problems(text)] == ["odd", "odd", "long"]
