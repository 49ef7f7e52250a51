"use strict";
// Comfort alone: without it every row is shown, in the order of the page.

for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const headers = [...table.querySelectorAll("th[data-column]")];
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent.trim();
    const number = Number(text);
    return text !== "" && Number.isFinite(number) ? number : text;
  };
  for (const header of headers) {
    const button = document.createElement("button");
    button.type = "button";
    button.ariaLabel = `Sort by ${header.textContent.trim()}`;
    header.append(" ", button);
    header.addEventListener("click", () => {
      const column = Number(header.dataset.column);
      const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
      const compare = (a, b) => {
        if (typeof a === typeof b) return (a < b ? -1 : a > b ? 1 : 0) * direction;
        return typeof a === "number" ? -1 : 1; // what is no number stays at the end
      };
      const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
      rows.sort((a, b) => compare(a[0], b[0]));
      body.append(...rows.map((pair) => pair[1]));
    });
  }
}

for (const table of document.querySelectorAll("table[data-rows]")) {
  const shown = Number(table.dataset.rows);
  const total = table.tBodies[0].rows.length;
  if (total <= shown + 3) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "more";
  const fold = (folded) => {
    table.classList.toggle("folded", folded);
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? `Show all ${total}` : `Show the first ${shown}`;
  };
  button.addEventListener("click", () => fold(!table.classList.contains("folded")));
  table.closest(".scroll").after(button);
  fold(true);
}
