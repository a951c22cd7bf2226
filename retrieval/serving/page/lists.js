// Lists of results: one, or several side by side with where each document stands in the others.

const DEPTH = 30; // how far the lists are asked side by side, to know where a document stands

// What is shown: one answer a retriever, by its name; the latest that came.
const shown = new Map();

const shownRetrievers = () => (state.together ? retrievers : retrievers.length ? [named(state.retriever)] : []);

const rankOf = (answer, id) => {
  const place = answer?.hits.findIndex((hit) => hit.id === id) ?? -1;
  return place < 0 ? null : (answer.offset ?? 0) + place + 1;
};

// Cards glide where their order has changed, not where the text of those above has grown.
function drawResults({ glides = true } = {}) {
  const focused = document.activeElement?.closest?.("[data-document]");
  const kept = focused && { id: focused.dataset.document, retriever: focused.dataset.retriever };
  const before = glides ? places() : new Map();
  if (state.together) drawColumns();
  else drawOne();
  byId("layout").classList.toggle("together", state.together);
  if (kept) cardOf(kept.id, kept.retriever)?.querySelector(".title").focus({ preventScroll: true });
  glide(before);
}

function cardOf(id, retriever = null) {
  return cards().find((card) => card.dataset.document === id && (retriever === null || card.dataset.retriever === retriever)) ?? null;
}

// Those that can be seen: of several columns on a telephone only one can.
const cards = () => [...byId("results").querySelectorAll("[data-document]")].filter((card) => card.getClientRects().length);

function drawOne() {
  const [retriever] = shownRetrievers();
  const answer = shown.get(retriever?.name);
  if (!answer) {
    byId("results").replaceChildren();
    return;
  }
  if (!answer.hits.length) {
    byId("results").replaceChildren(nothing(answer), ...pages(answer));
    return;
  }
  const words = wordsOf(state.query, retriever);
  const list = element("ol", { class: "list" }, answer.hits.map((hit, place) => element("li", {}, card(hit, (answer.offset ?? 0) + place + 1, retriever, answer, words))));
  byId("results").replaceChildren(list, ...pages(answer));
}

function card(hit, rank, retriever, answer, words) {
  const { heading } = parts(hit);
  const heat = state.heat ? meetingsOf(hit) : null;
  const best = answer.hits[0].score;
  return element("article", { class: "card", ...identity(hit, retriever) },
    element("span", { class: "rank", "aria-hidden": "true" }, rank),
    title(hit, rank, heat ? heatHeading(heading, heat) : marked(heading, words)),
    score(hit.score, best), passage(hit, heat, words, PASSAGE), standings(hit), facts(hit));
}

function passage(hit, heat, words, length) {
  const content = heat ? heatExcerpt(hit, heat, length) : excerpt(hit, words, length);
  if (!content.length) return null;
  const code = isCode(hit.text ?? "");
  return element("p", { class: code ? "passage code" : "passage", dir: code ? "ltr" : "auto" }, content);
}

// Where a document stands in the rankings that were fused or re-ranked.
function standings(hit) {
  const parts = hit.explanation?.parts ?? [];
  if (!parts.length) return null;
  const items = parts.map(({ name, rank }) => {
    const kind = name === "candidates" ? "fused" : retrievers.find((each) => each.name === name)?.kind;
    const label = rank === null ? `not in the ranking of ${name}` : `rank ${rank} in ${name}`;
    return element("li", { "data-kind": kind ?? "fused", class: rank === null ? "absent" : null, title: visible(label) },
      element("span", { class: "dot", "aria-hidden": "true" }), element("span", { "aria-hidden": "true" }, retrieverName(name), ` ${rank ?? "\u2013"}`),
      element("span", { class: "unseen" }, visible(label)));
  });
  return element("ul", { class: "standing parts", "aria-label": "In the parts of this ranking" }, items);
}

const identity = (hit, retriever) => ({ "data-document": hit.id, "data-retriever": retriever.name, "data-kind": retriever.kind,
  onclick: (event) => { if (!event.target.closest("button") && getSelection().isCollapsed) openDocument(hit.id, retriever.name); } });

