// Controls, keys and colours; then the first question, if the address has one.

function drawControls() {
  byId("controls").hidden = retrievers.length === 0;
  byId("query").placeholder = retrievers.length ? `Search ${plural(retrievers[0].documents, "document")}` : "Search";
  if (limits.query_characters) byId("query").maxLength = limits.query_characters;
  drawRetrievers();
  drawEfforts();
  byId("heat").hidden = !shownRetrievers().some((each) => ["colbert", "reranked"].includes(each.kind) && each.explains);
  byId("heat").setAttribute("aria-pressed", String(state.heat));
  const field = groupField(shownRetrievers()[0]);
  byId("group").hidden = field === null;
  byId("group").textContent = `One hit per ${field}`;
  byId("group").setAttribute("aria-pressed", String(state.grouped));
  drawFilters();
}

function drawRetrievers() {
  const box = byId("retrievers");
  const chosen = state.together ? "together" : String(retrievers.indexOf(named(state.retriever)));
  const option = (value, kind, name, key) => element("label", { "data-kind": kind, title: key ? `Key ${key}` : null },
    element("input", { type: "radio", name: "retriever", value, checked: value === chosen }),
    element("span", {}, element("span", { class: "dot", "aria-hidden": "true" }), name));
  const focused = box.contains(document.activeElement);
  const options = retrievers.map((each, place) => option(String(place), each.kind, others(each.name), place < 9 ? place + 1 : null));
  if (retrievers.length > 1) options.push(option("together", "together", "Side by side", "c"));
  box.replaceChildren(box.querySelector("legend"), ...options);
  box.hidden = retrievers.length < 2;
  const checked = box.querySelector("input:checked");
  if (focused) checked?.focus();
}

function chooseRetriever(value) {
  state.together = value === "together";
  if (!state.together) state.retriever = retrievers[Number(value)].name;
  if (state.open !== null) {
    state.open = null;
    drawReader();
  }
  changed({ entry: true });
}

function drawEfforts() {
  const efforts = [...new Set(shownRetrievers().flatMap((each) => each.efforts ?? []))];
  byId("effort-label").hidden = efforts.length === 0;
  const names = [["", "default"], ...efforts.map((each) => [each, each])];
  byId("effort").replaceChildren(...names.map(([value, name]) => element("option", { value, selected: value === (state.effort ?? "") }, name)));
}

const root = document.documentElement;
const night = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : night.matches);

function drawTheme() {
  byId("theme").setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
}

// Remembered where the browser allows it.
function switchTheme() {
  root.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("quiver-theme", root.dataset.theme);
  } catch {
    // Storage is turned off: the choice holds until the page is closed.
  }
  drawTheme();
}

function recallTheme() {
  let kept = null;
  try {
    kept = localStorage.getItem("quiver-theme");
  } catch {
    // As above.
  }
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  drawTheme();
}

function step(way) {
  if (state.open !== null) {
    stepDocument(way);
    return;
  }
  const all = cards();
  const here = document.activeElement?.closest?.("[data-document]");
  const own = here ? all.filter((each) => each.dataset.retriever === here.dataset.retriever) : all;
  const place = own.indexOf(here) + way;
  if (here && place < 0) toQuery();
  else focusCard(own[here ? Math.min(place, own.length - 1) : 0]);
}

// The same rank in the next column.
function across(way) {
  const here = document.activeElement?.closest?.("[data-document]");
  if (!here || !state.together) return;
  const columns = [...new Set(cards().map((each) => each.dataset.retriever))];
  const next = columns[columns.indexOf(here.dataset.retriever) + way];
  const of = (name) => cards().filter((each) => each.dataset.retriever === name);
  if (next) focusCard(of(next)[Math.min(of(here.dataset.retriever).indexOf(here), of(next).length - 1)]);
}

function focusCard(card) {
  card?.querySelector(".title").focus({ preventScroll: true });
  card?.scrollIntoView({ block: "nearest", behavior: calm.matches ? "auto" : "smooth" });
}

function toQuery() {
  byId("query").focus();
  byId("query").select();
  scrollTo({ top: 0, behavior: calm.matches ? "auto" : "smooth" });
}

