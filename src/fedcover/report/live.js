// Keeps a live page up to date, without a reload: what is hidden, sorted, unfolded and scrolled stays.
"use strict";
const labelOf = (element) => element.getAttribute("aria-label");
const sorted = () => [...document.querySelectorAll("th[aria-sort]")].map((head) => ({
  label: labelOf(head.closest(".scroll")), header: head.textContent, direction: head.ariaSort === "ascending" ? 1 : -1,
}));
const replaceMain = (html) => {
  const sorts = sorted(), top = scrollY, focused = document.activeElement.closest(".legend li")?.dataset.name;
  const folds = new Map([...document.querySelectorAll("details")].map((fold, index) => [index, fold.open]));
  const scrolls = new Map([...document.querySelectorAll(".scroll")].map((box) => [labelOf(box), [box.scrollLeft, box.scrollTop]]));
  const same = document.querySelectorAll("details").length;
  const page = new DOMParser().parseFromString(html, "text/html").querySelector("main");
  document.querySelector("main").replaceWith(page);
  enhance(page);
  const unfolded = [...page.querySelectorAll("details")];
  if (unfolded.length === same) unfolded.forEach((fold, index) => { fold.open = folds.get(index); });
  for (const box of page.querySelectorAll(".scroll")) {
    for (const { label, header, direction } of sorts) {
      const column = [...box.querySelectorAll("thead th")].findIndex((head) => head.textContent === header);
      if (label === labelOf(box) && column >= 0) sortBy(box.querySelector("table"), column, direction);
    }
    [box.scrollLeft, box.scrollTop] = scrolls.get(labelOf(box)) || [0, 0];
  }
  if (focused) page.querySelector(`.legend li[data-name="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
  scrollTo(0, top);
};
const fillPart = (html) => {
  const part = document.getElementById("part");
  if (!part) return;
  const left = part.querySelector(".scroll")?.scrollLeft || 0;
  part.innerHTML = html;
  if (left) part.querySelector(".scroll").scrollLeft = left;
};
let version = Number(document.body.dataset.version);
const follow = async () => {
  let pause = 1000;
  try {
    const status = await (await fetch("/status")).json();
    if (status.version !== version && !document.querySelector(".tip:not([hidden])")) {
      const next = await (await fetch("/main")).json();
      replaceMain(next.main);
      version = next.version;
    }
    document.getElementById("live").innerHTML = status.panel;
    fillPart(status.part);
    if (status.done) pause = 5000;
  } catch {
    document.getElementById("live").textContent = "The watching command has ended; this is its last state.";
    pause = 5000;
  }
  setTimeout(follow, pause);
};
follow();
