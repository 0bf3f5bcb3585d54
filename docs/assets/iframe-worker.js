// Browsers refuse workers in pages that were opened from a disk, and the search runs in a worker. This stands in for
// `Worker` on such pages: the script runs in a hidden frame of the same page instead of in a thread of its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
      const scope = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source === scope) this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
      scope.document.open();
      scope.document.write(
        "<script>postMessage = (data) => parent.postMessage(data, '*');" +
          "importScripts = async (...urls) => { for (const src of urls) await new Promise((done) =>" +
          " document.head.append(Object.assign(document.createElement('script'), { src, onload: done }))) };" +
          `</script><script src="${url}"></script>`,
      );
      scope.document.close();
      this.ready = new Promise((done) => scope.addEventListener("load", done));
      this.addEventListener("message", (event) => this.onmessage?.(event));
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