function escape() {
  if (!byId("filter").hidden && byId("filter").contains(document.activeElement)) {
    closeFilter();
    byId("add-filter").focus();
  } else if (state.open !== null) closeDocument();
  else if (document.activeElement !== byId("query")) toQuery();
}

function toggleHeat() {
  state.heat = !state.heat;
  writeAddress({ entry: true });
  drawControls();
  drawResults();
  markOpen();
  explainSoon(0);
}

function toggleGroup() {
  state.grouped = !state.grouped;
  changed({ entry: true });
}

const KEYS = {
  "/": toQuery, j: () => step(1), k: () => step(-1), ArrowDown: () => step(1), ArrowUp: () => step(-1), ArrowLeft: () => across(-1),
  ArrowRight: () => across(1), c: () => byId("retrievers").querySelector("[value=together]")?.click(), h: () => byId("heat").hidden || toggleHeat(),
  g: () => byId("group").hidden || toggleGroup(), f: openFilter, t: switchTheme, "?": () => byId("keys").showModal(),
};

function onKey(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing || byId("keys").open) return;
  if (event.key === "Escape") {
    event.preventDefault();
    escape();
    return;
  }
  const typing = isTyping(event.target);
  if (typing && !(event.target === byId("query") && event.key === "ArrowDown")) return;
  // Arrows scroll the text of an open document, as everywhere.
  if (event.key.startsWith("Arrow") && state.open !== null) return;
  // What lies under a sheet is out of reach.
  if (byId("sheet").open && !["j", "k", "t", "?"].includes(event.key)) return;
  const act = /^[1-9]$/.test(event.key) ? () => byId("retrievers").querySelector(`[value="${event.key - 1}"]`)?.click() : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function show() {
  readAddress();
  byId("query").value = state.query;
  if (!retrievers.length) return;
  drawControls();
  drawReader();
  run();
}

byId("query").addEventListener("input", (event) => {
  state.query = event.target.value;
  if (state.open !== null) {
    state.open = null;
    drawReader();
  }
  if (!event.isComposing) changed({ wait: REST });
});
byId("query").addEventListener("compositionend", () => changed({ wait: REST }));
byId("asking").addEventListener("submit", (event) => {
  event.preventDefault();
  changed({ entry: true });
});
byId("retrievers").addEventListener("change", (event) => chooseRetriever(event.target.value));
byId("effort").addEventListener("change", (event) => {
  state.effort = event.target.value || null;
  changed({ entry: true });
});
byId("heat").addEventListener("click", toggleHeat);
byId("group").addEventListener("click", toggleGroup);
byId("add-filter").addEventListener("click", () => (byId("filter").hidden ? openFilter() : closeFilter()));
byId("filter-field").addEventListener("change", drawRelations);
byId("filter-operator").addEventListener("change", () => drawValueHint(fieldsOf(shownRetrievers()).get(byId("filter-field").value) ?? "string"));
byId("filter").addEventListener("submit", (event) => { event.preventDefault(); submitFilter(); });
byId("skip").addEventListener("click", () => (cards()[0] ? focusCard(cards()[0]) : byId("main").focus()));
byId("theme").addEventListener("click", switchTheme);
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("sheet").addEventListener("cancel", (event) => { event.preventDefault(); closeDocument(); });
byId("sheet").addEventListener("click", (event) => { if (event.target === byId("sheet")) closeDocument(); });
night.addEventListener("change", drawTheme);
roomy.addEventListener("change", () => { if (state.open !== null) drawReader(); });
addEventListener("keydown", onKey);
addEventListener("resize", () => document.querySelectorAll(".columns").forEach(fade));
addEventListener("popstate", show);
addEventListener("online", comeBack);
// What stays below the top stays there however many filters there are.
new ResizeObserver(([top]) => root.style.setProperty("--below", `${top.target.offsetHeight}px`)).observe(document.querySelector(".top"));
byId("facets").open = matchMedia("(min-width: 44rem)").matches;
recallTheme();
readAddress();
byId("query").value = state.query;
begin();
