// Build the page into the Python package: `node build.mjs`. With --check, compare with what is there and write nothing.
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "src", "singletree", "inspector", "page");
const LARGEST = 200_000; // bytes of all files together

// Templates keep the indentation of their source, which htm drops when it reads them.
const withoutIndentation = {
  name: "without-indentation",
  setup({ onLoad }) {
    onLoad({ filter: /inspector[\\/]src[\\/][^\\/]+\.js$/ }, ({ path }) => ({
      contents: readFileSync(path, "utf8").replace(/\n[ \t]+/g, "\n"),
      loader: "js",
    }));
  },
};

const result = await build({
  absWorkingDir: here,
  entryPoints: { inspector: "src/main.js" },
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022", "chrome109", "firefox115", "safari16.4"],
  charset: "ascii", // An exported file is read the same whatever encoding its reader assumes.
  legalComments: "none",
  plugins: [withoutIndentation],
  write: false,
  logLevel: "warning",
  metafile: process.argv.includes("--sizes"),
});

const files = new Map(result.outputFiles.map((file) => [file.path.split(/[\\/]/).pop(), file.text]));
files.set("index.html", readFileSync(join(here, "src", "index.html"), "utf8"));

// The server puts the script inline into an exported file: nothing in it may end a script element.
const script = files.get("inspector.js");
for (const forbidden of ["</script", "<!--"]) {
  if (script.toLowerCase().includes(forbidden)) throw new Error(`inspector.js contains ${forbidden}`);
}
const bytes = [...files.values()].reduce((sum, text) => sum + Buffer.byteLength(text), 0);
if (bytes > LARGEST) throw new Error(`the page has ${bytes} bytes; at most ${LARGEST} are allowed`);

// The licences of what is in the bundle, as they ask for; beside the page, not part of it.
const licenses = [
  "The page of the inspector contains the following packages.",
  ...Object.keys(JSON.parse(readFileSync(join(here, "package.json"), "utf8")).dependencies)
    .flatMap((name) => (name === "@preact/signals" ? [name, "@preact/signals-core"] : [name]))
    .map((name) => {
      const folder = join(here, "node_modules", name);
      const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      const file = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
      const text = file ? readFileSync(join(folder, file), "utf8").trim() : "";
      return `${"-".repeat(72)}\n${name} ${version} (${license})\n\n${text}`;
    }),
];
files.set("../page_licenses.txt", `${licenses.join("\n\n")}\n`);

if (process.argv.includes("--check")) {
  const read = (name) => {
    try {
      return readFileSync(join(target, name), "utf8");
    } catch {
      return null;
    }
  };
  const old = [...files].filter(([name, text]) => read(name) !== text).map(([name]) => name);
  if (old.length) {
    console.error(`${old.join(", ")} in ${target} is not what the sources build: run \`make inspector\``);
    process.exit(1);
  }
} else {
  mkdirSync(target, { recursive: true });
  for (const [name, text] of files) writeFileSync(join(target, name), text);
}
for (const [name, text] of files) {
  if (name.startsWith("../")) continue;
  console.log(`${name} ${Buffer.byteLength(text)} bytes, ${gzipSync(text).length} compressed`);
}
console.log(`together ${bytes} bytes`);
if (result.metafile) {
  const sizes = {};
  for (const output of Object.values(result.metafile.outputs)) {
    for (const [path, input] of Object.entries(output.inputs)) {
      const name = /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1] ?? "this page";
      sizes[name] = (sizes[name] ?? 0) + input.bytesInOutput;
    }
  }
  console.log(sizes);
}
