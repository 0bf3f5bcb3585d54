// Adds the links that save a figure; the page is complete without them.
"use strict";
for (const place of document.querySelectorAll(".get")) {
  const svg = place.closest("figure").querySelector("figure > svg");
  const name = place.dataset.name;

  // The drawing by itself: the light theme's colours, on white, at its natural size in points.
  const alone = () => {
    const copy = svg.cloneNode(true);
    const { width, height } = svg.viewBox.baseVal;
    copy.setAttribute("width", width + "pt");
    copy.setAttribute("height", height + "pt");
    const text = new XMLSerializer().serializeToString(copy).replace(/var\(--[\w-]+, (#\w+)\)/g, "$1");
    const end = text.indexOf(">") + 1;
    return text.slice(0, end) + '<rect width="100%" height="100%" fill="#fff"/>' + text.slice(end);
  };
  const save = (blob, ending) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name + "." + ending;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const svgBlob = () => new Blob([alone()], { type: "image/svg+xml" });
  const savePng = () => {
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      const { width, height } = svg.viewBox.baseVal;
      canvas.width = width * 3;
      canvas.height = height * 3;
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => save(blob, "png"));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(alone());
  };
  for (const [label, act] of [["SVG", () => save(svgBlob(), "svg")], ["PNG", savePng]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.setAttribute("aria-label", "Save the figure " + name + " as " + label);
    button.onclick = act;
    place.append(button);
  }
}
