"""Facts, lists and data of a page, from the JSON document of inspect, ckpt, convert, diff or a
coverage. Pure.

`reshard help page` describes the documents. None is unknown, and is shown as `not known`.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.report.leaves import Leaves
from reshard.tree import format_key, natural, split_path
from reshard.units import count_leaves, count_of, format_bytes, format_load

Document = Mapping[str, Any]
_MAX_TEXT = 120  # characters of a value that differs
_MAX_HISTOGRAMS = 500  # leaves of a diff with histograms of their own
_UNKNOWN = "not known"
_NO = "no mesh"
_NO_MESH = "No array has a mesh."
_HOLDS = "How much memory does a device need?"
_READS = "What does a restore read?"
_NAME = "amplification"  # of the fact that the script fills in for a checkpoint
_WHOLE = ("added", "removed", "moved")  # differences of whole leaves
# Largest differences of the values in a leaf, each with a colour.
_SIZES = {1e-6: "1e-6", 1e-3: "0.001", 1.0: "1"}


@dataclasses.dataclass(frozen=True)
class Fact:
    """One of the first answers of a page. `tone` is `"good"`, `"warn"`, `"bad"` or "". The script
    finds the fact by its `name`."""

    question: str
    answer: str
    details: tuple[str, ...] = ()
    tone: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """The contents of a page: `lead` is its first sentence, and its script draws `data`."""

    kind: str
    title: str
    lead: str
    facts: tuple[Fact, ...]
    lists: Mapping[str, Sequence[str]]
    data: Mapping[str, Any]


def page_of(document: Document) -> Page:
    """The page of a JSON document."""
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
    for leaf in document["leaves"]:
        leaves.add(leaf["keys"], leaf, [leaf])
    arrays = count_of(leaves.arrays, "array")
    size = format_bytes(leaves.nbytes)
    mesh = leaves.meshes_of(0)
    lead = f"{arrays}, {size}, saved on {mesh or _NO}, {document['format']}."
    data = _rows(leaves, document) | leaves.data()
    if steps := document.get("steps"):
        latest = f", the latest of {len(steps)}" if [document["step"]] == steps[1:][-1:] else ""
        lead = f"Step {document['step']}{latest}: {lead}"
    reads = Fact(_READS, _UNKNOWN, name=_NAME)
    facts = _held(leaves.most_held(0)), reads, _replicated(leaves)
    if problems:
        failed, *several = problems
        count = count_of(len(several) or 1, "problem")
        facts = Fact("What does the job do?", f"nothing: {count}", (lead,), "bad"), *facts
        title = f"{document['path']} → {document['destination']}"
        lead = f"The plan could not be made: {failed}"
        lists = _lists({**document, "problems": several or [failed]})
        return Page("refused", title, lead, facts, lists, data)
    return Page("checkpoint", document["path"], lead, facts, _lists(document), data)


def _plan_page(document: Document) -> Page:
    leaves = Leaves(["before", "after"], document["meshes"], document["device_ids"])
    for array in document["arrays"]:
        leaves.add(array["keys"], array, [array["saved"], array])
    verbatim = sum(array["moved"] for array in document["arrays"])
    arrays = count_of(leaves.arrays, "array")
    old, new = (leaves.meshes_of(side) or _NO for side in (0, 1))
    job = f"Changes the mesh of {arrays}" if old != new else f"Keeps the mesh of {arrays}"
    lead = (
        f"{job} ({format_bytes(document['decoded_bytes'])}): {changed(old, new)}. "
        f"{leaves.arrays - verbatim} rewritten, {verbatim} copied verbatim."
    )
    kind = "plan"
    if "rows" in document:
        kind, apis = "conversion", ("Linen", "NNX") if document["to"] == "nnx" else ("NNX", "Linen")
        model = f", {document['model']}" if document["model"] else ""
        lead = f"{changed(*apis)}{model}. {lead}"
    costs = [
        f"Compressed bytes. At most {format_bytes(document['peak_memory'])} of memory for arrays."
    ]
    if document["shared_bytes"]:
        costs.append(f"{format_bytes(document['shared_bytes'])} are hard-linked, not copied.")
    read, written = (format_bytes(document[f"bytes_{way}"]) for way in ("read", "written"))
    cost = Fact("What does the job cost?", f"reads {read}, writes {written}", tuple(costs))
    data = _rows(leaves, document) | leaves.data()
    title = " and ".join(document["source"]) + f" → {document['destination'] or 'a new checkpoint'}"
    held = document["bytes_per_device"].values()
    facts = _held(*held), _load(document, leaves.meshes_of(1)), _replicated(leaves), cost
    return Page(kind, title, lead, facts, _lists(document), data)


def changed(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"


def _held(before: int | None, *job: int | None) -> Fact:
    """Bytes per device: of a checkpoint, or before and after a job."""
    after = job[0] if job else before
    texts = [_UNKNOWN if each is None else format_bytes(each) for each in (before, after)]
    when = "Before and after the job, on" if job else "On"
    details = _NO_MESH if after is None else f"{when} the device with the most array bytes."
    less = before is not None and after is not None and after < before
    return Fact(_HOLDS, changed(*texts), (details,), "good" if less else "")


def _load(document: Document, mesh: str) -> Fact:
    """Bytes that a restore reads, before and after the job."""
    sharded = [array for array in document["arrays"] if array["mesh"] is not None]
    total = sum(array["bytes"] for array in sharded)
    if not total:
        no_mesh = document["arrays"] and not sharded
        why = _NO_MESH if no_mesh else "There is no byte to read."
        return Fact(_READS, _UNKNOWN, (why,), "", _NAME)
    before, after = (
        sum(array["read_amplification"][side] * array["bytes"] for array in sharded) / total
        for side in ("before", "after")
    )
    saved = before - after
    much = f"{format_bytes(abs(saved) * total)} {'less' if saved > 0 else 'more'} than before"
    details = [f"On {mesh}, a restore reads {'as much as before' if abs(saved) < 0.005 else much}."]
    if len(sharded) < (arrays := len(document["arrays"])):
        details.append(
            f"The {count_of(arrays - len(sharded), 'array')} without a mesh: {_UNKNOWN}."
        )
    tone = "good" if saved >= 0.005 else "bad" if saved <= -0.005 else ""
    return Fact(
        "Is it worth it? A restore reads", format_load(before, after), (*details,), tone, _NAME
    )


def _coverage_page(document: Document) -> Page:
    leaves = Leaves(["target"], [document["mesh"]], [document["device_ids"]])
    for leaf in document["leaves"]:
        leaves.add(leaf["keys"], leaf, [leaf])
    mesh = leaves.meshes_of(0)
    sources = collections.Counter(leaf["source"] for leaf in document["leaves"])
    by = ", ".join(f"{count} by {'nothing' if s == 'none' else s}" for s, count in sources.items())
    arrays, problems = count_of(leaves.arrays, "array"), len(document["problems"])
    fits = (f"no, {count_of(problems, 'problem')}", "bad") if problems else ("yes", "good")
    why = ("Read amplification is not known: a model has no chunks.",)
    facts = (
        Fact(_HOLDS, format_bytes(document["device_bytes"]), (f"{arrays}; specs {by}.",)),
        Fact("Does it fit the mesh?", fits[0], why, fits[1]),
        _replicated(leaves),
    )
    rules = []
    for rule in document["rules"]:
        axes = ", ".join(rule["axes"]) or "replicated"
        rules.append(f"{rule['name']} -> {axes}: {count_leaves(rule['leaves'])}")
    unmatched = document["unmatched"].items()
    rules += [f"{name}, in no rule: {count_leaves(len(paths))}" for name, paths in unmatched]
    lead = f"{arrays}, {format_bytes(leaves.nbytes)}, on {mesh}."
    lists = {**_lists(document), "Rules": rules}
    return Page("coverage", f"a model on {mesh}", lead, facts, lists, leaves.data())


def _diff_page(document: Document) -> Page:
    differences, left_out = document["differences"], document["not_compared"]
    counts = collections.Counter(each["what"] for each in differences)
    kinds = ", ".join(map(_counted, counts, counts.values()))
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
    pair = f"A ({document['a']}) and B ({document['b']})"
    unknown = f"No difference was found. Not all contents were compared, so equality is {_UNKNOWN}."
    equal, tone, differs, lead = {
        True: ("yes", "good", "nothing", f"{pair} are equal{within and f' within {how}'}."),
        False: ("no", "bad", kinds, f"{pair} differ: {kinds}."),
        None: (_UNKNOWN, "", "nothing found", unknown),
    }[document["equal"]]
    facts = (
        Fact("Are they equal?", equal, (), tone),
        Fact("What differs?", differs),
        Fact("What was compared?", f"{count_of(document['compared'], 'array')}, {how}", (*notes,)),
    )
    title = f"{document['a']} and {document['b']}"
    return Page("diff", title, lead, facts, {}, _differences(document))


def _counted(what: str, count: int) -> str:
    """A kind of difference with its count: `values differ in 2 arrays`."""
    if what in _WHOLE:
        return f"{count_leaves(count)} {what}"
    in_arrays = what in ("values", "shape", "dtype", "key", "sharding", "chunks")
    where = count_of(count, "array") if in_arrays else count_leaves(count)
    what = what.removesuffix("s") + "s differ"
    return what if what == "formats differ" else f"{what} in {where}"


def _difference(document: Document) -> str:
    """The kind of a leaf's difference, or the range of the largest |A - B|. Each has a colour."""
    if "max_abs" not in document:
        return document["what"] if document["what"] in _WHOLE else "other shape or type"
    size = math.inf if document["non_finite"] else _magnitude(document["max_abs"])
    most = [text for bound, text in _SIZES.items() if size <= bound]
    return f"up to {most[0]}" if most else "over 1, NaN or infinite"


