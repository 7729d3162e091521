"use strict";
(() => {
  const root = document.documentElement;
  const methods = JSON.parse(document.getElementById("methods").textContent);
  const tip = document.getElementById("tip");
  const spoken = document.getElementById("spoken");
  const SVG = document.querySelector(".swatch").namespaceURI;
  const hidden = new Set();
  root.classList.add("js");

  // Tables: a button in every heading, by pointer or keyboard; rows without a number stay last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const first = Number(head.dataset.better) > 0 ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = before === first ? other : first;
        heads.forEach((each) => each.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const keyed = [...body.rows].map((row, place) => [keyOf(row, column), row, place]);
        keyed.sort(([a, , i], [b, , j]) => {
          const lost = Number(a === null) - Number(b === null);
          if (lost || a === null) return lost || i - j;
          return sign * (typeof a === "string" ? a.localeCompare(b) : a - b) || i - j;
        });
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }

  function keyOf(row, column) {
    const cell = row.cells[column];
    if (column === 0) return row.classList.contains("failed") ? null : cell.textContent.trim();
    const value = cell && cell.dataset.value !== undefined ? Number(cell.dataset.value) : NaN;
    return Number.isNaN(value) ? null : value;
  }

  // Methods: shown and hidden in every figure, and brought forward while one is pointed at.
  const chooser = document.querySelector(".chooser");
  if (chooser) {
    const boxes = [...chooser.querySelectorAll("input")];
    const parts = document.querySelectorAll("main [data-method]");
    const apply = () => {
      hidden.clear();
      for (const box of boxes) if (!box.checked) hidden.add(box.value);
      for (const part of parts) part.classList.toggle("off", hidden.has(part.dataset.method));
      hush();
    };
    const fade = (key) => {
      for (const part of document.querySelectorAll("main svg [data-method]")) {
        part.classList.toggle("faded", key !== null && part.dataset.method !== key);
      }
    };
    chooser.addEventListener("change", apply);
    chooser.addEventListener("submit", (event) => event.preventDefault());
    chooser.querySelector("button").addEventListener("click", () => {
      for (const box of boxes) box.checked = true;
      apply();
    });
    for (const box of boxes) {
      const label = box.closest("label");
      label.addEventListener("pointerenter", () => fade(box.checked ? box.value : null));
      label.addEventListener("pointerleave", () => fade(null));
    }
    const measure = () => root.style.setProperty("--bar", `${chooser.offsetHeight}px`);
    addEventListener("resize", measure);
    measure();
  }

  // Figures: the nearest mark, or all methods at the nearest place of the x-axis.
  for (const plot of document.querySelectorAll(".plot")) {
    const source = plot.querySelector("script");
    if (!source) continue;
    const svg = plot.querySelector("svg");
    const marks = JSON.parse(source.textContent);
    const byColumn = plot.dataset.by === "column";
    let at = -1;
    plot.tabIndex = 0;

    const stops = () => {
      const seen = marks.filter((mark) => !hidden.has(mark[2]));
      if (!byColumn) return seen.map((mark) => [mark]);
      const columns = new Map();
      for (const mark of seen) {
        if (!columns.has(mark[3])) columns.set(mark[3], []);
        columns.get(mark[3]).push(mark);
      }
      return [...columns.values()].sort((a, b) => a[0][0] - b[0][0]);
    };

    plot.addEventListener("pointermove", (event) => {
      const inverse = svg.getScreenCTM().inverse();
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(inverse);
      let best = null;
      let least = byColumn ? Infinity : 60;
      for (const stop of stops()) {
        const across = stop[0][0] - point.x;
        const away = byColumn ? Math.abs(across) : Math.hypot(across, stop[0][1] - point.y);
        if (away < least) [least, best] = [away, stop];
      }
      if (best) show(plot, svg, best);
      else hush();
    });
    plot.addEventListener("pointerleave", hush);
    plot.addEventListener("blur", () => { at = -1; hush(); });
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") { at = -1; hush(); }
      if (!step) return;
      const all = stops();
      if (!all.length) return;
      event.preventDefault();
      at = at < 0 ? (step > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + step));
      spoken.textContent = show(plot, svg, all[at]);
    });
  }

  function hush() {
    tip.hidden = true;
    for (const old of document.querySelectorAll(".pointer, .guide")) old.remove();
  }

  function add(svg, kind, attributes) {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    svg.append(element);
  }

  function show(plot, svg, marks) {
    hush();
    const head = document.createElement("b");
    head.textContent = marks[0][3];
    tip.replaceChildren(head);
    const several = plot.dataset.by === "column" && marks[0][2];
    if (several) add(svg, "line", { class: "guide", x1: marks[0][0], x2: marks[0][0], y1: 10, y2: svg.viewBox.baseVal.height - 42 });
    const words = [marks[0][3]];
    for (const [x, y, key, , text] of [...marks].sort((a, b) => a[1] - b[1])) {
      const line = document.createElement("span");
      if (several) {
        const dot = document.createElement("i");
        dot.style.background = methods[key][1];
        line.append(dot, `${methods[key][0]} `);
        words.push(`${methods[key][0]} ${text}`);
      } else words.push(text);
      line.append(text);
      tip.append(line);
      add(svg, "circle", { class: "pointer", cx: x, cy: y, r: several ? 4 : 6 });
    }
    tip.hidden = false;
    const place = new DOMPoint(marks[0][0], marks[0][1]).matrixTransform(svg.getScreenCTM());
    const box = tip.getBoundingClientRect();
    const width = root.clientWidth;
    let left = place.x + 14;
    if (left + box.width > width - 8) left = place.x - box.width - 14;
    left = Math.max(8, Math.min(left, width - box.width - 8));
    const top = Math.max(8, Math.min(place.y - box.height / 2, innerHeight - box.height - 8));
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${top + scrollY}px`;
    return words.join(", ");
  }

  // On paper nothing can be unfolded.
  let folded = [];
  addEventListener("beforeprint", () => {
    hush();
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const each of folded) each.open = true;
  });
  addEventListener("afterprint", () => {
    for (const each of folded) each.open = false;
  });
})();
