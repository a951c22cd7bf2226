"use strict";
(() => {
  // Sorting: highest first, then lowest first, then as the report has it. What is missing stays last; equals keep their order.
  const NEXT = { none: "descending", descending: "ascending", ascending: "none" };

  // Without the key of a system and without small print.
  const name = (cell) => cell.querySelector("bdi")?.textContent ?? "";

  function order(table, place, direction) {
    const body = table.tBodies[0];
    const numeric = table.tHead.rows[0].cells[place].classList.contains("number");
    const sign = direction === "descending" ? -1 : 1;
    const value = (row) => (numeric ? row.cells[place].dataset.order : name(row.cells[place]));
    const compare = (one, other) => {
      const [a, b] = [value(one), value(other)];
      if (!a || !b) return Number(!a) - Number(!b);
      // Texts from A to Z first: that is what the first press should do to them.
      return numeric ? sign * (a - b) : -sign * a.localeCompare(b, "en", { numeric: true });
    };
    const byReport = (one, other) => one.dataset.place - other.dataset.place;
    body.append(...[...body.rows].sort(byReport).sort(direction === "none" ? byReport : compare));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tBodies[0].rows].forEach((row, place) => { row.dataset.place = place; });
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(head.firstElementChild);
      head.prepend(button);
      button.addEventListener("click", () => {
        const direction = NEXT[head.ariaSort || "none"];
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (direction !== "none") head.ariaSort = direction;
        order(table, place, direction);
      });
    });
  }

  // A table that goes on to the right says so.
  for (const box of document.querySelectorAll(".box")) {
    const mark = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(mark).observe(box);
  }

  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const isDark = () => (root.style.colorScheme ? root.style.colorScheme === "dark" : dark.matches);
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  label();
  theme.hidden = false;

  for (const button of document.querySelectorAll(".copy")) {
    const code = button.parentElement.querySelector("code");
    const say = (word) => {
      button.textContent = word;
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    };
    const select = () => {
      getSelection().selectAllChildren(code);
      say("Selected");
    };
    button.addEventListener("click", () => {
      if (!navigator.clipboard) select();
      else navigator.clipboard.writeText(code.textContent).then(() => say("Copied"), select);
    });
    button.hidden = false;
  }

  // Beside the page the contents are always open; above it they are closed until wanted.
  const contents = document.getElementById("contents");
  const wide = matchMedia("(min-width: 62.01rem)");
  const fold = () => { contents.open = wide.matches; };
  wide.addEventListener("change", fold);
  fold();
})();