def _differences(document: Document) -> dict[str, Any]:
    """The leaves of a diff, a row for each difference, and the histograms of all."""
    differences = document["differences"]
    rest = "equal" if not document["not_compared"] else "no difference found"
    rest = _UNKNOWN if not document["compared"] and document["not_compared"] else rest
    kinds = {tuple(each["keys"]): _difference(each) for each in differences}
    leaves = Leaves([], [], [])
    for array in document["arrays"]:
        kind = kinds.get(tuple(array["keys"]), rest)
        leaves.add(array["keys"], array | {"source": kind}, [])
    measured = [each for each in differences if "abs_histogram" in each]
    measured.sort(key=lambda each: -_magnitude(each["max_abs"]))
    shown = {id(each) for each in measured[:_MAX_HISTOGRAMS]}
    names = ("abs_histogram", "rel_histogram")
    differences = sorted(
        differences, key=lambda each: natural(tuple(map(format_key, each["keys"])))
    )
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
        for each in differences
    ]
    histograms = [_bins(measured, name) for name in names] if document["values"] else None
    return leaves.data() | {"differences": rows, "histograms": histograms}


def _equal_as_numbers(difference: Document) -> int | None:
    """Number of elements that differ by 0, such as 0 and -0. None if unknown."""
    gap = difference.get("max_abs")
    if "count" not in difference or gap == "inf":  # no histogram counts infinite gaps
        return None
    sizes = sum(difference["abs_histogram"].values())
    return difference["count"] - difference["non_finite"] - sizes


