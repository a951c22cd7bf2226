// Facets: the values of the fields with their numbers of documents, each of which adds a filter.

const FACETS = 6; // fields that are shown
const COUNTED = 20; // fields that are counted to choose them from
const VALUES = 8; // values of a field

// The place of a passage in its file is different for nearly every passage.
const PLACES = new Set(["start", "end", "line", "end_line", "page", "end_page", "cell", "end_cell"]);
const useless = new Set(); // fields of retrievers that an answer has shown to be nothing to choose from; others are counted instead
const facetKey = (retriever, field) => JSON.stringify([retriever.name, field]);
const facetFields = (retriever) => Object.keys(retriever.fields ?? {}).filter((field) => !PLACES.has(field) && !useless.has(facetKey(retriever, field)))
  .slice(0, Math.min(COUNTED, limits.facets ?? COUNTED));

function drawFacets() {
  const host = byId("facets");
  const [retriever] = shownRetrievers();
  const answer = state.together ? null : shown.get(retriever?.name);
  const rows = [];
  for (const [field, facet] of Object.entries(answer?.facets ?? {})) {
    const row = facetRow(field, facet, retriever, answer.matching ?? retriever.documents);
    if (row !== null) rows.push(row);
    else if (state.filters.length === 0) useless.add(facetKey(retriever, field));
  }
  rows.length = Math.min(rows.length, FACETS);
  host.hidden = rows.length === 0 || (answer.hits.length === 0 && state.filters.length === 0);
  host.querySelector("dl").replaceChildren(...rows);
}

const NUMBERS = 30; // distinct numbers, such as years, or files; more, such as line numbers, are for the form of filters

// Values that are files, or rows of a table: nobody narrows down to one of many. The form of filters asks for a folder: file LIKE 'guides/%'
const isPlace = (field, values) => GROUPS.includes(field) || values.every(({ value }) => typeof value === "string" && value.includes("/"));

const SHARE = 0.05; // of the documents, that the values shown have at least

// A field that has another value in nearly every document, such as a name, a price or a date, is nothing to choose from.
function facetRow(field, facet, retriever, documents) {
  const values = facet.values.slice(0, VALUES);
  const held = values.reduce((sum, { count }) => sum + count, 0);
  if (!values.length || (facet.distinct > VALUES && (values[0].count < 2 || held < SHARE * documents))) return null;
  if (facet.distinct > NUMBERS && isPlace(field, values)) return null;
  const [type] = retriever.fields[field];
  if (facet.distinct > NUMBERS && /^(?:integer|number|date|timestamp)/.test(type)) return null;
  const buttons = values.filter(({ value }) => String(value).trim() !== "").map(({ value, count }) => {
    const made = condition(field, isListType(type) ? "has" : "=", String(value), type);
    const on = state.filters.includes(made);
    return element("button", { type: "button", class: "facet", "aria-pressed": String(on), title: `Only where ${visible(field)} is ${visible(value)}`,
      onclick: () => (on ? removeFilter(state.filters.indexOf(made)) : filterBy(made)) }, others(cut(value, 60)), element("span", { class: "count" }, number(count)));
  });
  if (!buttons.length) return null;
  const left = facet.distinct - values.length;
  return element("div", {}, element("dt", {}, visible(field)), element("dd", {}, buttons, left > 0 ? element("button", { type: "button", class: "left", title: "Filter by another value", onclick: () => openFilter(field) }, `${number(left)} more`) : null));
}
