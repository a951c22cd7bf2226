// Filters: chips for those that hold, and a form that writes a new one in the words of the service.

const RELATIONS = {
  "=": "is", "!=": "is not", "<": "is less than", "<=": "is at most", ">": "is more than", ">=": "is at least", IN: "is one of",
  LIKE: "begins with", has: "has", "has not": "has not",
};
const ORDERED = ["=", "!=", "<", "<=", ">", ">=", "IN"];
const SIGNS = { "!=": "\u2260", "<=": "\u2264", ">=": "\u2265" };
const KEYWORDS = /^(?:and|or|not|in|between|like|ilike|escape|is|null|true|false)$/i;
const NUMBER = /^[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?$/i;

const fieldsOf = (chosen) => {
  const fields = new Map();
  for (const retriever of chosen) {
    for (const [name, [type]] of Object.entries(retriever.fields ?? {})) {
      if (!fields.has(name)) fields.set(name, type);
    }
  }
  return fields;
};

const isListType = (type) => type.endsWith("[]");

const relationsOf = (type) => {
  if (isListType(type)) return ["has", "has not"];
  if (type === "boolean") return ["=", "!="];
  return type === "string" ? ["=", "!=", "LIKE", ...ORDERED.slice(2)] : ORDERED;
};

const quoted = (sign, text) => `${sign}${text.replaceAll(sign, sign + sign)}${sign}`;

// A condition in SQL: texts and dates in single quotes, numbers and truth values without, odd names of fields in double quotes.
function condition(field, relation, value, type) {
  const kind = type.replace("[]", "");
  const word = (part) => {
    if (kind === "boolean" && /^(?:true|false)$/i.test(part)) return part.toLowerCase();
    return (kind === "integer" || kind === "number") && NUMBER.test(part) ? part.replace("+", "") : quoted("'", part);
  };
  const name = /^[a-z_]\w*(?:\.[a-z_]\w*)*$/i.test(field) && !KEYWORDS.test(field) ? field : quoted('"', field);
  if (isListType(type)) return `${relation === "has not" ? "NOT " : ""}array_contains(${name}, ${word(value)})`;
  if (relation === "IN") return `${name} IN (${value.split(",").map((part) => part.trim()).filter(Boolean).map(word).join(", ")})`;
  if (relation !== "LIKE") return `${name} ${relation} ${word(value)}`;
  const escaped = value.replace(/[%_!]/g, (sign) => `!${sign}`);
  return `${name} LIKE ${quoted("'", `${escaped}%`)}${escaped === value ? "" : " ESCAPE '!'"}`;
}

const readable = (filter) => filter.replace(/!=|<=|>=/g, (sign) => SIGNS[sign]);

function drawFilters() {
  const chips = state.filters.map((filter, place) => element("li", {}, element("button", {
    type: "button", class: "chip", "aria-label": `Without the filter ${visible(readable(filter))}`, onclick: () => removeFilter(place),
  }, others(readable(filter)), element("span", { "aria-hidden": "true" }, "\u00d7"))));
  byId("chips").replaceChildren(...chips);
  const fields = fieldsOf(shownRetrievers());
  byId("add-filter").hidden = fields.size === 0;
  if (fields.size === 0) closeFilter();
}

function removeFilter(place) {
  state.filters = state.filters.filter((_, other) => other !== place);
  changed({ entry: true });
  const left = byId("chips").querySelectorAll("button");
  (left[Math.min(place, left.length - 1)] ?? byId("add-filter")).focus();
}

function openFilter(field = null) {
  const fields = fieldsOf(shownRetrievers());
  if (!fields.size) return;
  const chosen = field ?? byId("filter-field").value;
  byId("filter-field").replaceChildren(...[...fields.keys()].map((name) => element("option", { value: name }, visible(name))));
  if (fields.has(chosen)) byId("filter-field").value = chosen;
  drawRelations();
  byId("filter").hidden = false;
  byId("add-filter").setAttribute("aria-expanded", "true");
  byId(field === null ? "filter-field" : "filter-value").focus();
}

function closeFilter() {
  byId("filter").hidden = true;
  byId("filter-fault").textContent = "";
  byId("add-filter").setAttribute("aria-expanded", "false");
}

function drawRelations() {
  const type = fieldsOf(shownRetrievers()).get(byId("filter-field").value) ?? "string";
  const chosen = byId("filter-operator").value;
  const relations = relationsOf(type);
  byId("filter-operator").replaceChildren(...relations.map((relation) => element("option", { value: relation }, RELATIONS[relation])));
  if (relations.includes(chosen)) byId("filter-operator").value = chosen;
  drawValueHint(type);
}

function drawValueHint(type) {
  const value = byId("filter-value");
  const relation = byId("filter-operator").value;
  value.inputMode = /^(?:integer|number)/.test(type) && relation !== "IN" ? "decimal" : "text";
  const hints = { boolean: "true", date: "2021-06-01", timestamp: "2021-06-01 08:30" };
  value.placeholder = relation === "IN" ? "one, another" : hints[type.replace("[]", "")] ?? "";
}

function submitFilter() {
  const field = byId("filter-field").value;
  const value = byId("filter-value").value;
  const type = fieldsOf(shownRetrievers()).get(field) ?? "string";
  const missing = byId("filter-operator").value === "IN" ? !/[^,\s]/.test(value) : !value.trim();
  byId("filter-fault").textContent = missing ? `A value for ${visible(field)} is missing.` : "";
  if (missing) {
    byId("filter-value").focus();
    return;
  }
  const made = condition(field, byId("filter-operator").value, value.trim(), type);
  if (!state.filters.includes(made)) state.filters = [...state.filters, made];
  byId("filter-value").value = "";
  closeFilter();
  changed({ entry: true });
  byId("add-filter").focus();
}
