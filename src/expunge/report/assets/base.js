"use strict";
// Theme and definitions. Every text is set as text: nothing that came from data is read as HTML.
const page = { data: JSON.parse(document.getElementById("data").textContent), redraw: [] };

page.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

page.node = (tag, properties = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "class") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
};

page.number = (value, digits = 3) =>
  value === null || value === undefined ? "not measured" : value.toFixed(digits).replace("-", "−");

{
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const names = { "": "as the system", light: "light", dark: "dark" };
  const show = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    button.querySelector("span").textContent = names[theme];
    page.redraw.forEach((draw) => draw());
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    const order = ["", "light", "dark"];
    show(order[(order.indexOf(root.dataset.theme || "") + 1) % order.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.redraw.forEach((draw) => draw()));
  let former = "";
  addEventListener("beforeprint", () => {
    former = root.dataset.theme || "";
    show("light");
  });
  addEventListener("afterprint", () => show(former));
}

{
  // A definition is shown beside its word on hover and focus, stays while the pointer is on it, and goes with Escape.
  const tip = document.getElementById("tip");
  let shown = null;
  let leaving = 0;
  const hide = () => {
    clearTimeout(leaving);
    if (shown) shown.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  };
  const place = () => {
    if (!shown) return;
    const box = shown.getBoundingClientRect();
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight || box.top < tip.offsetHeight + 8;
    tip.style.top = `${below ? box.bottom + 8 : box.top - 8 - tip.offsetHeight}px`;
    tip.style.left = `${Math.max(12, Math.min(box.left, innerWidth - tip.offsetWidth - 12))}px`;
  };
  const show = (word) => {
    const entry = document.getElementById(`def-${word.dataset.term}`);
    if (!entry) return;
    hide();
    shown = word;
    const title = page.node("b", { textContent: entry.querySelector("dt").textContent });
    tip.replaceChildren(title, ...entry.querySelector("dd").cloneNode(true).childNodes);
    tip.hidden = false;
    word.setAttribute("aria-describedby", "tip");
    place();
  };
  const leave = () => {
    clearTimeout(leaving);
    leaving = setTimeout(hide, 180);
  };
  for (const word of document.querySelectorAll(".term")) {
    word.addEventListener("mouseenter", () => show(word));
    word.addEventListener("focus", () => show(word));
    word.addEventListener("mouseleave", leave);
    word.addEventListener("blur", leave);
    word.addEventListener("click", hide);
  }
  tip.addEventListener("mouseenter", () => clearTimeout(leaving));
  tip.addEventListener("mouseleave", leave);
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
  // Moving to a word by keyboard scrolls it into view: the definition goes with it.
  addEventListener("scroll", place, { passive: true });
}
