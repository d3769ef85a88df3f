/* Browsers start no web worker from a page that was opened as a file, and the search is one. Here the worker's script runs in
   a hidden frame instead, and messages pass as they would to and from a worker. The search looks for `IFrameWorker`. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      const inside = frame.contentWindow;
      const waiting = [];
      let ready = false;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.postMessage = data => {
        if (ready) inside.dispatchEvent(new inside.MessageEvent("message", { data }));
        else waiting.push(data);
      };
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = () => {
        ready = true;
        waiting.splice(0).forEach(this.postMessage);
      };
      script.onerror = () => this.dispatchEvent(new Event("error"));
      frame.contentDocument.head.append(script);
      this.terminate = () => frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
