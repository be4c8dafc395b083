"""What a page shows of the JSON documents of inspect, ckpt, convert, diff and a coverage. Pure.

Of the documents these keys are read; there may be more:

    inspect    path, format, meshes, device_ids, leaves: keys, type, value, shape, dtype, bytes,
               chunk_shape, mesh, spec, device; and problems and hints, if it could not be used
    ckpt       source, destination, meshes, device_ids, notes, problems, hints, read_amplification,
               bytes_read, bytes_written, decoded_bytes, shared_bytes, peak_memory, arrays: keys,
               shape, dtype, bytes, chunk_shape, mesh, spec, moved, bytes_read, bytes_written,
               read_amplification, saved: chunk_shape, mesh, spec, device
    convert    the same, and layout, why, warnings, rows: from, to, operation, origin, problem; rows
               of a conversion that was refused, too
    diff       a, b, equal, values, by_digests, compared, not_compared, differences, arrays: keys,
               bytes
    coverage   mesh, device_ids, rules, unmatched, problems, hints, device_bytes, leaves: keys,
               shape, bytes, mesh, spec, source, replicated

What is not known is None, and shown as not known.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reshard.report.leaves import Leaves
from reshard.tree import format_key, split_path
from reshard.units import count_leaves, count_of, format_bytes

Document = Mapping[str, Any]
# Characters of a text of a difference, leaves that a fact names, names of leaves looked for in
# problems, and leaves of which a page has histograms of their own.
_MAX_TEXT = 120
_NAMED = 3
_MAX_WORDS = 200
_MAX_HISTOGRAMS = 500
_UNKNOWN = "not known"
_WHOLE = ("added", "removed", "moved")  # differences of whole leaves


@dataclasses.dataclass(frozen=True)
class Fact:
    """One of the answers that a page begins with; `tone` is `"good"`, `"bad"` or "", and the script
    finds it by its `name`."""

    question: str
    answer: str
    details: tuple[str, ...] = ()
    tone: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """What a page of one kind shows: `lead` is a sentence, and its script draws `data`."""

    kind: str
    title: str
    lead: str
    facts: tuple[Fact, ...]
    lists: Mapping[str, Sequence[str]]
    data: Mapping[str, Any]


def page_of(document: Document) -> Page:
    """What the page of a JSON document shows."""
    if "differences" in document:
        return _diff_page(document)
    if "rules" in document:
        return _coverage_page(document)
    if "arrays" in document:
        return _plan_page(document)
    return _checkpoint_page(document)


def _checkpoint_page(document: Document) -> Page:
    leaves = Leaves(["saved"], document["meshes"], document["device_ids"])
    problems = document.get("problems", ())
    for leaf, marked in zip(document["leaves"], _marked(document["leaves"], problems), strict=True):
        leaves.add(leaf["keys"], leaf, [leaf], int(marked))
    arrays = count_of(leaves.arrays, "array")
    size = format_bytes(leaves.nbytes)
    mesh = leaves.meshes_of(0)
    lead = f"{arrays}, {size}, saved on {mesh}." if mesh else f"{arrays}, {size}, saved on no mesh."
    data = _rows(leaves, document) | leaves.data()
    facts = (
        Fact("What is it?", f"{arrays}, {size}", (document["format"],)),
        Fact("What does a load decode?", _UNKNOWN, name="amplification"),
        _replicated(leaves),
    )
    if problems:
        failed, *several = problems
        count = count_of(len(several) or 1, "problem")
        does = Fact("What does the job do?", f"nothing: {count}", (lead,), "bad")
        title = f"{document['path']} → {document['destination']}"
        lead = f"The plan could not be made: {failed}"
        lists = _lists({**document, "problems": several or [failed]})
        return Page("refused", title, lead, (does, *facts[1:]), lists, data)
    return Page("checkpoint", document["path"], lead, facts, _lists(document), data)


def _plan_page(document: Document) -> Page:
    leaves = Leaves(["before", "after"], document["meshes"], document["device_ids"])
    for array in document["arrays"]:
        numbers = array["bytes_read"], array["bytes_written"]
        leaves.add(array["keys"], array, [array["saved"], array], *numbers)
    verbatim = sum(array["moved"] for array in document["arrays"])
    rewritten = len(document["arrays"]) - verbatim
    size = format_bytes(document["decoded_bytes"])
    arrays = count_of(leaves.arrays, "array")
    old, new = (leaves.meshes_of(side) or "no mesh" for side in (0, 1))
    where = f"go from {old} to {new}" if old != new else f"stay on {new}"
    lead = f"{arrays}, {size}, {where}: {rewritten} rewritten, {verbatim} copied verbatim."
    does = f"{old} → {new}" if old != new else f"stays on {new}"
    shared = format_bytes(document["shared_bytes"])
    shared = f", and shares {shared} with the source" if document["shared_bytes"] else ""
    kind = "plan"
    if "rows" in document:
        kind, does = "conversion", f"converts {document['layout']}"
        lead = f"{document['layout']}, converted. {lead}"
    job = Fact(
        "What does the job do?",
        does,
        (
            f"Rewrites {rewritten} of {arrays}, copies {verbatim} verbatim.",
            f"Reads {format_bytes(document['bytes_read'])}, writes "
            f"{format_bytes(document['bytes_written'])}{shared}.",
            f"Takes {format_bytes(document['peak_memory'])} of memory at most.",
        ),
    )
    steps = any("step" in array for array in document["arrays"])
    data = _rows(leaves, document) | leaves.data() | {"steps": steps}
    title = " and ".join(document["source"]) + f" → {document['destination'] or 'a new checkpoint'}"
    facts = job, _worth(document, leaves.meshes_of(1)), _replicated(leaves)
    return Page(kind, title, lead, facts, _lists(document), data)


def _worth(document: Document, mesh: str) -> Fact:
    """What loading decodes, before and after; and what that is in bytes."""
    converts = "rows" in document
    question = "What does a load decode?" if converts else "Is it worth it?"
    known = [array for array in document["arrays"] if array["mesh"] is not None]
    total = sum(array["bytes"] for array in known)
    if not total:
        no_mesh = document["arrays"] and not known
        why = "No array has a mesh." if no_mesh else "There is no byte to load."
        return Fact(question, _UNKNOWN, (why,), "", "amplification")
    before, after = (
        sum(array["read_amplification"][side] * array["bytes"] for array in known) / total
        for side in ("before", "after")
    )
    details = [
        f"Loading on {mesh} decodes {before:.2f} times what it needs; after this job {after:.2f}."
    ]
    saved = (before - after) * total
    if saved >= 0.005 * total:
        details.append(f"Each load decodes {format_bytes(saved)} less.")
    elif saved > -0.005 * total:
        details += ["For loading alone it is not: it decodes as much as before."] * (not converts)
    else:
        details.append(f"Each load decodes {format_bytes(-saved)} more.")
    if len(known) < (arrays := len(document["arrays"])):
        details.append(
            f"That is of {len(known)} of {count_of(arrays, 'array')}: of those without a mesh it "
            f"is {_UNKNOWN}."
        )
    tone = "good" if before - after >= 0.005 else "bad" if after - before >= 0.005 else ""
    return Fact(question, f"{before:.2f}x → {after:.2f}x", tuple(details), tone, "amplification")


def _coverage_page(document: Document) -> Page:
    leaves = Leaves(["target"], [document["mesh"]], [document["device_ids"]])
    for leaf in document["leaves"]:
        leaves.add(leaf["keys"], leaf, [leaf])
    mesh = leaves.meshes_of(0)
    sources = collections.Counter(leaf["source"] for leaf in document["leaves"])
    by = ", ".join(f"{count} by {'nothing' if s == 'none' else s}" for s, count in sources.items())
    problems = count_of(len(document["problems"]), "problem")
    facts = (
        Fact(
            "What does a device hold?",
            format_bytes(document["device_bytes"]),
            (f"{count_of(leaves.arrays, 'array')}; specs {by}.",),
        ),
        Fact(
            "Does it fit the mesh?",
            f"no, {problems}" if document["problems"] else "yes",
            ("Read amplification is not known: a model has no chunks.",),
            "bad" if document["problems"] else "good",
        ),
        _replicated(leaves),
    )
    rules = [
        f"{rule['name']} -> {', '.join(rule['axes']) or 'replicated'}: "
        f"{count_leaves(rule['leaves'])}"
        for rule in document["rules"]
    ]
    rules += [
        f"{name}, which no rule has: {count_leaves(len(paths))}"
        for name, paths in document["unmatched"].items()
    ]
    lead = f"{count_of(leaves.arrays, 'array')}, {format_bytes(leaves.nbytes)}, on {mesh}."
    lists = {**_lists(document), "Rules": rules}
    return Page("coverage", f"a model on {mesh}", lead, facts, lists, leaves.data())


def _diff_page(document: Document) -> Page:
    found, left_out = document["differences"], document["not_compared"]
    counts = collections.Counter(each["what"] for each in found)
    kinds = ", ".join(f"{count} {what}" for what, count in counts.items())
    how, within = "by recorded digests", ""
    if document["values"]:
        how = "bit for bit"
        if document["rtol"] or document["atol"]:
            within = f"|A - B| <= {document['atol']:g} + {document['rtol']:g} * |B|"
            how = f"{within}, integers exactly"
    notes = []
    if document["values"] and document["by_digests"]:
        notes.append(f"{document['by_digests']} of them by recorded digests.")
    if left_out:
        notes.append(f"The contents of {count_of(left_out, 'array')} were not compared.")
    if document["values"] and (moved := counts["moved"]):
        were = "was" if moved == 1 else "were"
        notes.append(f"{count_of(moved, 'moved array')} {were} compared by digests.")
    counted = {
        "are NaN or infinite on a side": (each.get("non_finite") for each in found),
        "are equal as numbers, with other bits: 0 and -0": map(_equal_as_numbers, found),
    }
    unmeasured = [
        f"{count_of(sum(some), 'element')} of {count_leaves(len(some))} {what}."
        for what, numbers in counted.items()
        if (some := [*filter(None, numbers)])
    ]
    unknown = f"No difference was found; whether they are equal is {_UNKNOWN}."
    equal, tone, differs, lead = {
        True: ("yes", "good", "nothing", f"They are equal{within and f' within {how}'}."),
        False: ("no", "bad", kinds, f"A, the first, and B, the second, differ: {kinds}."),
        None: (_UNKNOWN, "", "nothing found", unknown),
    }[document["equal"]]
    facts = (
        Fact("Are they equal?", equal, (), tone),
        Fact("What differs?", differs, tuple(unmeasured)),
        Fact("What was compared?", f"{count_of(document['compared'], 'array')}, {how}", (*notes,)),
    )
    title = f"{document['a']} and {document['b']}"
    return Page("diff", title, lead, facts, {}, _differences(document))


def _differences(document: Document) -> dict[str, Any]:
    """The leaves of a diff, a row for each difference, and the histograms of all."""
    found = document["differences"]
    rest = "equal" if not document["not_compared"] else "no difference found"
    rest = _UNKNOWN if not document["compared"] and document["not_compared"] else rest
    kinds = {
        tuple(each["keys"]): each["what"] if each["what"] in _WHOLE else "changed" for each in found
    }
    leaves = Leaves([], [], [])
    for array in document["arrays"]:
        kind = kinds.get(tuple(array["keys"]), rest)
        leaves.add(array["keys"], array | {"source": kind}, [])
    measured = [each for each in found if "abs_histogram" in each]
    measured.sort(key=lambda each: -_magnitude(each["max_abs"]))
    shown = {id(each) for each in measured[:_MAX_HISTOGRAMS]}
    names = ("abs_histogram", "rel_histogram")
    rows = [
        [
            each["what"],
            *leaves.place([*map(format_key, each["keys"])]),
            _text(each["a"]),
            _text(each["b"]),
            *(each.get(name) for name in ("count", "size", "max_abs", "max_rel")),
            [_bins([each], name) for name in names] if id(each) in shown else None,
            each.get("non_finite"),
            _equal_as_numbers(each),
        ]
        for each in found
    ]
    histograms = [_bins(measured, name) for name in names] if document["values"] else None
    return leaves.data() | {"differences": rows, "histograms": histograms}


def _equal_as_numbers(difference: Document) -> int | None:
    """How many elements differ by 0: 0 and -0. None where that is not known."""
    gap = difference.get("max_abs")
    if "count" not in difference or gap == "inf":  # which no histogram counts
        return None
    sizes = sum(difference["abs_histogram"].values())
    return difference["count"] - difference["non_finite"] - sizes


def _bins(found: Sequence[Document], name: str) -> list[list[int]]:
    """The sum of histograms: pairs of k and how many are 2^k to 2^(k + 1)."""
    total: collections.Counter[int] = collections.Counter()
    for each in found:
        total.update({int(k): count for k, count in each[name].items()})
    return [[k, total[k]] for k in sorted(total)]


def _magnitude(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.inf if value else 0.0


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = ("x".join(map(str, value)) or "()") if isinstance(value, list) else str(value)
    if isinstance(value, float):
        text = f"{value:.9g}"  # which tells any two float32 apart
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."


def _rows(leaves: Leaves, document: Document) -> dict[str, Any]:
    """What becomes of the leaves in a conversion: of each row what is said of it, which is written
    once for all of which it is said, and the places before and after."""
    if "rows" not in document:
        return {}
    told: dict[Any, int] = {}
    rows = [
        [
            told.setdefault((row["origin"], row["operation"], row["problem"]), len(told)),
            *(
                [leaves.place([*map(format_key, split_path(path))]) for path in row[side]]
                for side in ("from", "to")
            ),
        ]
        for row in document["rows"]
    ]
    return {"rows": rows, "told": list(told)}


def _replicated(leaves: Leaves) -> Fact:
    """Which leaves every device holds in full, largest first."""
    question = "Which leaves are replicated?"
    found = sorted(leaves.replicated, key=lambda each: -each[0])
    unknown = ()
    if leaves.without_mesh:
        unknown = (f"{count_of(leaves.without_mesh, 'array')} without a mesh: {_UNKNOWN}.",)
    if not found:
        return Fact(question, _UNKNOWN if unknown else "none", unknown, "" if unknown else "good")
    total = sum(nbytes for nbytes, _, _ in found)
    named = "; ".join(f"{path} ({format_bytes(nbytes)})" for nbytes, path, _ in found[1:_NAMED])
    more = len(found) - _NAMED
    details = [f"{format_bytes(found[0][0])}, in full on each of {found[0][2]} devices."]
    if named:
        details.append(f"Then {named}" + (f" and {more} more." if more > 0 else "."))
        details.append(f"{len(found)} leaves, {format_bytes(total)} a device.")
    share = total / (leaves.nbytes or 1)
    return Fact(question, found[0][1], (*details, *unknown), "bad" if share >= 0.01 else "")


def _lists(document: Document) -> dict[str, Sequence[str]]:
    names = {
        "Problems": "problems",
        "Hints": "hints",
        "Warnings": "warnings",
        "Notes": "notes",
        "What the source is": "why",
    }
    return {title: document[name] for title, name in names.items() if document.get(name)}


def _marked(leaves: Sequence[Document], problems: Sequence[str]) -> Iterator[bool]:
    """Which leaves problems name: by their path, its end, or that of a module; `*` may be in it."""
    words = [word for line in problems for word in re.findall(r"[^\s,;:`]+", line) if "/" in word]
    globs = [re.escape(word).replace(r"\*", "[^/]*") for word in dict.fromkeys(words)]
    named = re.compile(rf"(?:^|.*/)(?:{'|'.join(globs[:_MAX_WORDS])})(?:/|$)")
    return (bool(globs and named.match(leaf["path"])) for leaf in leaves)
