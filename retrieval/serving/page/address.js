// What the page shows, and the fragment of its address that says so: the address of a page is the page. A fragment is never sent anywhere;
// an address that browsers and other pages make, such as ?q=TEXT, is read too, until the first change.

const FIRST = 10; // results of a page

const state = {
  query: "",
  retriever: null, // name
  together: false, // all retrievers side by side
  filters: [], // as the service reads them, such as year >= 2015
  effort: null,
  heat: true,
  grouped: false, // one hit per file
  from: 0, // results before this page
  open: null, // id of the document that is read
};

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1) || location.search);
  state.query = given.get("q") ?? "";
  state.retriever = given.get("in");
  state.together = given.get("view") === "together";
  state.filters = given.getAll("filter");
  state.effort = given.get("effort");
  state.heat = given.get("heat") !== "off";
  state.grouped = given.get("group") === "on";
  state.from = Math.max(0, Number.parseInt(given.get("from"), 10) || 0);
  state.open = given.get("document");
}

// Typing changes the entry of the history that there is; what is chosen by hand makes a new one, so that Back goes back to it.
function writeAddress({ entry = false } = {}) {
  const kept = new URLSearchParams();
  if (state.query) kept.set("q", state.query);
  if (state.retriever !== null && state.retriever !== retrievers[0]?.name) kept.set("in", state.retriever);
  if (state.together) kept.set("view", "together");
  state.filters.forEach((each) => kept.append("filter", each));
  if (state.effort !== null) kept.set("effort", state.effort);
  if (!state.heat) kept.set("heat", "off");
  if (state.grouped) kept.set("group", "on");
  if (state.from) kept.set("from", state.from);
  if (state.open !== null) kept.set("document", state.open);
  const fragment = kept.toString();
  if (fragment === location.hash.slice(1) && !location.search) return;
  const address = `${location.pathname}${fragment ? `#${fragment}` : ""}`;
  history[entry ? "pushState" : "replaceState"](null, "", address);
  document.title = state.query ? `${visible(state.query)} · Quiver search` : "Quiver search";
}
