// Views in frames: each tells how high it is, and gets to know whether the page is dark.
const frames = () => document.querySelectorAll("figure.widget iframe");
const theme = () => document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
const tell = target => target.postMessage({ fivefold: { theme: theme() } }, "*");

addEventListener("message", event => {
  const frame = [...frames()].find(one => one.contentWindow === event.source), height = Number(event.data?.fivefold?.height);
  if (!frame || !Number.isFinite(height)) return;
  if (height > 0) frame.height = Math.min(760, Math.ceil(height) + 2);  // what is higher scrolls
  tell(event.source);
});
new MutationObserver(() => frames().forEach(one => tell(one.contentWindow)))
  .observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
