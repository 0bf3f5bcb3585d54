// Values under the pointer, legends that hide and highlight series, sortable tables, saved figures.
// The page is complete without this script. A live page calls enhance() again on its new parts.
"use strict";
const hidden = new Set(); // names of series that are not shown, on the whole page
let shownOnly = "";
const make = (name, attributes = {}, text = "") => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
const draw = (parent, name, attributes) => {
  const element = parent.appendChild(document.createElementNS(parent.namespaceURI, name));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

// --- Legends: a click hides or shows a series in every figure, a double click shows it alone.
const paint = (highlighted = "") => {
  for (const part of document.querySelectorAll("[data-series]")) {
    part.classList.toggle("off", hidden.has(part.dataset.series));
    part.classList.toggle("dim", highlighted !== "" && part.dataset.series !== highlighted && !part.matches("figure"));
  }
  for (const button of document.querySelectorAll(".legend button")) {
    button.setAttribute("aria-pressed", String(!hidden.has(button.parentElement.dataset.name)));
  }
};
const buildLegend = (list) => {
  const names = [...list.children].map((item) => item.dataset.name);
  for (const item of list.children) {
    const { name } = item.dataset;
    const button = make("button", { type: "button", title: "Click to hide or show; double-click to show only this" });
    button.append(...item.childNodes);
    button.onclick = () => {
      if (!hidden.delete(name)) hidden.add(name);
      paint();
    };
    button.ondblclick = () => {
      const alone = shownOnly === name;
      for (const other of names) hidden[alone || other === name ? "delete" : "add"](other);
      shownOnly = alone ? "" : name;
      paint();
    };
    button.onpointerenter = button.onfocus = () => paint(hidden.has(name) ? "" : name);
    button.onpointerleave = button.onblur = () => paint();
    item.append(button);
  }
};

// --- Values under the pointer, a finger or the arrow keys.
const number = (value) => Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
const xsOf = (series) => Array.isArray(series.x) ? series.x : series.y.map((_, index) => series.x + index);
const colourOf = (svg, name) => {
  const path = svg.querySelector(`[data-series="${CSS.escape(name)}"] path[style*="stroke:"]`);
  return path ? path.style.stroke : "currentColor";
};
const addReadout = (figure) => {
  const svg = figure.querySelector(":scope > svg"), data = svg && svg.querySelector(":scope > metadata");
  const panels = data ? JSON.parse(data.textContent) : [];
  if (!panels.length) return;
  const tip = figure.appendChild(make("div", { class: "tip", role: "status", hidden: "" }));
  const marks = draw(svg, "g", { class: "marks", "pointer-events": "none" });
  const clear = () => {
    tip.hidden = true;
    marks.replaceChildren();
  };
  const place = (panel, x) => {
    const [left, , right] = panel.box, [low, high] = panel.x;
    return left + (x - low) / (high - low) * (right - left);
  };
  const height = (panel, y) => {
    const [, top, , bottom] = panel.box, [low, high] = panel.log ? panel.y.map(Math.log) : panel.y;
    return bottom - ((panel.log ? Math.log(y) : y) - low) / (high - low) * (bottom - top);
  };
  const visible = (panel) => panel.series.filter((series) => !hidden.has(series.name));
  let current = panels[0], at = null, row = 0;

  const places = (panel) => [...new Set(visible(panel).flatMap(xsOf))].sort((a, b) => a - b);
  const show = (lines, x, y) => {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    tip.classList.toggle("many", lines.length > 14);
    const box = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const middle = box.left - outer.left + x * scale, { offsetWidth: width } = tip;
    const right = middle + 12 + width <= outer.width - 4;
    tip.style.left = Math.max(4, Math.min(right ? middle + 12 : middle - 12 - width, outer.width - width - 4)) + "px";
    tip.style.top = Math.max(4, box.top - outer.top + y * scale) + "px";
  };
  const showValues = (panel, x) => {
    const values = visible(panel).flatMap((series) => {
      const index = xsOf(series).indexOf(x);
      return index < 0 || series.y[index] === null ? [] : [{ series, index, y: series.y[index] }];
    }).sort((a, b) => b.y - a.y);
    const where = place(panel, x);
    marks.replaceChildren();
    draw(marks, "path", { d: `M${where} ${panel.box[1]}V${panel.box[3]}`, class: "cursor" });
    const lines = values.map(({ series, index, y }) => {
      const colour = colourOf(svg, series.name), line = make("div");
      const spread = series.low && series.low[index] !== null ? ` (${number(series.low[index])} – ${number(series.high[index])})` : "";
      draw(marks, "circle", { cx: where, cy: height(panel, y), r: 3.5 }).style.fill = colour;
      line.append(make("i", { "aria-hidden": "true" }), make("span", {}, series.name), make("b", {}, number(y)), make("small", {}, spread));
      line.firstChild.style.background = colour;
      return line;
    });
    show([make("strong", {}, `${panel.name} ${number(x)}`), ...lines], where, panel.box[3] + 3);
  };
  const showCell = (panel, x) => {
    let [value, rest] = [null, x - Math.ceil(panel.x[0])];
    for (const [cell, count] of panel.cells[row]) {
      if (rest < count) { value = cell; break; }
      rest -= count;
    }
    const where = place(panel, x), step = (panel.box[3] - panel.box[1]) / panel.rows.length, y = panel.box[1] + row * step;
    const wide = Math.max(2, (panel.box[2] - panel.box[0]) / (panel.x[1] - panel.x[0]));
    marks.replaceChildren();
    draw(marks, "rect", { x: where - wide / 2, y, width: wide, height: step, class: "cursor" });
    const held = value === null ? "not recorded" : `least coverage ${value}`;
    show([make("strong", {}, `${panel.name} ${x}`), make("div", {}, panel.rows[row]), make("div", {}, held)], where, y + step);
  };
  const update = () => current.rows ? showCell(current, at) : showValues(current, at);

  const point = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const inside = (panel) => y >= panel.box[1] - 8 && y <= panel.box[3] + 8 && x >= panel.box[0] - 12 && x <= panel.box[2] + 12;
    const panel = panels.find(inside);
    if (!panel) return clear();
    const [left, top, right, bottom] = panel.box;
    const value = panel.x[0] + (x - left) / (right - left) * (panel.x[1] - panel.x[0]);
    current = panel;
    if (panel.rows) {
      row = Math.max(0, Math.min(panel.rows.length - 1, Math.floor((y - top) / (bottom - top) * panel.rows.length)));
      at = Math.max(Math.ceil(panel.x[0]), Math.min(Math.floor(panel.x[1]), Math.round(value)));
    } else {
      const known = places(panel);
      if (!known.length) return clear();
      at = known.reduce((best, x) => Math.abs(x - value) < Math.abs(best - value) ? x : best);
    }
    update();
  };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear());
  svg.addEventListener("blur", clear);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Escape") clear();
    if (!move) return;
    event.preventDefault();
    if (current.rows) {
      if (at === null) at = Math.ceil(current.x[0]);
      else if (event.key.endsWith("p") || event.key.endsWith("n")) row = Math.max(0, Math.min(current.rows.length - 1, row + move));
      else at = Math.max(Math.ceil(current.x[0]), Math.min(Math.floor(current.x[1]), at + move));
    } else {
      const known = places(current), index = known.indexOf(at);
      if (!known.length) return;
      at = known[index < 0 ? known.length - 1 : Math.max(0, Math.min(known.length - 1, index + move))];
    }
    update();
  });
};