function title(hit, rank, content) {
  const retriever = (event) => event.target.closest("[data-retriever]").dataset.retriever;
  const button = element("button", { type: "button", class: "title", dir: "auto", "aria-current": state.open === hit.id ? "true" : null, onclick: (event) => openDocument(hit.id, retriever(event)) },
  element("span", { class: "unseen" }, `${rank}. `), element("span", {}, content));
  return element("h2", {}, button);
}

// Scores of fused rankings, 1 / (60 + rank), differ from the fourth decimal on.
const scoreText = (value, best = value) => value.toFixed(Math.abs(best) < 0.1 ? 4 : value < 100 ? 3 : 1).replace("-", "\u2212");

// The bar is of the best one's score; a score that is not above 0 has none.
function score(value, best) {
  const bar = element("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", `${best > 0 ? Math.max(0, Math.min(100, (100 * value) / best)) : 0}%`);
  return element("p", { class: "score" }, element("span", { class: "unseen" }, "score "), scoreText(value, best), bar);
}

const valueText = (value) => (Array.isArray(value) ? value.map(String).join(", ") : String(value));

function facts(hit) {
  const known = Object.entries(hit.metadata ?? {}).filter(([, value]) => value !== hit.title && valueText(value).trim() !== "").slice(0, 4);
  const name = element("span", { class: "id" }, others(hit.id));
  return element("p", { class: "facts" }, name, known.map(([field, value]) => element("span", {},
    element("span", { class: "field" }, `${visible(field)} `), others(cut(valueText(value), 80)))));
}

function reason(answer) {
  const held = state.filters.length > 0;
  const values = (answer.nothing_found ?? "").split("; ").slice(1).map(visible).join("; ");
  if (answer.matching === 0) return held ? `No document passes the filters${values && `; ${values}`}.` : "The index has no documents.";
  if (answer.offset) return "The results end before this page.";
  if (answer.nothing_found?.includes(": no word of the query")) return "No word of the query counts: BM25 leaves out single letters, symbols and the English stop words.";
  return held ? "No document that passes the filters shares a word with the query." : "No document shares a word with the query.";
}

function nothing(answer) {
  return element("div", { class: "empty" }, element("h2", {}, "Nothing found"), element("p", {}, reason(answer)),
    state.filters.length ? unfiltered() : null);
}

function pages(answer) {
  const depth = Math.min(limits.k ?? Infinity, named(answer.retriever).depth ?? Infinity);
  const most = Math.min(depth, answer.matching ?? Infinity);
  const next = state.from + FIRST;
  const forward = answer.hits.length === FIRST && next < most && next + FIRST <= depth;
  if (!state.from && !forward) return [];
  const go = (from) => () => {
    state.from = Math.max(0, from);
    changed({ entry: true, page: true });
    scrollTo({ top: 0, behavior: calm.matches ? "auto" : "smooth" });
  };
  const button = (name, on, from) => element("button", { type: "button", class: "tool", disabled: !on, onclick: go(from) }, name);
  return [element("nav", { class: "pages", "aria-label": "Pages" }, button("Previous", state.from > 0, state.from - FIRST),
    element("span", {}, `Page ${number(Math.floor(state.from / FIRST) + 1)}`), button("Next", forward, next))];
}

function drawColumns() {
  const chosen = retrievers.find((each) => each.name === state.retriever) ?? retrievers[0];
  const tabs = retrievers.map((each, place) => element("button", { type: "button", role: "tab", id: `tab-${place}`, "data-kind": each.kind,
    "aria-selected": String(each === chosen), "aria-controls": `column-${place}`, tabindex: each === chosen ? 0 : -1,
    onclick: () => chooseColumn(place) }, element("span", { class: "dot", "aria-hidden": "true" }), others(each.name)));
  const columns = retrievers.map((each, place) => column(each, place, each === chosen));
  byId("results").replaceChildren(element("div", { role: "tablist", "aria-label": "Rankings", onkeydown: tabKeys }, tabs),
    element("div", { class: "columns", onscroll: faded }, columns));
  fade(byId("results").querySelector(".columns"));
}

