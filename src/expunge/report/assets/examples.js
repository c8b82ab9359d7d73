// The table of examples: filter, sort, and the tokens of one example.
if (document.getElementById("table")) {
  const table = document.getElementById("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const find = document.getElementById("find");
  const verdict = document.getElementById("verdict");
  const sort = document.getElementById("sort");
  const down = document.getElementById("down");
  const count = document.getElementById("count");
  const texts = new Set(["id", "verdict"]);
  const tau = page.data.tau;

  const close = (row) => {
    const button = row.querySelector(".open");
    if (!button || button.getAttribute("aria-expanded") === "false") return;
    button.setAttribute("aria-expanded", "false");
    row.nextElementSibling.remove();
  };

  const compare = (key, sign) => (one, other) => {
    const [a, b] = [one.dataset[key], other.dataset[key]];
    // What was not measured comes last, whichever way the rest is sorted.
    if (a === "" || b === "") return (a === "") - (b === "");
    const order = texts.has(key) ? a.localeCompare(b, undefined, { numeric: true }) : Number(a) - Number(b);
    return sign * order || Number(one.dataset.index) - Number(other.dataset.index);
  };

  const update = () => {
    rows.forEach(close);
    rows.sort(compare(sort.value, down.checked ? -1 : 1));
    body.append(...rows);
    const wanted = find.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const named = `${row.dataset.id} ${row.dataset.hash || ""}`.toLowerCase().includes(wanted);
      row.hidden = !(named && (!verdict.value || row.dataset.verdict === verdict.value));
      row.style.display = row.hidden ? "none" : "";
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = `${shown} shown`;
    for (const button of table.querySelectorAll("[data-sort]")) {
      const active = button.dataset.sort === sort.value;
      button.closest("th").setAttribute("aria-sort", active ? (down.checked ? "descending" : "ascending") : "none");
    }
  };

  const strip = (title, margins, words, say) => {
    const list = page.node("ol", { class: words ? "strip words" : "strip", "aria-label": title });
    margins.forEach((margin, index) => {
      const side = margin === null ? "none" : margin > tau ? "up" : "down";
      const item = page.node("li", { class: side, tabIndex: index ? -1 : 0 });
      const state = margin === null ? "not measured" : `margin ${page.number(margin, 2)}, ${side === "up" ? "above" : "not above"} τ`;
      item.setAttribute("aria-label", `token ${index + 1}: ${state}`);
      item.textContent = words ? words[index].replaceAll("\n", "↵") : "";
      if (margin !== null) item.style.setProperty("--p", `${Math.round(10 + 62 * Math.min(1, Math.abs(margin - tau) / 8))}%`);
      item.addEventListener("focus", () => say(index));
      item.addEventListener("mouseenter", () => say(index));
      list.append(item);
    });
    list.addEventListener("keydown", (event) => {
      const items = [...list.children];
      const place = items.indexOf(document.activeElement);
      const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: items.length - 1 }[event.key];
      if (next === undefined || !items[next]) return;
      event.preventDefault();
      items.forEach((item, index) => (item.tabIndex = index === next ? 0 : -1));
      items[next].focus();
    });
    return list;
  };

  const above = (margins) => `${margins.filter((one) => one !== null && one > tau).length} of ${margins.length} above τ`;

  const open = (row, button) => {
    const found = page.data.tokens[row.dataset.index];
    const readout = page.node("p", { class: "readout", textContent: "Point at a token, or move with the arrow keys." });
    const say = (index) => {
      const parts = ["before", "after"].filter((when) => found[when]).map((when) => `${when} ${page.number(found[when][index], 2)}`);
      readout.textContent = `token ${index + 1}${found.words ? ` “${found.words[index]}”` : ""}: margin ${parts.join(", ")} (τ ${page.number(tau, 2)})`;
    };
    const box = page.node("div", { class: "strips", role: "group", "aria-label": `Tokens of ${row.dataset.id}` });
    for (const when of ["before", "after"]) {
      box.append(page.node("h4", { textContent: when }));
      if (found[when]) box.append(strip(`Tokens ${when}: ${above(found[when])}`, found[when], found.words, say));
      else box.append(page.node("p", { class: "missing", textContent: "not measured" }));
    }
    box.append(readout);
    box.append(page.node("div", { class: "scale" }, "forgotten", page.node("i", { "aria-hidden": "true" }), "known; a bar on top: margin above τ"));
    const cell = page.node("td", { colSpan: 6 }, box);
    row.after(page.node("tr", { class: "detail" }, cell));
    button.setAttribute("aria-expanded", "true");
  };

  for (const row of rows) {
    const button = row.querySelector(".open");
    if (!button) continue;
    button.addEventListener("click", () => (button.getAttribute("aria-expanded") === "true" ? close(row) : open(row, button)));
  }
  for (const button of table.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      down.checked = sort.value === button.dataset.sort ? !down.checked : false;
      sort.value = button.dataset.sort;
      update();
    });
  }
  table.closest("section").querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  find.addEventListener("input", update);
  [verdict, sort, down].forEach((control) => control.addEventListener("change", update));
}
