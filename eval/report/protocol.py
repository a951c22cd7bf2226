"""How the numbers of a report were made, in words: what holds for every result, and what was different where.

Whoever compares a score with another harness's needs these rules more than the score.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quiver.eval.averages import grouped, is_whole
from quiver.eval.report.systems import LABELS, index_name
from quiver.eval.results import HEADLINE, CollectionResult, Results


def protocol(results: Sequence[Results]) -> dict[str, str]:
    """What a rule is about -> the rule, for the results of one report.

    Args:
        results: All of the report.
    """
    scored = [collection for result in results for collection in result.collections]
    baselines = {each.name: each.parameters for collection in scored for each in collection.baselines}
    rules = {
        "Search": _search(scored),
        "Missing results": "A mean is over all judged queries; one for which nothing was found scores 0.",
        "Ties": "Scores are compared as float32, and equal scores are ordered by document id, descending, as trec_eval does.",
        "Measures": "nDCG has linear gains and an ideal ranking over all judged documents. A document is relevant from grade 1 on, and a"
        " negative grade counts as 0. MAP is over the documents kept, MRR@10 over the first ten.",
        "Intervals": _intervals(scored),
        "Unjudged documents": "Judged@10 is the share of the first ten documents that were judged. What nobody judged counts as wrong:"
        " where the share is low, the score says little.",
        "A query's own document": _own_documents(scored),
        "Titles": _titles(scored),
        "Long texts": _cut(scored),
        "Averages": "An average is the unweighted mean over data sets, in which a group of collections counts once, as the mean over its"
        " parts. It is blank where a member is missing.",
        "Domain": _domain(scored),
        **{f"Baseline {name}": _settings(parameters) for name, parameters in sorted(baselines.items())},
    }
    return {about: rule for about, rule in rules.items() if rule}


def system_facts(result: Results) -> dict[str, str]:
    """The fields of a system and where its result was made, as a report lists them; what there is not is left out."""
    system, origin = result.system, result.provenance
    facts = {
        "Source": system.source,
        "Kind": system.kind,
        "Run by": system.library,
        "Fingerprint": system.fingerprint,
        "Vector width": system.dim,
        "Similarity": system.similarity,
        "Query length": None if system.query_length is None else f"{system.query_length:,} tokens",
        "Document length": None if system.document_length is None else f"{system.document_length:,} tokens",
        "Query prompt": system.query_prompt,
        "Document prompt": system.document_prompt,
        "Precision": system.precision,
        "Index": "; ".join(dict.fromkeys(index_name(collection.index) for collection in result.collections)),
        "Date": origin.date,
        "Platform": origin.platform,
        "Threads": origin.threads,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(origin.versions.items())),
    }
    return {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}


def _search(scored: Sequence[CollectionResult]) -> str:
    depths = " or ".join(f"{k:,}" for k in sorted({collection.k for collection in scored}))
    inexact = _names(collection for collection in scored if collection.index.kind not in ("exact", "bm25"))
    how = (
        f"The search is approximate in {inexact}, where its overlap with exact search is given; elsewhere it is exact."
        if inexact
        else "The search is exact."
    )
    return f"Every document of a collection is searched, and the first {depths} are kept for each query. {how}" if scored else ""


def _intervals(scored: Sequence[CollectionResult]) -> str:
    made = dict.fromkeys((each.interval.level, each.interval.resamples) for each in scored)
    return " ".join(
        f"An interval of {LABELS[HEADLINE]} holds {100 * level:g}% of the means of {resamples:,} bootstrap resamples of the queries."
        for level, resamples in made
    )


def _own_documents(scored: Sequence[CollectionResult]) -> str:
    excluding = _names(collection for collection in scored if collection.exclude_self)
    return f"A document with the query's own id is dropped before the cut in {excluding}." if excluding else "No document is excluded."


def _titles(scored: Sequence[CollectionResult]) -> str:
    untitled = _names(collection for collection in scored if not collection.use_title)
    joined = "A document's title and text are one text, joined by a space"
    return f"{joined}, except in {untitled}, where titles are left out." if untitled else f"{joined}."


def _cut(scored: Sequence[CollectionResult]) -> str:
    cutting = _names(collection for collection in scored if collection.truncated.documents or collection.truncated.queries)
    counted = f"There were some in {cutting}, and the table counts them." if cutting else "There were none."
    return f"Texts longer than a system reads are cut at their end. {counted}"


def _domain(scored: Sequence[CollectionResult]) -> str:
    inside = _names(collection for collection in scored if collection.in_domain)
    told = (
        f"Some systems were trained on the training data of {inside}; the table says which" if inside else "No system was trained on them"
    )
    return f"{told}. This is what the evaluation was told, it cannot see it."


def _settings(parameters: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items()) + "."


def _names(collections: Iterable[CollectionResult]) -> str:
    """Collections by name; a group that is there whole by its own."""
    named = []
    for name, parts in grouped(collection.part() for collection in collections).items():
        named += [name] if is_whole(parts) else [part.key for part in parts]
    return ", ".join(sorted(named))
