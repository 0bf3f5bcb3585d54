
// --- The leaderboard: filters above the table, and a click on a method opens the curves of its setting.
const buildLeaderboard = (table) => {
  const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim()), rows = [...table.tBodies[0].rows];
  const column = (name) => heads.indexOf(name), cell = (row, name) => row.cells[column(name)].textContent.trim();
  const bar = make("form", { class: "filters", role: "search" });
  const filters = ["setting", "kind"].map((name) => {
    const list = make("select", { name }), label = make("label", {}, `${name} `);
    const values = [...new Set(rows.map((row) => cell(row, name)))];
    for (const value of ["all", ...values]) list.append(make("option", { value }, value));
    label.append(list);
    bar.append(label);
    return (row) => list.value === "all" || cell(row, name) === list.value;
  });
  const words = make("input", { name: "method", type: "search" }), label = make("label", {}, "method "), shown = make("output");
  label.append(words);
  bar.append(label, shown);
  filters.push((row) => words.value.toLowerCase().split(/[\s,]+/).some((word) => cell(row, "method").toLowerCase().includes(word)));
  const filter = () => {
    for (const row of rows) row.hidden = !filters.every((passes) => passes(row));
    const count = rows.filter((row) => !row.hidden).length;
    shown.textContent = `${count} of ${rows.length} rows`;
  };
  bar.addEventListener("input", filter);
  bar.addEventListener("submit", (event) => event.preventDefault());
  table.closest(".scroll").before(bar);
  filter();
  for (const row of rows) {
    const name = cell(row, "method"), setting = cell(row, "setting"), rounds = cell(row, "rounds");
    const curves = [...document.querySelectorAll("details.curves")].find((part) => part.dataset.curves === `${setting} ${rounds}`);
    if (!curves) continue;
    const button = make("button", { type: "button", class: "sort", title: "Show the curves of this setting" }, name);
    row.cells[0].replaceChildren(button);
    button.onclick = () => {
      curves.open = true;
      paint(name);
      curves.scrollIntoView({ block: "start", behavior: "instant" });
    };
  }
};
document.querySelectorAll(".leaderboard table").forEach(buildLeaderboard);
