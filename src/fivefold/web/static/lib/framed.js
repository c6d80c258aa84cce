// A page that stands for itself may lie in a frame, of documentation for example: it shows its view alone, tells the page
// around it how high it is, and is light or dark as that page is.
const root = document.documentElement;

export function settleInFrame(views) {
  if (window.parent === window) return;
  root.dataset.framed = views.length > 1 && !location.hash ? "tabs" : "one";
  const tell = message => window.parent.postMessage({ fivefold: message }, "*");  // nothing secret: a height
  addEventListener("message", event => {
    const theme = event.source === window.parent && event.data?.fivefold?.theme;
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  });
  new ResizeObserver(() => tell({ height: document.body.offsetHeight })).observe(document.body);
}