def _bins(differences: Sequence[Document], name: str) -> list[list[int]]:
    """The sum of histograms: pairs of k and the number of elements from 2^k to 2^(k + 1)."""
    total: collections.Counter[int] = collections.Counter()
    for each in differences:
        total.update({int(k): count for k, count in each[name].items()})
    return [[k, total[k]] for k in sorted(total)]


def _magnitude(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.inf if value else 0.0


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = ("x".join(map(str, value)) or "()") if isinstance(value, list) else str(value)
    if isinstance(value, float):
        text = f"{value:.9g}"  # different for any two float32
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."


def _rows(leaves: Leaves, document: Document) -> dict[str, Any]:
    """The rows of a conversion. Texts that many rows share are in `verdicts` once."""
    if "rows" not in document:
        return {}
    verdicts: dict[Any, int] = {}
    rows = [
        [
            verdicts.setdefault((row["origin"], row["operation"], row["problem"]), len(verdicts)),
            *(
                [leaves.place([*map(format_key, split_path(path))]) for path in row[side]]
                for side in ("from", "to")
            ),
        ]
        for row in document["rows"]
    ]
    folds = {
        side: leaves.folds(
            (level, key, document["rows"][n]["origin"])
            for n, row in enumerate(rows)
            for level, key in row[place]
        )
        for place, side in ((1, "from"), (2, "to"))
    }
    return {"rows": rows, "verdicts": list(verdicts), "row_folds": folds}


def _replicated(leaves: Leaves) -> Fact:
    """The share of a device's bytes that every device holds in full."""
    question, total = "How much of a device's memory is replicated?", sum(leaves.replicated)
    details = [f"{count_of(leaves.without_mesh, 'array')} without a mesh: {_UNKNOWN}."]
    details = details * bool(leaves.without_mesh)
    if not leaves.replicated:
        answer, tone = (_UNKNOWN, "") if details else ("nothing", "good")
        return Fact(question, answer, tuple(details), tone)
    count = count_leaves(len(leaves.replicated))
    details.insert(0, f"{count}, {format_bytes(total)}, in full on every device.")
    answer = f"{leaves.share:.0%} of the bytes"
    return Fact(question, answer, tuple(details), leaves.tone)


def _lists(document: Document) -> dict[str, Sequence[str]]:
    titles = {name.capitalize(): name for name in ("problems", "hints", "warnings", "notes")}
    titles["How the layout was detected"] = "why"
    return {title: document[name] for title, name in titles.items() if document.get(name)}