// --- Tables: a click on a header sorts; wide ones get a hint that they scroll.
const numeric = (text) => {
  const plain = text.trim().replace(/^< /, "").replaceAll("−", "-").replaceAll(",", "");
  return /^[-+]?[\d.]/.test(plain) ? parseFloat(plain) : NaN;
};
const sortBy = (table, column, direction) => {
  const body = table.tBodies[0], cell = (row) => row.cells[column].textContent;
  const rows = [...body.rows], blank = (row) => /^\s*[–—]?\s*$/.test(cell(row));
  const numbers = rows.every((row) => blank(row) || !Number.isNaN(numeric(cell(row))));
  const order = numbers ? (a, b) => numeric(cell(a)) - numeric(cell(b)) : (a, b) => cell(a).localeCompare(cell(b), "en", { numeric: true });
  rows.sort((a, b) => blank(a) - blank(b) || direction * order(a, b));
  body.append(...rows);
  [...table.tHead.rows[0].cells].forEach((head, index) => {
    if (index === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
};
const buildTable = (table) => {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = make("button", { type: "button", class: "sort", title: "Sort by this column" });
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => sortBy(table, column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1);
  });
  const box = table.closest(".scroll");
  if (box) new ResizeObserver(() => box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1)).observe(box);
};

// --- Saved figures: the light theme's colours, on white, at the natural size in points, with the visible legend.
const addButtons = (place) => {
  const figure = place.closest("figure"), svg = figure.querySelector(":scope > svg"), { name } = place.dataset;
  const alone = () => {
    const copy = svg.cloneNode(true), { width } = svg.viewBox.baseVal;
    let { height } = svg.viewBox.baseVal;
    copy.querySelectorAll("metadata, .marks, .off").forEach((part) => part.remove());
    const legend = figure.querySelector(".legend") || document.querySelector(".legend.shared");
    for (const item of figure.hasAttribute("data-legend") && legend ? legend.querySelectorAll("li") : []) {
      if (hidden.has(item.dataset.name)) continue;
      const line = copy.appendChild(item.querySelector("path").cloneNode());
      line.setAttribute("transform", `translate(8 ${height + 3})`);
      draw(copy, "text", { x: 46, y: height + 12, "font-size": 12 }).textContent = item.textContent;
      height += 17;
    }
    copy.setAttribute("viewBox", `0 0 ${width} ${height + 4}`);
    copy.setAttribute("width", width + "pt");
    copy.setAttribute("height", height + 4 + "pt");
    const style = getComputedStyle(document.documentElement);
    const light = (_, variable, value) => value || style.getPropertyValue(variable).trim();
    const text = new XMLSerializer().serializeToString(copy).replace(/var\((--[\w-]+)(?:, (#\w+))?\)/g, light);
    const end = text.indexOf(">") + 1;
    return { text: text.slice(0, end) + '<rect width="100%" height="100%" fill="#fff"/>' + text.slice(end), width, height: height + 4 };
  };
  const save = (blob, ending) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: `${name}.${ending}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const savePng = () => {
    const { text, width, height } = alone(), image = new Image();
    image.onload = () => {
      const canvas = Object.assign(document.createElement("canvas"), { width: width * 3, height: height * 3 });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(blob, "png"));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
  };
  const saveSvg = () => save(new Blob([alone().text], { type: "image/svg+xml" }), "svg");
  for (const [label, act] of [["SVG", saveSvg], ["PNG", savePng]]) {
    const button = make("button", { type: "button", "aria-label": `Save the figure ${name} as ${label}` }, label);
    button.onclick = act;
    place.append(button);
  }
};

const enhance = (root) => {
  root.querySelectorAll(".legend").forEach(buildLegend);
  root.querySelectorAll("figure").forEach(addReadout);
  root.querySelectorAll(".scroll > table").forEach(buildTable);
  root.querySelectorAll(".get").forEach(addButtons);
  paint();
};
enhance(document);
