// A page that is opened from the disk may start no Worker, and search runs in one. This one is a hidden frame: the same
// script, the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inner = frame.contentWindow;
      const load = url => new Promise((done, failed) => {
        const script = this.inner.document.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = done;
        script.onerror = failed;
        this.inner.document.documentElement.append(script);
      });
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = async (...urls) => { for (const url of urls) await load(url); };
      load(address).then(() => {
        for (const data of this.waiting) this.send(data);
        this.waiting = null;
      });
    }
    send(data) { this.inner.dispatchEvent(new MessageEvent("message", { data })); }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.send(data);
    }
    terminate() {}
  };
}
