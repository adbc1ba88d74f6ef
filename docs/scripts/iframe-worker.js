// Lets the search run in pages that are opened from a folder: browsers start no worker there. Such a page gets, in place of `Worker`,
// a hidden frame that runs the worker's script; messages pass between the two as to a real worker. Served pages keep real workers.
// Material's offline plugin takes this file instead of the one on another server, for its name.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      if (document.body) this.start(url);
      else document.addEventListener("DOMContentLoaded", () => this.start(url));
    }

    start(url) {
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = () => {
        this.waiting.forEach((data) => this.deliver(data));
        this.waiting = null;
      };
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `cannot load ${url}` }));
      this.frame.contentDocument.body.appendChild(script);
    }

    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.deliver(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