const faded = (event) => fade(event.currentTarget);

function chooseColumn(place) {
  state.retriever = retrievers[place].name;
  writeAddress();
  drawControls();
  drawResults();
  byId(`tab-${place}`)?.focus();
}

function tabKeys(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  event.stopPropagation();
  const place = retrievers.findIndex((each) => each.name === (state.retriever ?? retrievers[0].name));
  chooseColumn((Math.max(place, 0) + step + retrievers.length) % retrievers.length);
}

function column(retriever, place, chosen) {
  const words = wordsOf(state.query, retriever);
  const answer = shown.get(retriever.name);
  const time = answer ? milliseconds(answer.milliseconds.total) : "";
  const head = element("header", {}, element("h2", { id: `head-${place}` }, element("span", { class: "dot", "aria-hidden": "true" }), retrieverName(retriever.name)),
    element("p", {}, `${kindOf(retriever)}${time ? ` \u00b7 ${time}` : ""}`));
  const hits = answer?.hits.slice(0, FIRST) ?? [];
  const list = element("ol", {}, hits.map((hit, rank) => element("li", {}, smallCard(hit, rank + 1, retriever, answer, words))));
  const empty = answer && !hits.length ? element("p", { class: "none" }, "Nothing found") : null;
  return element("section", { class: `column${chosen ? " chosen" : ""}`, id: `column-${place}`, role: "tabpanel", "data-kind": retriever.kind,
    "aria-labelledby": `head-${place}` }, head, empty, list);
}

function smallCard(hit, rank, retriever, answer, words) {
  const { heading } = parts(hit);
  const heat = state.heat ? meetingsOf(hit) : null;
  return element("article", { class: "card small", ...identity(hit, retriever), onmouseenter: () => showSame(hit.id), onmouseleave: () => showSame(null),
    onfocusin: () => showSame(hit.id), onfocusout: () => showSame(null) },
  element("span", { class: "rank", "aria-hidden": "true" }, rank), smallTitle(hit, rank, heat ? heatHeading(heading, heat) : marked(heading, words)),
  passage(hit, heat, words, COMPACT), standing(hit.id, retriever));
}

function smallTitle(hit, rank, content) {
  const made = title(hit, rank, content);
  return element("h3", {}, ...made.childNodes);
}

// Where a document stands in the other lists.
function standing(id, own) {
  const badges = retrievers.filter((each) => each !== own).map((each) => {
    const answer = shown.get(each.name);
    if (!answer) return null;
    const rank = rankOf(answer, id);
    const label = rank === null ? `not among the first ${answer.hits.length} of ${each.name}` : `rank ${rank} in ${each.name}`;
    return element("li", { "data-kind": each.kind, class: rank === null ? "absent" : null, title: visible(label) },
      element("span", { class: "dot", "aria-hidden": "true" }), element("span", { "aria-hidden": "true" }, retrieverName(each.name), ` ${rank ?? "\u2013"}`),
      element("span", { class: "unseen" }, visible(label)));
  });
  return element("ul", { class: "standing", "aria-label": "In the other rankings" }, badges);
}

function showSame(id) {
  for (const each of byId("results").querySelectorAll(".card")) each.classList.toggle("same", each.dataset.document === id);
}

// A document that moves in its list glides to its new place.
function places() {
  if (calm.matches) return new Map();
  return new Map(cards().map((each) => [`${each.dataset.retriever}\n${each.dataset.document}`, each.getBoundingClientRect().top]));
}

function glide(before) {
  if (!before.size) return;
  for (const each of cards()) {
    const old = before.get(`${each.dataset.retriever}\n${each.dataset.document}`);
    const way = old === undefined ? 0 : old - each.getBoundingClientRect().top;
    if (Math.abs(way) > 1 && Math.abs(way) < 1500) {
      each.animate([{ transform: `translateY(${way}px)` }, { transform: "none" }], { duration: 220, easing: "cubic-bezier(.2,.7,.2,1)" });
    } else if (old === undefined) {
      each.animate([{ opacity: 0.2 }, { opacity: 1 }], { duration: 160 });
    }
  }
}
