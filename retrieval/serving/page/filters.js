// Filters: chips for those that hold, and a form that writes a new one in the words of the service.

const RELATIONS = {
  "=": "is", "!=": "is not", "<": "is less than", "<=": "is at most", ">": "is more than", ">=": "is at least", in: "is one of",
};
const BY_TYPE = { boolean: ["=", "!="], string: ["=", "!=", "in", "<", "<=", ">", ">="] };
const SIGNS = { "!=": "\u2260", "<=": "\u2264", ">=": "\u2265" };

const fieldsOf = (chosen) => {
  const fields = new Map();
  for (const retriever of chosen) {
    for (const [name, types] of Object.entries(retriever.fields ?? {})) {
      fields.set(name, [...new Set([...(fields.get(name) ?? []), ...types])]);
    }
  }
  return fields;
};

const relationsOf = (types) => {
  if (types.every((type) => type === "boolean")) return BY_TYPE.boolean;
  return types.includes("string") ? BY_TYPE.string : ["=", "!=", "<", "<=", ">", ">=", "in"];
};

// A name of other characters stands in quotes. In quotes a word is a text; without them it is a number or a truth value where it reads as one.
// With stars, one behind a text stays outside of the quotes: it asks for a beginning.
function condition(field, relation, value, types, { stars = false } = {}) {
  const word = (part) => {
    if (types.some((type) => type !== "string") && /^(?:true|false|[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)$/i.test(part)) return part;
    if (stars && /^[12]\d{3}([-/.]\d{1,2}){0,2}$/.test(part) && ["=", "!=", "in"].includes(relation)) return part; // a period of dates
    const beginning = stars && /^[^]+\*$/.test(part) && ["=", "!=", "in"].includes(relation);
    return beginning ? `${JSON.stringify(part.slice(0, -1))}*` : JSON.stringify(part);
  };
  const name = /^[^\s"=!<>,()&|'][^\s"=!<>,()&|]*$/.test(field) ? field : JSON.stringify(field);
  if (relation === "in") return `${name} in ${value.split(",").map((part) => part.trim()).filter(Boolean).map(word).join(",")}`;
  return `${name}${relation}${word(value.trim())}`;
}

const readable = (filter) => filter.replace(/!=|<=|>=/, (sign) => ` ${SIGNS[sign]} `).replace(/^([^=<>\u2260\u2264\u2265]*)([=<>])/, "$1 $2 ")
  .replace(/"((?:[^"\\]|\\.)*)"/g, (quoted) => { try { return JSON.parse(quoted); } catch { return quoted; } });

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
  const types = fieldsOf(shownRetrievers()).get(byId("filter-field").value) ?? [];
  const chosen = byId("filter-operator").value;
  const relations = relationsOf(types);
  byId("filter-operator").replaceChildren(...relations.map((relation) => element("option", { value: relation }, RELATIONS[relation])));
  if (relations.includes(chosen)) byId("filter-operator").value = chosen;
  drawValueHint(types);
}

function drawValueHint(types) {
  const value = byId("filter-value");
  const numeric = !types.includes("string") && !types.includes("boolean");
  value.inputMode = numeric && byId("filter-operator").value !== "in" ? "decimal" : "text";
  if (byId("filter-operator").value === "in") value.placeholder = "one, another";
  else if (types.every((type) => type === "boolean")) value.placeholder = "true";
  else value.placeholder = types.includes("string") && ["=", "!="].includes(byId("filter-operator").value) ? "text, or beginning*" : "";
}

function submitFilter() {
  const field = byId("filter-field").value;
  const value = byId("filter-value").value;
  const types = fieldsOf(shownRetrievers()).get(field) ?? [];
  const missing = byId("filter-operator").value === "in" ? !/[^,\s]/.test(value) : !value.trim();
  byId("filter-fault").textContent = missing ? `A value for ${visible(field)} is missing.` : "";
  if (missing) {
    byId("filter-value").focus();
    return;
  }
  const made = condition(field, byId("filter-operator").value, value, types, { stars: true });
  if (!state.filters.includes(made)) state.filters = [...state.filters, made];
  byId("filter-value").value = "";
  closeFilter();
  changed({ entry: true });
  byId("add-filter").focus();
}
