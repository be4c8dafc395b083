// Globs as in `--filter`: over the keys of a path, however they are printed. Matching never goes back
// further than to the last `*`, so no query can block the page.

const ONE = 1; // `?` in a key of a glob
const ANY = 2; // `*` in a key of a glob
const SPAN = "**"; // a key that stands for any number of keys

// A printed key as it is saved.
const plainKey = (text) => (text.startsWith('"') ? JSON.parse(text) : text);
const points = (key) => [...key.replaceAll("\0", "\ufffd")];

// The keys of a glob, each as characters, ONE and ANY; null if the text is not a path.
function globKeys(text) {
  const keys = [];
  const component = /"(?:[^"\\]|\\.)*"|[^/"]*/y;
  for (let end = 0; end <= text.length; end += 1) {
    component.lastIndex = end;
    const [found] = component.exec(text);
    end += found.length;
    if (!found || (end < text.length && text[end] !== "/")) return null;
    try {
      keys.push(plainKey(found));
    } catch {
      return null;
    }
  }
  return keys.map((key) => {
    if (key === SPAN) return SPAN;
    const wild = { "*": ANY, "?": ONE, "\\*": "*", "\\?": "?" };
    const parts = key.split(/(\\?[*?])/).flatMap((part, i) => (i % 2 ? [wild[part]] : [...part]));
    return parts.filter((part, i) => part !== ANY || parts[i - 1] !== ANY);
  });
}

// Whether a key matches a glob's key. After a mismatch, the last ANY takes one more character.
function isKey(glob, key) {
  let [at, star, from] = [0, -1, 0];
  for (let i = 0; i < key.length; ) {
    if (glob[at] === ANY) [star, from] = [at++, i];
    else if (at < glob.length && (glob[at] === ONE || glob[at] === key[i])) [at, i] = [at + 1, i + 1];
    else if (star < 0) return false;
    else [at, i] = [star + 1, ++from];
  }
  while (glob[at] === ANY) at += 1;
  return at === glob.length;
}

// The leaves below some folders that a glob matches. If there are none, the leaves in the modules
// that it matches.
function namedIn(tops, glob) {
  // marks[i]: the path so far can match the first i keys of the glob.
  const spanned = (marks) => {
    glob.forEach((key, i) => key === SPAN && marks[i] && (marks[i + 1] = true));
    return marks;
  };
  const after = (marks, key) => {
    const next = Array(glob.length + 1).fill(false);
    glob.forEach((own, i) => {
      if (!marks[i]) return;
      if (own === SPAN) next[i] = true;
      else if (isKey(own, key)) next[i + 1] = true;
    });
    return spanned(next);
  };
  const exact = new Set();
  const below = new Set();
  const walk = (folder, marks, inside) => {
    for (const child of folder.children) {
      const next = after(marks, child.points);
      const done = next[glob.length];
      if (child.children) walk(child, next, inside || done);
      else if (done) exact.add(child);
      else if (inside) below.add(child);
    }
  };
  for (const top of tops) walk(top, spanned([true, ...glob.map(() => false)]), false);
  return exact.size ? exact : below;
}

// Whether a query matches a leaf. A glob matches keys; if a model is saved beside its optimizer, the
// glob may omit `model`. Other text matches anywhere in a printed path.
function matcher(query) {
  if (!query) return () => true;
  if (!/[*?]/.test(query)) {
    const text = query.toLowerCase();
    return (leaf) => leaf.path.toLowerCase().includes(text);
  }
  const glob = globKeys(query);
  if (glob === null) return () => false;
  let found = namedIn([folders[0]], glob);
  const models = folders[0].children.filter((child) => child.children && child.key === "model");
  if (!found.size) found = namedIn(models, glob);
  return (leaf) => found.has(leaf);
}
